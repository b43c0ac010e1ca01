"""Distances between the tokens of a sequence, layer by layer, and how much layers stretch them: the
activation factor of sengupta2023."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, ConvergenceError
from wellposed.measurement import _states
from wellposed.measurement._states import States
from wellposed.options import Size

DistanceMetric = Literal["euclidean", "cosine", "dot"]
_BY_LAYER = ("mean", "median", "smallest", "largest", "standard_error")
_BLOCK = 512  # tokens whose distances to all others are held at once


@dataclass(frozen=True)
class ActivationFactor:
    """What `activation_factor` found; entry l of a list is layer l + 1."""

    metric: str
    mean: list[float]
    """Mean over the sequences of the mean over their pairs: eq. 5."""
    median: list[float]
    """Median over the sequences of the same."""
    smallest: list[float]
    """Least ratio of any pair."""
    largest: list[float]
    """Largest ratio of any pair: a lower bound of the layers' Lipschitz constant, for
    ``euclidean``."""
    standard_error: list[float | None]
    """Of the mean, from the spread over sequences; None for a single one."""
    per_sequence: list[list[float]]
    """For each layer, the mean over the pairs of each sequence."""
    pairs: int
    """Pairs of tokens looked at."""
    left_out: int
    """Pairs left out, because their distance in ``x_0`` is 0 (or a state holds a zero vector, for
    ``cosine``)."""
    short: int
    """Sequences left out, for want of a pair."""
    status: str
    """``"exact"`` over all pairs of the given sequences, ``"empirical"`` over sampled ones."""

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per layer, for `wellposed.measurement.write_csv`."""
        rows = []
        for layer, numbers in enumerate(
            zip(*(getattr(self, n) for n in _BY_LAYER), strict=True), 1
        ):
            named = dict(zip(_BY_LAYER, numbers, strict=True))
            rows.append({"layer": layer, "metric": self.metric, **named, "status": self.status})
        return rows


@checked_arguments
def activation_factor(
    states: States,
    *,
    metric: DistanceMetric = "euclidean",
    attention_mask: Tensor | None = None,
    pairs: Size | None = None,
    seed: int = 0,
) -> ActivationFactor:
    """Return ``A(l) = E_X E_{i != j} |x_i^l - x_j^l| / |x_i^0 - x_j^0|`` for every layer l.

    Status: exact to float64 rounding over the sequences given; with ``pairs`` empirical: an
    unbiased sample of each sequence's pairs. Source: Sengupta et al. (2023, eq. 5); 1 means that
    distances are kept on average. The mean over X weighs every sequence alike, however long.
    Between two tokens with the same vector in ``x_0`` no ratio exists; such pairs are counted in
    ``left_out``.

    Args:
        states: ``(x_0, ..., x_L)``, each (batch, tokens, width), or a model output with
            ``hidden_states``.
        metric: ``"euclidean"``; ``"cosine"`` for ratios of ``1 - cos``; ``"dot"`` for ratios of
            ``x_i . x_j``, whose
            denominator may be near zero and of either sign: read the median.
        attention_mask: (batch, tokens), 1 for real tokens; padding is left out.
        pairs: how many pairs of each sequence are drawn (with replacement); None takes all of them.
        seed: of that draw; no global random state is used.

    Returns:
        `ActivationFactor`.

    Raises:
        ConfigError: unknown metric, ``pairs`` below 1, no hidden states, or no pair of different
            tokens at all.
        ShapeError: states or mask do not fit. ConvergenceError: a real token holds NaN or infinity,
            or its distances overflow.

    Cost: ``L batch tokens^2 width``, or ``L batch pairs width``; memory: 512 x tokens distances.
    When not to use: as a certificate; ``wellposed.certify`` bounds the ratio of every pair from
    above.

    >>> x = torch.randn(2, 5, 3)
    >>> [round(factor, 4) for factor in activation_factor([x, 2 * x, x + 1]).mean]
    [2.0, 1.0]
    """
    found = _states.read_states(states)
    generator = torch.Generator().manual_seed(seed)
    real = _states.checked_mask(attention_mask, found[0])
    _states.refuse_non_finite(found, real, "activation_factor")
    tallies: list[_Tally] = []
    left_out = 0
    for sequence in _states.sequences(found, real):
        tally = _Tally(len(found) - 1, cosine=metric == "cosine")
        for distances in _distances_of_pairs(sequence, metric, pairs, generator):
            left_out += tally.add(distances)
        tallies.append(tally)
    seen = [tally for tally in tallies if tally.count]
    if not seen:
        raise ConfigError(
            f"activation_factor: none of the {len(tallies)} sequences has two real tokens at a"
            " distance other than 0 in state 0 (for cosine: and no zero vector in any state), so"
            " there is no ratio; give sequences of at least two different tokens"
        )
    means = torch.stack([tally.total / tally.count for tally in seen], dim=1)
    spread = means.std(dim=1) / math.sqrt(len(seen)) if len(seen) > 1 else None
    return ActivationFactor(
        metric=metric,
        mean=means.mean(dim=1).tolist(),
        median=means.quantile(0.5, dim=1).tolist(),
        smallest=torch.stack([tally.least for tally in seen]).amin(0).tolist(),
        largest=torch.stack([tally.most for tally in seen]).amax(0).tolist(),
        standard_error=[None] * len(means) if spread is None else spread.tolist(),
        per_sequence=means.tolist(),
        pairs=sum(tally.count for tally in seen),
        left_out=left_out,
        short=len(tallies) - len(seen),
        status="exact" if pairs is None else "empirical",
    )


