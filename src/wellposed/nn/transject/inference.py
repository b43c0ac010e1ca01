"""A layer of TransJect without gradients on a CPU, a few rows at a time: all but the products stays
in cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.functional.gram import folding_pays, per_token
from wellposed.linalg import Workspace
from wellposed.nn.transject.experts import ExpertMixture, GramAttention
from wellposed.nn.transject.orthogonal import OrthogonalFeedForward
from wellposed.nn.transject.spectrum import SeenTokens

# Rows of one block: 512 KiB of float32 at d = 512, which with one scratch block fits the
# second-level cache.
_ROWS = 256


class RowBlocks:
    """`x -> X` of a `TransJectBlock` that is not causal, with buffers that are reused from layer to
    layer.

    Args:
        mixture, feedforward: of the layer, without hooks or adapters.
        scale: its r.
        work: the buffers.
    """

    def __init__(
        self,
        mixture: ExpertMixture,
        feedforward: OrthogonalFeedForward,
        scale: float,
        work: Workspace,
    ) -> None:
        experts = [cast(GramAttention, expert) for expert in mixture.experts]
        self.mixture, self.scale, self.work = mixture, scale, work
        self.left = [expert.left.weight.mT for expert in experts]
        self.right = [expert.right.weight.mT for expert in experts]
        self.up, self.down = feedforward.up_proj.weight.mT, feedforward.down_proj.weight.mT

    def __call__(
        self, x: Tensor, sigma: Tensor, gates: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens (batch, tokens, d) and the gates (batch, experts); x is left as it
        is."""
        y = torch.empty(x.shape, dtype=x.dtype)
        sigma = sigma if sigma.dim() == 1 else sigma.expand(len(x), -1)
        gates = self.mixture.known_gates(x) if gates is None else gates
        folded = folding_pays(x, sigma)
        common = self._fold(sigma) if folded and sigma.dim() == 1 else None
        used: list[Tensor] = []
        # Samples that are worked on together: one, or as many short ones as make a block of rows.
        for samples in _slices(len(x), max(1, _ROWS // x.shape[1])):
            part, own, mixing = x[samples], sigma, common
            if sigma.dim() == 2:
                own = sigma[samples]
                # Folding pays for more than d tokens in a sample; such a sample is a group of its
                # own, or d is small anyway.
                mixing = self._fold(own[0]) if folded and len(part) == 1 else None
            masked = None if padding is None else padding[samples]
            outputs = self.work("outputs", (len(self.left), *part.shape), x)
            pools = None
            if gates is None:
                pools = x.new_full((len(outputs), len(part), x.shape[2]), -torch.inf)
            self._fill(part, own, mixing, padding=masked, outputs=outputs, pools=pools)
            if pools is not None:
                shares = self.mixture.gates_from_pools(pools, part, SeenTokens(masked))
            else:
                shares = cast(Tensor, gates)[samples]
            used.append(shares)
            self._mix(part, outputs, shares, y[samples])
        self._feed_(y.view(-1, y.shape[-1]))
        return y, torch.cat(used)

    def _fold(self, sigma: Tensor) -> list[Tensor]:
        return [(left * sigma) @ right for left, right in zip(self.left, self.right, strict=True)]

    def _fill(
        self,
        x: Tensor,
        sigma: Tensor,
        mixing: list[Tensor] | None,
        *,
        padding: Tensor | None,
        outputs: Tensor,
        pools: Tensor | None,
    ) -> None:
        """Fill `outputs` (experts, samples, tokens, d) with `F_e(x)`, and `pools` with the maxima
        of `x + r F_e(x)`."""
        width = x.shape[-1]
        for rows in _slices(x.shape[1], _ROWS):
            part = x[:, rows]
            scratch = self.work("scratch", part.shape, x)
            inputs, flat_scratch = part.reshape(-1, width), scratch.view(-1, width)
            for index, output in enumerate(outputs):
                image = output[:, rows]
                out = image.view(-1, width)
                if mixing is not None:
                    torch.mm(inputs, mixing[index], out=out)
                else:
                    torch.mm(inputs, self.left[index], out=flat_scratch)
                    scratch.mul_(per_token(sigma))
                    torch.mm(flat_scratch, self.right[index], out=out)
                elu_(out, flat_scratch)
                if pools is not None:
                    torch.add(part, image, alpha=self.scale, out=scratch)
                    if padding is not None:
                        scratch.masked_fill_(padding[:, rows].unsqueeze(-1), -torch.inf)
                    torch.maximum(pools[index], scratch.amax(1), out=pools[index])

    def _mix(self, x: Tensor, outputs: Tensor, gates: Tensor, y: Tensor) -> None:
        """Write `x + r sum_e lambda_e F_e(x)` to y; (samples, tokens, d), gates (samples,
        experts)."""
        if len(x) > 1:
            shares = (gates * self.scale)[:, :, None, None]
            for index, output in enumerate(outputs):
                torch.addcmul(y if index else x, output, shares[:, index], out=y)
            return
        # Numbers, which cost one pass less than tensors of one entry.
        numbers = [share * self.scale for share in gates[0].tolist()]
        for rows in _slices(x.shape[1], _ROWS):
            for index, share in enumerate(numbers):
                former, image = (y if index else x)[:, rows], outputs[index, :, rows]
                torch.add(former, image, alpha=share, out=y[:, rows])

    def _feed_(self, y: Tensor) -> None:
        """Add `r f(y)` to y, (tokens, d)."""
        for rows in _slices(len(y), _ROWS):
            part = y[rows]
            inner, outer, scratch = (
                self.work(n, part.shape, y) for n in ("inner", "outer", "feed")
            )
            torch.mm(part, self.up, out=inner)
            torch.mm(elu_(inner, scratch), self.down, out=outer)
            part.add_(elu_(outer, scratch), alpha=self.scale)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


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
