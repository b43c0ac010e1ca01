"""Maps with an inverse: residuals of a contraction, and stacks of them."""

from wellposed.nn.invertible._conditions import refuse_randomness as refuse_randomness
from wellposed.nn.invertible._inversion import Inversion as Inversion
from wellposed.nn.invertible._inversion import LogDeterminant as LogDeterminant
from wellposed.nn.invertible._inversion import evaluated as evaluated
from wellposed.nn.invertible._inversion import with_error_bound as with_error_bound
from wellposed.nn.invertible._residual import InvertibleResidual as InvertibleResidual
from wellposed.nn.invertible._reversible import ReversibleSequential as ReversibleSequential
