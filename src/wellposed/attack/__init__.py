"""Attacks: Lipschitz constants from below, by ascent over inputs."""

from wellposed.attack._inputs import Call as Call
from wellposed.attack._inputs import PatchGrid as PatchGrid
from wellposed.attack._inputs import activation_dtype as activation_dtype
from wellposed.attack._inputs import in_dtype as in_dtype
from wellposed.attack._inputs import patch_grid as patch_grid
from wellposed.attack._inputs import perturbation_size as perturbation_size
from wellposed.attack._inputs import reads_pairs as reads_pairs
from wellposed.attack._inputs import steepest_direction as steepest_direction
from wellposed.attack._lower_bound import LowerBound as LowerBound
from wellposed.attack._lower_bound import lipschitz_lower_bound as lipschitz_lower_bound
from wellposed.attack._words import Propose as Propose
from wellposed.attack._words import WindowSwaps as WindowSwaps
from wellposed.attack._words import WordAttack as WordAttack
from wellposed.attack._words import WordSwaps as WordSwaps
from wellposed.tensor_calls import explain_failures_of

explain_failures_of(__name__)
