"""One layer of TransJect, and its inverse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from wellposed.errors import ConfigError, NotContractiveError, listed
from wellposed.functional import check_spectrum
from wellposed.nn._checks import Eps, check_tokens, check_unwritten, is_plain, writes_to
from wellposed.nn.invertible import InvertibleResidual
from wellposed.nn.transject._gram import (
    ExpertMixture,
    Gating,
    GramAttention,
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


class TransJectBlock(ResetByParts):
    """`x -> x + r A(x)`, then `x -> x + r f(x)`, `r = alpha/L`: a bijection of each token.

    Exact up to rounding, for given sigma and gates: distances between two tokens of a sequence
    change by a factor in `[(1-|r|)^2, (1+|r|)^2]`. A is an `ExpertMixture`, f an
    `OrthogonalFeedForward`; both share one residual weight. It starts as the identity (ReZero).
    Sengupta et al. (2023), eq. 4; their condition L >= 3 (Lemma 1) is not needed (theory note B8).

    Args:
        embed_dim: Width d.
        num_layers: L, the number of blocks in the stack.
        num_experts: As in `ExpertMixture`.
        gating: As in `ExpertMixture`.
        eps: As in `ExpertMixture`.
        residual: `start` of `InjectiveResidual`.
        dropout: As in `OrthogonalFeedForward`.
        feedforward_bias: `bias` of `OrthogonalFeedForward`.
        layer_index: Depth of the block, from 0: its place in a cache.

    Errors are those of the three parts.

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
        feedforward_bias: bool = False,
        layer_index: Count = 0,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        gates: dict[str, Any] = {"gating": gating, "eps": eps, "layer_index": layer_index}
        self.attention = ExpertMixture(embed_dim, num_experts, **gates)
        self.feedforward = OrthogonalFeedForward(embed_dim, dropout=dropout, bias=feedforward_bias)
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
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens, (batch, tokens, d), and the gates; arguments as in `ExpertMixture`.

        Raises `ShapeError` if x, sigma or gates do not fit, or are one per token without
        `is_causal`.
        """
        check_tokens(self, x, self.embed_dim, batched=True, min_tokens=1)
        check_spectrum("TransJectBlock", x, sigma, each_token=is_causal)
        if gates is not None:
            experts = self.attention.num_experts
            check_gates("TransJectBlock", gates, x, experts, each_token=is_causal)

        # A wrapped or hooked residual is called. The bound `__call__` is passed, since hooks would
        # try to move a module.
        plain = is_plain(self.residual, InjectiveResidual)
        join = self.residual.scale() if plain else self.residual.__call__
        masking = {"key_padding_mask": key_padding_mask, "is_causal": is_causal, "cache": cache}
        writes = writes_to(x)
        branch, used = self.attention(x, sigma, join, gates=gates, **masking)
        check_unwritten(self, "attention", x, writes)
        x = self.residual(x, branch)
        writes = writes_to(x)
        branch = self.feedforward(x)
        check_unwritten(self, "feedforward", x, writes)

        return self.residual(x, branch), used

    def _parts(self) -> Iterator[tuple[str, nn.Module, type[nn.Module]]]:
        """Yield path, module and original class of every part except the gate."""
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
        """Return both halves as bijections, for stored sigma and gates.

        Their contractions are `|r| |U_e||V_e| |sigma|` and `|r| |W1||W2|`.

        Raises:
            NotContractiveError: One is not below 1 (weights off orthogonality, or alpha = 1 at L =
                1), or is not known because a part is wrapped.
            ConfigError: Weights are not in memory.
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
                "TransJectBlock: these parts are not those that it was built with, so no Lipschitz"
                f" bound is known:\n{listed(wrapped)}\nmerge the adapters into the weights"
                " before inverting"
            )

        absent = [name for name, parameter in self.named_parameters() if parameter.is_meta]
        if absent:
            raise ConfigError(
                "TransJectBlock: the inverse needs weights that are not in memory (offloaded, or"
                f" on meta):\n{listed(absent)}\nload the whole model, or remove accelerate's hooks"
                " with accelerate.hooks.remove_hook_from_submodules"
            )


class _Half(nn.Module):
    """`r f(x)` of one sublayer, of the attention if sigma and gates are given; only x varies."""

    sigma: Tensor | None
    gates: Tensor | None

    def __init__(
        self, block: TransJectBlock, sigma: Tensor | None = None, gates: Tensor | None = None
    ) -> None:
        super().__init__()
        # Registered, so that active dropout is refused and the error bound widens all tensors of f.
        self.block = block
        self.register_buffer("sigma", sigma, persistent=False)
        self.register_buffer("gates", gates, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        sigma = self.sigma
        gates = self.gates
        scale = block.residual.scale()
        if sigma is None or gates is None:
            branch = block.feedforward(x)
        else:
            branch, _ = block.attention(x, sigma, scale, gates=gates)
        return scale.to(x.dtype) * branch
