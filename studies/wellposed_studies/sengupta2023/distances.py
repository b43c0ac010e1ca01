"""Hidden states, distances between tokens, and the activation factor of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, ConvergenceError
from wellposed.hooks import quiet_run

Metric = Literal["euclidean", "cosine", "dot"]


def hidden_states(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return ``(x_0, ..., x_L)``, each (batch, tokens, width), by one pass in evaluation mode."""
    with quiet_run(model):
        return model(**batch, output_hidden_states=True).hidden_states


def activation_factors(
    states: Sequence[Tensor],
    attention_mask: Tensor,
    *,
    metric: Metric = "euclidean",
    pairs: int | None = None,
    seed: int = 0,
) -> list[list[float]]:
    """Return ``E_{i != j} |x_i^l - x_j^l| / |x_i^0 - x_j^0|`` for every layer l and sequence.

    Status: exact to float64 rounding; with ``pairs`` an unbiased sample. Source: equation 5, the
    mean over sequences; 1 means that distances are preserved on average. Pairs with the same vector
    in ``x_0`` and sequences without a pair are skipped.

    Args:
        states: ``(x_0, ..., x_L)``, each (batch, tokens, width).
        attention_mask: (batch, tokens), 1 for real tokens.
        metric: ``"euclidean"``, ``"cosine"`` (of ``1 - cos``) or ``"dot"`` (of ``x_i . x_j``, which
            may be near zero and of either sign: use the median).
        pairs: random pairs per sequence (with replacement); None takes all.
        seed: of these pairs; no global random state is used.

    Returns:
        For each layer 1 to L one number a sequence. Cost: ``L batch tokens^2 (or pairs) width``.

    Raises:
        ConvergenceError: a real token holds NaN or infinity, or a distance overflows.
        ConfigError: no sequence has a pair.

    >>> x = torch.randn(2, 5, 3)
    >>> [round(row[0], 4) for row in activation_factors([x, 2 * x, x + 1], torch.ones(2, 5))]
    [2.0, 1.0]
    """
    generator = torch.Generator().manual_seed(seed)
    means: list[Tensor] = []
    for index, keep in enumerate(attention_mask != 0):
        sequence = [state[index][keep].double() for state in states]
        first, second = _pairs(len(sequence[0]), pairs, generator)
        distances = [_between(x[first, None], x[second, None], metric).flatten() for x in sequence]
        apart = torch.stack(distances)
        usable = apart[0] != 0
        if metric == "cosine":
            usable &= ~apart.isnan().any(0)  # a zero vector has no angle
        finite = all(bool(torch.isfinite(x).all()) for x in sequence)
        if not (finite and bool(torch.isfinite(apart[:, usable]).all())):
            raise ConvergenceError(
                f"activation_factors: states or distances of sequence {index} are not finite."
                " The model has diverged; use one that has not"
            )
        if bool(usable.any()):
            means.append((apart[1:, usable] / apart[0, usable]).mean(1))

    if not means:
        raise ConfigError(
            f"activation_factors: none of the {len(attention_mask)} sequences has two real tokens"
            " with a ratio; give sequences of at least two different tokens"
        )
    return torch.stack(means, 1).tolist()


def token_distances(states: Sequence[Tensor], metric: Metric = "euclidean") -> tuple[Tensor, ...]:
    """Return ``|x_i^l - x_j^l|`` for every layer, (batch, tokens, tokens) in float64."""
    return tuple(_between(state.double(), state.double(), metric) for state in states)


def _pairs(tokens: int, drawn: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the indices i and j of all pairs i < j, or of ``drawn`` random pairs i != j."""
    if drawn is None or tokens < 2:
        first, second = torch.triu_indices(tokens, tokens, offset=1)
        return first, second
    first = torch.randint(tokens, (drawn,), generator=generator)
    return first, (first + torch.randint(1, tokens, (drawn,), generator=generator)) % tokens


def _between(first: Tensor, second: Tensor, metric: Metric) -> Tensor:
    if metric == "dot":
        return first @ second.mT
    if metric == "cosine":  # NaN for a zero vector, which has no angle
        first, second = (x / x.norm(dim=-1, keepdim=True) for x in (first, second))
    # Differences, not products: near tokens keep their digits, and equal ones are exactly 0.
    apart = torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
    return apart if metric == "euclidean" else apart.square() / 2  # 1 - u.v = |u - v|^2 / 2
