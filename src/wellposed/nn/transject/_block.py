"""One layer of TransJect: as modules, on a CPU by blocks of rows, and its inverse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from wellposed.errors import ConfigError, NotContractiveError, listed
from wellposed.functional import check_spectrum, folding_pays, per_token
from wellposed.linalg import Workspace
from wellposed.nn._checks import Eps, check_tokens, is_plain
from wellposed.nn.invertible import InvertibleResidual
from wellposed.nn.transject._gram import (
    ExpertMixture,
    Gating,
    GramAttention,
    SeenTokens,
    TransJectCache,
    check_gates,
)
from wellposed.nn.transject._parts import (
    InjectiveResidual,
    OrthogonalFeedForward,
    OrthogonalLinear,
    ResetByParts,
    ResidualStart,
)
from wellposed.options import Count, Rate, Size

# Rows of one block: 512 KiB of float32 at d = 512, which with one scratch block fits the
# second-level cache.
_ROWS = 256


class TransJectBlock(ResetByParts):
    """`x -> x + r A(x)`, then `x -> x + r f(x)`, `r = alpha/L`: for given sigma and gates a
    bijection of each token.

    Exact up to rounding: distances between two tokens of a sequence change by a factor in
    `[(1-|r|)^2, (1+|r|)^2]`. A is an `ExpertMixture`, f an `OrthogonalFeedForward`; both share one
    residual weight. At the start (ReZero) it is the identity. Sengupta et al. (2023), eq. 4; their
    Lemma 1 asks for L >= 3, which is not needed.

    Args:
        embed_dim: width d.
        num_layers: L of the stack this block is one of.
        num_experts, gating, eps: see `ExpertMixture`.
        residual: see `InjectiveResidual`.
        dropout: see `OrthogonalFeedForward`.
        layer_index: depth of the block, from 0: its place in a cache.

    Raises:
        ConfigError: a part refuses its arguments.

    >>> import torch
    >>> x = torch.randn(2, 5, 8)
    >>> y, gates = TransJectBlock(8, 2)(x, torch.ones(8))
    >>> bool((y == x).all()), gates.shape
    (True, torch.Size([2, 1]))
    """

    def __init__(
        self,
        embed_dim: Size,
        num_layers: Size,
        *,
        num_experts: Size = 1,
        gating: Gating = "pooled",
        eps: Eps = 1e-6,
        residual: ResidualStart = "rezero",
        dropout: Rate = 0.0,
        layer_index: Count = 0,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        gates: dict[str, Any] = {"gating": gating, "eps": eps, "layer_index": layer_index}
        self.attention = ExpertMixture(embed_dim, num_experts, **gates)
        self.feedforward = OrthogonalFeedForward(embed_dim, dropout=dropout)
        self.residual = InjectiveResidual(num_layers, residual)

    def forward(
        self,
        x: Tensor,
        sigma: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: TransJectCache | None = None,
        gates: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens, (batch, tokens, d), and the gates.

        The arguments are those of `ExpertMixture`; `workspace` holds the buffers of a pass without
        gradients on a CPU.

        Raises:
            ShapeError: x, sigma or gates do not fit, or those for each token are given without
                `is_causal`.
        """
        check_tokens(self, x, self.embed_dim, batched=True, least=1)
        check_spectrum("TransJectBlock", x, sigma, each_token=is_causal)
        if gates is not None:
            experts = self.attention.num_experts
            check_gates("TransJectBlock", gates, x, experts, each_token=is_causal)
        if not is_causal and self._runs_in_blocks(x, sigma):
            return _RowBlocks(self, workspace or Workspace())(x, sigma, gates, key_padding_mask)
        # A residual that is wrapped or hooked joins the ways itself. Not the module, which hooks
        # would try to move.
        plain = is_plain(self.residual, InjectiveResidual)
        join = self.residual.scale() if plain else self.residual.__call__
        seen = {"key_padding_mask": key_padding_mask, "is_causal": is_causal, "cache": cache}
        branch, used = self.attention(x, sigma, join, gates=gates, **seen)
        x = self.residual(x, branch)
        return self.residual(x, self.feedforward(x)), used

    def _runs_in_blocks(self, x: Tensor, sigma: Tensor) -> bool:
        """Whether no gradient, no hook and no other part is there to notice that modules are not
        called."""
        return (
            x.device.type == "cpu"
            and x.numel() > 0
            and not torch.is_grad_enabled()
            and not self.training
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cpu")
            and not torch._C._are_functorch_transforms_active()
            # Products with out= have no forward derivative.
            and forward_ad._current_level < 0
            and type(x) is Tensor
            and sigma.dtype == x.dtype
            and all(is_plain(part, kind) for _, part, kind in self._parts())
            and not (self.feedforward.training and self.feedforward.dropout)
            and all(parameter.dtype == x.dtype for parameter in self.parameters())
        )

    def _parts(self) -> Iterator[tuple[str, nn.Module, type[nn.Module]]]:
        """Every part that blocks of rows do not call (all but the gate): its path, itself, and what
        it was built as."""
        yield "residual", self.residual, InjectiveResidual
        yield "attention", self.attention, ExpertMixture
        yield "feedforward", self.feedforward, OrthogonalFeedForward
        maps: list[tuple[str, nn.Module, tuple[str, str]]]
        maps = [("feedforward", self.feedforward, ("up_proj", "down_proj"))]
        for index, expert in enumerate(self.attention.experts):
            path = f"attention.experts.{index}"
            yield path, expert, GramAttention
            maps.append((path, expert, ("left", "right")))
        for path, owner, names in maps:
            for name in names:
                yield f"{path}.{name}", getattr(owner, name), OrthogonalLinear

    def sublayers(self, sigma: Tensor, gates: Tensor) -> list[InvertibleResidual]:
        """Return the two halves as bijections, for stored sigma and gates, with contractions
        `|r| |U_e||V_e| |sigma|`.

        Raises:
            NotContractiveError: a contraction is not below 1: weights off orthogonality, or alpha =
                1 at L = 1; or it is not known, since a part is wrapped.
            ConfigError: weights are not in memory.
        """
        self._refuse_unknown_parts()
        scale = abs(self.residual.coefficients()[1])
        size = float(sigma.abs().max()) if sigma.numel() else 0.0
        size *= float(gates.abs().sum(-1).max()) if gates.numel() else 0.0
        halves = (
            (_Half(self, sigma, gates), self.attention.norm_bound() * size),
            (_Half(self), self.feedforward.norm_bound()),
        )
        return [
            InvertibleResidual(half, lipschitz=scale * bound, norm="tok") for half, bound in halves
        ]

    def _refuse_unknown_parts(self) -> None:
        others = ((path, part) for path, part, kind in self._parts() if not isinstance(part, kind))
        wrapped = [f"{path}: {type(part).__name__}" for path, part in others]
        if wrapped:
            raise NotContractiveError(
                "TransJectBlock: no Lipschitz bound is known of these parts, which are not those"
                f" that it was built with:\n{listed(wrapped)}\nmerge the adapters into the weights"
                " before inverting"
            )
        absent = [name for name, parameter in self.named_parameters() if parameter.is_meta]
        if absent:
            raise ConfigError(
                "TransJectBlock: the inverse needs weights that are not in memory (offloaded, or"
                f" on meta):\n{listed(absent)}\nload the model whole, or take accelerate's hooks"
                " off with accelerate.hooks.remove_hook_from_submodules"
            )


