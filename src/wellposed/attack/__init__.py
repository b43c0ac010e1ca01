"""Attacks: Lipschitz constants from below, by ascent over inputs."""

from wellposed.attack._inputs import Call as Call
from wellposed.attack._inputs import activation_dtype as activation_dtype
from wellposed.attack._inputs import in_dtype as in_dtype
from wellposed.attack._inputs import perturbation_size as perturbation_size
from wellposed.attack._inputs import reads_pairs as reads_pairs
from wellposed.attack._inputs import rounding_unit as rounding_unit
from wellposed.attack._inputs import steepest_direction as steepest_direction
from wellposed.attack._lower_bound import LowerBound as LowerBound
from wellposed.attack._lower_bound import lipschitz_lower_bound as lipschitz_lower_bound
from wellposed.call_checks import explain_failures_of
from wellposed.removed_names import removed_names

explain_failures_of(__name__)

__getattr__ = removed_names(
    __name__, {name: f"use wellposed.words.{name}" for name in ("WordAttack", "WordSwaps")}
)
