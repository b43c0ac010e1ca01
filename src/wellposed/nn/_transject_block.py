"""One layer of TransJect, its inverse, and parameter counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from wellposed.linalg import Workspace
from wellposed.nn._experts import ExpertMixture, Gating
from wellposed.nn._gram_attention import GramAttention
from wellposed.nn._injective_residual import InjectiveResidual, ResidualStart
from wellposed.nn._invertible import InvertibleResidual
from wellposed.nn._orthogonal_feedforward import OrthogonalFeedForward
from wellposed.nn._orthogonal_linear import is_plain, transposed_weight
from wellposed.nn._transject_cache import TransJectCache
from wellposed.nn._transject_inference import LayerWeights, run_layer


class TransJectBlock(nn.Module):
    """`x -> x + r A(x)`, then `x -> x + r f(x)`, `r = alpha/L`: for given sigma and gates a bijection of each token.

    Exact up to rounding: distances between two tokens of a sequence change by a factor in `[(1-|r|)^2, (1+|r|)^2]`. A
    is an `ExpertMixture`, f an `OrthogonalFeedForward`; both share one residual weight. At the start (ReZero) it is the
    identity. Sengupta et al. (2023), eq. 4; their Lemma 1 asks for L >= 3, which is not needed.

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
        embed_dim: int,
        num_layers: int,
        *,
        num_experts: int = 1,
        gating: Gating = "pooled",
        eps: float = 1e-6,
        residual: ResidualStart = "rezero",
        dropout: float = 0.0,
        layer_index: int = 0,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.attention = ExpertMixture(embed_dim, num_experts, gating=gating, eps=eps, layer_index=layer_index)
        self.feedforward = OrthogonalFeedForward(embed_dim, dropout=dropout)
        self.residual = InjectiveResidual(num_layers, residual)

    def reset_parameters(self) -> None:
        """Draw every weight anew."""
        for part in (self.attention, self.feedforward, self.residual):
            part.reset_parameters()

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

        The arguments are those of `ExpertMixture`; `workspace` holds the buffers of a pass without gradients on a CPU.
        """
        if not is_causal and self._runs_in_blocks(x):
            return self._in_blocks(x, sigma, gates, key_padding_mask, workspace or Workspace())
        branch, used = self.attention(
            x,
            sigma,
            self.residual.scale(),
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            cache=cache,
            gates=gates,
        )
        x = self.residual(x, branch)
        return self.residual(x, self.feedforward(x)), used

    def _runs_in_blocks(self, x: Tensor) -> bool:
        """Whether no gradient, no hook and no other part is there to notice that modules are not called."""
        return (
            x.device.type == "cpu"
            and not torch.is_grad_enabled()
            and not self.training
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cpu")
            and not torch._C._are_functorch_transforms_active()
            and type(x) is Tensor
            and is_plain(list(self.modules()))
            and all(parameter.dtype == x.dtype for parameter in self.parameters())
        )

    def _in_blocks(
        self, x: Tensor, sigma: Tensor, gates: Tensor | None, padding: Tensor | None, work: Workspace
    ) -> tuple[Tensor, Tensor]:
        mixture = self.attention
        experts = [cast(GramAttention, expert) for expert in mixture.experts]
        weights = LayerWeights(
            left=[transposed_weight(expert.left) for expert in experts],
            right=[transposed_weight(expert.right) for expert in experts],
            up=transposed_weight(self.feedforward.up_proj),
            down=transposed_weight(self.feedforward.down_proj),
            scale=self.residual.coefficients()[1],
        )

        def gate(pools: Tensor, samples: slice) -> Tensor:
            masked = None if padding is None else padding[samples]
            return mixture.gates_from_pools(pools, x[samples], key_padding_mask=masked)

        known = mixture.known_gates(x) if gates is None else gates
        return run_layer(x, sigma, weights, gate if known is None else known, padding=padding, work=work)

    def sublayers(self, sigma: Tensor, gates: Tensor) -> list[InvertibleResidual]:
        """Return the two halves as bijections, for stored sigma and gates, with contractions `|r| |U_e||V_e| |sigma|`.

        Raises:
            NotContractiveError: a contraction is not below 1: weights off orthogonality, or alpha = 1 at L = 1.
        """
        scale = abs(self.residual.coefficients()[1])
        size = float(sigma.abs().max()) if sigma.numel() else 0.0
        attention = _Half(self, lambda x: self.attention(x, sigma, self.residual.scale(), gates=gates)[0])
        feedforward = _Half(self, self.feedforward)
        return [
            InvertibleResidual(attention, lipschitz=scale * self.attention.norm_bound() * size, norm="tok"),
            InvertibleResidual(feedforward, lipschitz=scale * self.feedforward.norm_bound(), norm="tok"),
        ]


class _Half(nn.Module):
    """`r f(x)` of one sublayer with everything but x fixed."""

    def __init__(self, block: TransJectBlock, branch: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        # Registered, so that active dropout is found and refused.
        self.block = block
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return self.block.residual.scale().to(x.dtype) * self.branch(x)


def transject_parameter_count(
    vocab_size: int,
    embed_dim: int,
    num_layers: int,
    num_experts: int,
    *,
    num_outputs: int = 1,
    released: bool = False,
) -> int:
    """Return the number of parameters of a TransJect classifier with sinusoidal positions and a linear head with bias.

    Exact, d = embed_dim: ours is `L (2 E d^2 + 2 d^2 + [E > 1] d + 1) + d^2 + V d/2 + outputs (d + 1)`. With `released`
    that of the code of Sengupta et al. (2023), whose maps have biases and whose gate (with one) is there for one expert
    too: `L (E (2 d^2 + 2 d) + d + 1 + 2 d^2 + 2 d) + L + d^2 + d + V d/2 + outputs (d + 1)`. Their Table 5 prints ten
    times these. With a learnt spectrum, d takes the place of `d^2`.

    >>> [transject_parameter_count(187, 512, 6, e, released=True) for e in (1, 4, 8)]
    [6617869, 16073485, 28680973]
    >>> transject_parameter_count(187, 512, 6, 4)
    16042247
    """
    square = embed_dim * embed_dim
    ends = vocab_size * embed_dim // 2 + num_outputs * (embed_dim + 1) + square
    if released:
        biased = square + embed_dim
        return num_layers * (2 * num_experts * biased + 2 * biased + embed_dim + 2) + ends + embed_dim
    gate = embed_dim if num_experts > 1 else 0
    return num_layers * (2 * num_experts * square + 2 * square + gate + 1) + ends
