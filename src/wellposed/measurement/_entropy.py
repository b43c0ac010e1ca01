"""Differential entropy of hidden values (sengupta2023, eq. 6), by a named estimator."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.measurement._states import States, checked_mask, read_states
from wellposed.options import Size

EntropyEstimator = Literal["knn", "histogram"]


@checked_arguments
def differential_entropy(
    x: Tensor,
    estimator: EntropyEstimator = "knn",
    *,
    standardize: bool = False,
    neighbors: Size = 3,
    bins: Size | None = None,
) -> Tensor:
    """Estimate ``h = -E log p(x)``, in nats, of the distribution that the values along the last
    axis are drawn from.

    Status: empirical. ``"knn"`` is consistent, with a bias that falls as 1/n for smooth densities:
    Kozachenko and Leonenko (1987), ``psi(n) - psi(k) + log 2 + mean log r_i`` with r_i the distance
    of value i to its k-th neighbour. ``"histogram"`` is ``-sum p log p + log width`` over equal
    bins between the extremes, biased by the width of the bins. Source of the measure: Sengupta et
    al. (2023, eq. 6), where neither estimator nor bins are given.

    Entropy depends on scale: ``h(s x) = h(x) + log s``. Smaller activations have lower entropy
    whatever their order, so compare models with ``standardize=True`` as well, which measures the
    shape of the distribution alone.

    Args:
        x: (..., n), floating, finite; the n values of one variable along the last axis.
        estimator: ``"knn"`` or ``"histogram"``.
        standardize: divide by the standard deviation first; a Gaussian has the most then, ``log(2
            pi e) / 2`` = 1.419.
        neighbors: k of ``"knn"``; more give less variance and more bias.
        bins: of ``"histogram"``; None takes ``sqrt(n)``, rounded.

    Returns:
        (...), float64. ``-inf`` where the values are constant, and for ``"knn"`` where some value
        occurs more than ``neighbors`` times (a discrete distribution has no density; half types
        round to few values).

    Raises:
        ConfigError: unknown estimator, ``neighbors`` or ``bins`` that do not fit. ShapeError: no
        axis, or too few values. ConvergenceError: values that are not finite.

    Cost: one sort. When not to use: for the joint entropy of several variables; this one is of each
    alone.

    >>> x = 4 * torch.rand(50_000, generator=torch.Generator().manual_seed(0))  # log 4 = 1.386
    >>> [round(differential_entropy(x, name).item(), 1) for name in ("knn", "histogram")]
    [1.4, 1.4]
    """
    values = _checked(x, neighbors, estimator)
    if standardize:
        deviation = values.std(-1, keepdim=True)
        # Constant values are 0 / 0 otherwise; 0 / 1 is constant still.
        deviation = torch.where(deviation > 0, deviation, 1.0)
        values = (values - values.mean(-1, keepdim=True)) / deviation
    if estimator == "knn":
        return _nearest(values, neighbors)
    return _histogram(values, round(math.sqrt(values.shape[-1])) if bins is None else bins)


@checked_arguments
def layer_entropy(
    states: States,
    estimator: EntropyEstimator = "knn",
    *,
    heads: Size = 1,
    attention_mask: Tensor | None = None,
    standardize: bool = False,
    neighbors: Size = 3,
    bins: Size | None = None,
) -> Tensor:
    """Return ``E_j h(x_j)``: the mean over tokens j of the entropy of their hidden values, for each
    layer and head.

    Status: empirical; see `differential_entropy`. Source: Sengupta et al. (2023, eq. 6 and Figure
    3b).

    Args:
        states: ``(x_0, ..., x_L)``, each (batch, tokens, width), or a model output with
            ``hidden_states``. For the experts of a mixture, their outputs side by side along the
            width.
        estimator: ``"knn"`` or ``"histogram"``.
        heads: equal parts of the width that are measured by themselves: heads or experts.
        attention_mask: (batch, tokens), 1 for real tokens.
        standardize, neighbors, bins: as in `differential_entropy`; each token (and head) by itself.

    Returns:
        (L + 1, heads), float64.

    Raises:
        ConfigError: no hidden states, no real token, or an option of `differential_entropy`.
        ShapeError: a width that is no multiple of ``heads``.

    Cost: a sort of every token's values. When not to use: on few values per head (below about 50
    the bias is a tenth of a nat).

    >>> x = torch.randn(1, 4, 64)
    >>> entropy = layer_entropy([x, 10 * x], heads=2)
    >>> tuple(entropy.shape), bool(torch.allclose(entropy[1] - entropy[0], torch.tensor(10.0).double().log()))
    ((2, 2), True)
    """
    found = read_states(states)
    real = checked_mask(attention_mask, found[0])
    if not bool(real.any()):
        raise ConfigError(
            "layer_entropy: the attention_mask marks no real token, so there is nothing to measure"
        )
    uneven = sorted({state.shape[-1] for state in found if state.shape[-1] % heads})
    if uneven:
        raise ShapeError(
            f"layer_entropy: widths {uneven} cannot be cut into heads = {heads} equal parts"
        )
    how = {"standardize": standardize, "neighbors": neighbors, "bins": bins}
    parts = (state[real].unflatten(-1, (heads, -1)) for state in found)
    entropies = (differential_entropy(part, estimator, **how) for part in parts)
    return torch.stack([each.mean(0).cpu() for each in entropies])


def _nearest(values: Tensor, neighbors: int) -> Tensor:
    count = values.shape[-1]
    ordered = values.sort(-1).values
    padded = torch.nn.functional.pad(ordered, (neighbors, 0), value=-math.inf)
    padded = torch.nn.functional.pad(padded, (0, neighbors), value=math.inf)
    # The k nearest lie in one of the k + 1 runs of k + 1 neighbours in order that hold the value.
    radius = torch.full_like(ordered, math.inf)
    for first in range(neighbors + 1):
        last = first + neighbors
        left = ordered - padded[..., first : first + count]
        right = padded[..., last : last + count] - ordered
        radius = torch.minimum(radius, torch.maximum(left, right))
    psi = torch.digamma(torch.tensor([float(count), float(neighbors)], dtype=torch.float64))
    return float(psi[0] - psi[1]) + math.log(2.0) + radius.log().mean(-1)


def _histogram(values: Tensor, bins: int) -> Tensor:
    low, high = values.aminmax(dim=-1, keepdim=True)
    width = (high - low) / bins
    spread = torch.where(width > 0, width, 1.0)
    # The largest value closes the last bin.
    index = ((values - low) / spread).floor().clamp_(0, bins - 1).to(torch.int64)
    counts = values.new_zeros((*values.shape[:-1], bins))
    counts.scatter_add_(-1, index, torch.ones_like(values))
    share = counts / values.shape[-1]
    return torch.special.entr(share).sum(-1) + width.squeeze(-1).log()


def _checked(x: Tensor, neighbors: int, estimator: str) -> Tensor:
    least = neighbors + 1 if estimator == "knn" else 2
    if x.ndim < 1 or not x.is_floating_point() or x.shape[-1] < least or x.numel() == 0:
        expected = f"expected a floating tensor with at least {least} values along the last axis"
        raise ShapeError(f"differential_entropy: {x.dtype} {tuple(x.shape)}; {expected}")
    if bad := int((~torch.isfinite(x)).sum()):
        problem = f"{bad} of {x.numel()} values are not finite"
        raise ConvergenceError(f"differential_entropy: {problem}")
    return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)
