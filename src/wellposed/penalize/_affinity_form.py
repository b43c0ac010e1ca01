"""How affinities are penalised: their distance to orthogonal, or the norm of the softmax Jacobian."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from wellposed.errors import ConfigError, unknown_name
from wellposed.functional import (
    affinity_penalty,
    affinity_penalty_from_logits,
    softmax_norm_penalty,
    softmax_norm_penalty_from_logits,
)

AFFINITY = "affinity"
"""The strength whose form this is."""
JASMIN = "jasmin"


class AffinityForm(NamedTuple):
    """A penalty on the affinities of one call, per head."""

    of_vectors: Callable[..., Tensor]
    """Function of query, key and masks."""
    of_logits: Callable[[Tensor], Tensor]
    """Function of logits that are in memory already."""


def affinity_form(
    form: str | Mapping[str, str], *, is_alone: bool, estimator: str, **options: Any
) -> AffinityForm:
    """Return how affinities are penalised: ``|A^T A - I|_F^2``, or JaSMin's bound.

    One name for all strengths is that of the weights, unless affinities are penalised alone.
    """
    if isinstance(form, Mapping):
        name = form.get(AFFINITY, "paper")
    else:
        name = form if is_alone else "paper"
    if name == "paper" or (name == "gram_squared" and isinstance(form, str)):
        rule = partial(affinity_penalty, estimator=estimator, **options)
        return AffinityForm(rule, affinity_penalty_from_logits)
    if name != JASMIN:
        raise unknown_name("form of affinity", str(name), ("paper", JASMIN))
    if estimator != "exact":
        raise ConfigError(
            f"OrthogonalityPenalty: estimator = {estimator!r} with the form 'jasmin' of affinity, which"
            " has no estimate by probes; leave estimator out"
        )
    return AffinityForm(softmax_norm_penalty, softmax_norm_penalty_from_logits)
