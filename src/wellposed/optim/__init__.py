"""Optimizers whose step holds a norm ball: Scion. Where torch has one (Muon), use torch's."""

from wellposed.optim._balls import BALLS as BALLS
from wellposed.optim._balls import Ball as Ball
from wellposed.optim._scion import Scion as Scion
