"""Penalties that pull a model's weights and affinities towards orthogonality."""

from wellposed.penalize._logged import summed_terms as summed_terms
from wellposed.penalize._penalty import OrthogonalityPenalty as OrthogonalityPenalty
from wellposed.penalize._penalty import Strength as Strength
from wellposed.penalize._terms import FORMS as FORMS
from wellposed.penalize._trainer import large_penalty as large_penalty
