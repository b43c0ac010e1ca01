"""Maps with an inverse: residuals of a contraction, and stacks of them."""

from wellposed.nn.invertible._blocks import InvertibleResidual as InvertibleResidual
from wellposed.nn.invertible._blocks import ReversibleSequential as ReversibleSequential
from wellposed.nn.invertible._blocks import frozen as frozen
from wellposed.nn.invertible._blocks import refuse_randomness as refuse_randomness
from wellposed.nn.invertible._inversion import Inversion as Inversion
from wellposed.nn.invertible._inversion import LogDeterminant as LogDeterminant
from wellposed.nn.invertible._inversion import evaluated as evaluated
from wellposed.nn.invertible._inversion import with_error_bound as with_error_bound
