"""Attacks: Lipschitz constants from below, by ascent over inputs."""

import importlib
import warnings

from wellposed.attack._inputs import Call as Call
from wellposed.attack._inputs import activation_dtype as activation_dtype
from wellposed.attack._inputs import in_dtype as in_dtype
from wellposed.attack._inputs import perturbation_size as perturbation_size
from wellposed.attack._inputs import reads_pairs as reads_pairs
from wellposed.attack._inputs import steepest_direction as steepest_direction
from wellposed.attack._lower_bound import LowerBound as LowerBound
from wellposed.attack._lower_bound import lipschitz_lower_bound as lipschitz_lower_bound
from wellposed.call_checks import explain_failures_of

explain_failures_of(__name__)


def __getattr__(name: str) -> object:
    if name not in ("WordAttack", "WordSwaps"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"use wellposed.words.{name}", FutureWarning, stacklevel=2)
    return getattr(importlib.import_module("wellposed.words"), name)