class _Half(nn.Module):
    """`r f(x)` of one sublayer, with everything but x fixed: of the attention where sigma and gates
    are given."""

    sigma: Tensor | None
    gates: Tensor | None

    def __init__(
        self, block: TransJectBlock, sigma: Tensor | None = None, gates: Tensor | None = None
    ) -> None:
        super().__init__()
        # Registered: active dropout is found and refused, and all that f holds is seen (the error
        # bound widens it).
        self.block = block
        self.register_buffer("sigma", sigma, persistent=False)
        self.register_buffer("gates", gates, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        block, sigma, gates = self.block, self.sigma, self.gates
        scale = block.residual.scale()
        if sigma is None or gates is None:
            branch = block.feedforward(x)
        else:
            branch, _ = block.attention(x, sigma, scale, gates=gates)
        return scale.to(x.dtype) * branch


class _RowBlocks:
    """What a layer of plain parts does without gradients on a CPU, a few rows at a time: all but
    the products stays in cache.

    ``work`` holds buffers, which are reused from layer to layer.
    """

    def __init__(self, layer: TransJectBlock, work: Workspace) -> None:
        self.mixture, feedforward, self.work = layer.attention, layer.feedforward, work
        self.scale = layer.residual.coefficients()[1]
        experts = [cast(GramAttention, expert) for expert in self.mixture.experts]
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
