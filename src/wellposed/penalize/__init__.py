"""Penalties that pull a model's weights and affinities towards orthogonality."""

from wellposed.penalize._forms import FORMS as FORMS
from wellposed.penalize._logged import summed_terms as summed_terms
from wellposed.penalize._penalty import OrthogonalityPenalty as OrthogonalityPenalty
from wellposed.penalize._penalty import Strength as Strength
from wellposed.penalize._roles import PENALISED_ROLES as PENALISED_ROLES
from wellposed.penalize._roles import PenalisedRole as PenalisedRole
from wellposed.penalize._roles import RoleOptions as RoleOptions
from wellposed.penalize._roles import attention_weights as attention_weights
from wellposed.penalize._trainer import large_penalty as large_penalty
