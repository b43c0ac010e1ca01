"""A layer of TransJect without gradients on a CPU, a few rows at a time: all but the products stays
in cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.functional.gram import folding_pays
from wellposed.linalg import Workspace

# Rows of one block: 512 KiB of float32 at d = 512, which with one scratch block fits the
# second-level cache.
_ROWS = 256
Gate: TypeAlias = "Callable[[Tensor, slice], Tensor]"
"""`(pools (experts, samples, d), samples) -> (samples, experts)`."""


@dataclass(frozen=True)
class LayerWeights:
    """`x -> x U_e`, `V_e` of each expert, and of the feed-forward: views (d, d)."""

    left: Sequence[Tensor]
    right: Sequence[Tensor]
    up: Tensor
    down: Tensor
    scale: float


def run_layer(
    x: Tensor,
    sigma: Tensor,
    weights: LayerWeights,
    gates: Tensor | Gate,
    *,
    padding: Tensor | None,
    work: Workspace,
) -> tuple[Tensor, Tensor]:
    """Return what `TransJectBlock` does when it is not causal: the tokens, and the gates (batch,
    experts).

    Args:
        x: (batch, tokens, d), left as it is.
        sigma: (d,) or (batch, d).
        weights: of the layer.
        gates: lambda, (batch, experts), or what makes it from pooled outputs.
        padding: bool (batch, tokens), True = padding.
        work: buffers, reused from layer to layer.
    """
    y = torch.empty(x.shape, dtype=x.dtype)
    sigma = sigma if sigma.dim() == 1 else sigma.expand(len(x), -1)
    used: list[Tensor] = []
    folded = folding_pays(x, sigma)
    common = _fold(weights, sigma) if folded and sigma.dim() == 1 else None
    for samples in _groups(*x.shape[:2]):
        part, target = x[samples], y[samples]
        own = sigma if sigma.dim() == 1 else sigma[samples]
        # Folding pays for more than d tokens in a sample; such a sample is a group of its own, or d
        # is small anyway.
        mixing = common
        if folded and mixing is None and len(part) == 1:
            mixing = _fold(weights, own[0])
        masked = None if padding is None else padding[samples]
        outputs = work("outputs", (len(weights.left), *part.shape), x)
        pools = (
            None
            if isinstance(gates, Tensor)
            else x.new_full((len(outputs), len(part), x.shape[2]), -torch.inf)
        )
        _experts(
            part, own, weights, mixing, padding=masked, outputs=outputs, pools=pools, work=work
        )
        shares = (
            gates[samples] if isinstance(gates, Tensor) else gates(cast(Tensor, pools), samples)
        )
        used.append(shares)
        _mix(part, outputs, shares, weights.scale, target)
    _feed_(y.view(-1, y.shape[-1]), weights, work)
    return y, torch.cat(used)


def _groups(batch: int, tokens: int) -> Iterator[slice]:
    """Samples that are worked on together: one, or as many short ones as make a block of rows."""
    step = max(1, _ROWS // tokens)
    return (slice(start, min(start + step, batch)) for start in range(0, batch, step))


def _blocks(tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + _ROWS, tokens)) for start in range(0, tokens, _ROWS))


def _fold(weights: LayerWeights, sigma: Tensor) -> list[Tensor]:
    return [(left * sigma) @ right for left, right in zip(weights.left, weights.right, strict=True)]


def _experts(
    x: Tensor,
    sigma: Tensor,
    weights: LayerWeights,
    mixing: list[Tensor] | None,
    *,
    padding: Tensor | None,
    outputs: Tensor,
    pools: Tensor | None,
    work: Workspace,
) -> None:
    """Fill `outputs` (experts, samples, tokens, d) with `F_e(x)`, and `pools` with the maxima of
    `x + r F_e(x)`."""
    width = x.shape[-1]
    for rows in _blocks(x.shape[1]):
        part = x[:, rows]
        scratch = work("scratch", part.shape, x)
        inputs, flat_scratch = part.reshape(-1, width), scratch.view(-1, width)
        for index, output in enumerate(outputs):
            image = output[:, rows]
            out = image.view(-1, width)
            if mixing is not None:
                torch.mm(inputs, mixing[index], out=out)
            else:
                torch.mm(inputs, weights.left[index], out=flat_scratch)
                scratch.mul_(sigma if sigma.dim() == 1 else sigma.unsqueeze(1))
                torch.mm(flat_scratch, weights.right[index], out=out)
            elu_(out, flat_scratch)
            if pools is not None:
                torch.add(part, image, alpha=weights.scale, out=scratch)
                if padding is not None:
                    scratch.masked_fill_(padding[:, rows].unsqueeze(-1), -torch.inf)
                torch.maximum(pools[index], scratch.amax(1), out=pools[index])


def _mix(x: Tensor, outputs: Tensor, gates: Tensor, scale: float, y: Tensor) -> None:
    """Write `x + r sum_e lambda_e F_e(x)` to y; (samples, tokens, d), gates (samples, experts)."""
    if len(x) > 1:
        shares = (gates * scale)[:, :, None, None]
        for index, output in enumerate(outputs):
            torch.addcmul(y if index else x, output, shares[:, index], out=y)
        return
    # Numbers, which cost one pass less than tensors of one entry.
    shares = [share * scale for share in gates[0].tolist()]
    for rows in _blocks(x.shape[1]):
        for index, share in enumerate(shares):
            torch.add(
                (y if index else x)[:, rows], outputs[index, :, rows], alpha=share, out=y[:, rows]
            )


def _feed_(y: Tensor, weights: LayerWeights, work: Workspace) -> None:
    """Add `r f(y)` to y, (tokens, d)."""
    for rows in _blocks(len(y)):
        target = y[rows]
        inner, outer, scratch = (work(name, target.shape, y) for name in ("inner", "outer", "feed"))
        torch.mm(target, weights.up, out=inner)
        torch.mm(elu_(inner, scratch), weights.down, out=outer)
        target.add_(elu_(outer, scratch), alpha=weights.scale)


def elu_(x: Tensor, scratch: Tensor) -> Tensor:
    """Replace x by `max(x, min(exp(x), 1) - 1)`, which is ELU: off by at most 1.2e-7 in float32, a
    third of the time.

    `torch.nn.functional.elu` takes an expm1, whose relative accuracy near 0 is lost anyway when the
    result is added to numbers of the order of 1. In other dtypes it is what is called.

    >>> x = torch.linspace(-3, 3, 7)
    >>> bool((elu_(x.clone(), torch.empty(7)) - torch.nn.functional.elu(x)).abs().max() < 1.2e-7)
    True
    """
    if x.dtype is not torch.float32:
        return F.elu_(x)
    torch.exp(x, out=scratch)
    scratch.clamp_(max=1.0).sub_(1.0)
    return torch.maximum(x, scratch, out=x)