@checked_arguments
def token_distances(
    states: States, *, metric: DistanceMetric = "euclidean", attention_mask: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return ``|x_i^l - x_j^l|`` for all tokens i, j of each sequence and every layer l.

    Status: exact to float64 rounding. Source: Sengupta et al. (2023), Figure 4 compares them over
    layers.

    Args:
        states: ``(x_0, ..., x_L)``, each (batch, tokens, width), or a model output with
            ``hidden_states``.
        metric: ``"euclidean"``; ``"cosine"``, the distance ``1 - cos``; ``"dot"``, the product
            ``x_i . x_j``.
        attention_mask: (batch, tokens), 1 for real tokens; the rest become NaN.

    Returns:
        L + 1 tensors (batch, tokens, tokens), float64.

    Raises:
        ConfigError: unknown metric, or no hidden states. ShapeError: states or mask do not fit.

    Cost: ``(L + 1) batch tokens^2 width``, and as much memory without the width: for a few
    sequences, to look at. For a mean over a corpus use `activation_factor`, which holds one block
    of one sequence at a time.

    >>> still, moved = token_distances([torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[0.0], [3.0]]])])
    >>> moved[0].tolist()
    [[0.0, 3.0], [3.0, 0.0]]
    """
    found = _states.read_states(states)
    real = _states.checked_mask(attention_mask, found[0])
    both = real.unsqueeze(1) & real.unsqueeze(2)
    wide = torch.float32 if real.device.type == "mps" else torch.float64
    between = (_between(state.to(wide), state.to(wide), metric) for state in found)
    return tuple(distances.masked_fill(~both, torch.nan) for distances in between)


class _Tally:
    """Sum, extremes and number of the ratios of one sequence, for every layer."""

    def __init__(self, layers: int, *, cosine: bool) -> None:
        self.cosine = cosine
        self.count = 0
        self.total = torch.zeros(layers, dtype=torch.float64)
        self.least = torch.full((layers,), math.inf, dtype=torch.float64)
        self.most = torch.full((layers,), -math.inf, dtype=torch.float64)

    def add(self, distances: list[Tensor]) -> int:
        """Take in the distances of the same pairs in every state; return how many pairs have no
        ratio."""
        stack = torch.stack(distances)
        usable = stack[0] != 0
        if self.cosine:
            usable &= ~stack.isnan().any(0)  # a zero vector has no angle
        if not bool(torch.isfinite(stack[:, usable]).all()):
            raise ConvergenceError(
                "activation_factor: finite states lie so far apart that their distances overflow;"
                " the model has diverged, or the states are to be divided by a common number first"
            )
        ratios = (stack[1:, usable] / stack[0, usable]).cpu().to(torch.float64)
        if ratios.shape[1]:
            self.count += ratios.shape[1]
            self.total += ratios.sum(1)
            self.least = torch.minimum(self.least, ratios.amin(1))
            self.most = torch.maximum(self.most, ratios.amax(1))
        return int(usable.numel()) - ratios.shape[1]


def _distances_of_pairs(
    sequence: Sequence[Tensor],
    metric: DistanceMetric,
    drawn: int | None,
    generator: torch.Generator,
) -> Iterator[list[Tensor]]:
    """Yield the distances of all pairs i < j, a block of i at a time; or of ``drawn`` of them."""
    tokens, device = sequence[0].shape[0], sequence[0].device
    if drawn is None:
        for start in range(0, tokens - 1, _BLOCK):
            parts = [(state[start : start + _BLOCK], state[start:]) for state in sequence]
            rows, columns = torch.triu_indices(*map(len, parts[0]), offset=1, device=device)
            yield [_between(*part, metric)[rows, columns] for part in parts]
    elif tokens >= 2:
        first = torch.randint(tokens, (drawn,), generator=generator)
        second = (first + torch.randint(1, tokens, (drawn,), generator=generator)) % tokens
        pairs = [
            (state[first.to(device), None], state[second.to(device), None]) for state in sequence
        ]
        yield [_between(*pair, metric).flatten() for pair in pairs]


def _between(first: Tensor, second: Tensor, metric: DistanceMetric) -> Tensor:
    """Return the (..., n, m) distances of the rows of two matrices."""
    if metric == "dot":
        return first @ second.mT
    if metric == "cosine":  # NaN for a zero vector, which has no angle
        first, second = (each / each.norm(dim=-1, keepdim=True) for each in (first, second))
    # Differences, not products of norms: near tokens keep their digits, equal ones are exactly 0.
    apart = torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
    return apart if metric == "euclidean" else apart.square() / 2  # 1 - u.v = |u - v|^2 / 2
