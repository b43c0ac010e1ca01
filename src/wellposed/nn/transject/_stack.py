"""TransJect: one spectrum, L layers, and the inverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wellposed.errors import ConfigError
from wellposed.nn._checks import Eps, check_tokens
from wellposed.nn._recompute import once
from wellposed.nn.invertible import Inversion, ReversibleSequential
from wellposed.nn.transject._block import TransJectBlock
from wellposed.nn.transject._gram import (
    DrawnSpectrum,
    Gating,
    GramSpectrum,
    LearnedSpectrum,
    Normalization,
    TransJectCache,
    check_padding,
)
from wellposed.nn.transject._parts import ResetByParts, ResidualStart
from wellposed.options import Ge, Rate, Size

SpectrumKind = Literal["gram", "random", "redrawn"]


@dataclass(frozen=True)
class TransJectOutput:
    """Output of `TransJectStack`; `inverse` needs sigma and gates."""

    last_hidden_state: Tensor
    """(batch, tokens, d)."""
    sigma: Tensor
    """(batch, d); causal (batch, tokens, d); learnt or drawn (d,)."""
    gates: tuple[Tensor, ...]
    """One per layer: (batch, experts); causal (batch, tokens, experts)."""
    hidden_states: tuple[Tensor, ...] | None = None
    """The input and the output of each layer, if requested."""


class TransJectStack(ResetByParts):
    """`X^0 -> X^L`: distances change by factors in `[prod (1-|r_l|)^2, prod (1+|r_l|)^2]`.

    Exact up to rounding for orthogonal weights, given sigma and gates, and any two tokens of one
    sequence. `r_l = alpha_l/L` with `|alpha_l| < 1`, so every factor is within
    `[(1-1/L)^(2L), (1+1/L)^(2L)]` (theory note B8). Time and memory are linear in the number of
    tokens. Sengupta et al. (2023), sec. 3.5 and Theorem 2, as corrected in the errata: padding
    enters neither spectrum nor gates; sigma is at most 1; no biases; `is_causal` is causal in
    sigma, its normalisation and the gates.

    Tokens exchange only d numbers (sigma, once, from `X^0`) and the E gates of each layer, the same
    for the whole sequence (causal: for the prefix). Given those, every token is mapped by itself,
    and only the position codes in `X^0` tell their order.

    Args:
        embed_dim: Width d.
        num_layers: L; 0 is the control without layers.
        num_experts: As in `TransJectBlock`.
        spectrum: `"gram"` (`GramSpectrum`), `"random"` (`LearnedSpectrum`: drawn once, learnt) or
            `"redrawn"` (`DrawnSpectrum`: drawn in each pass).
        spectrum_norm: `normalization` of `GramSpectrum`.
        eps: As in `GramSpectrum`; the gates use it too.
        gating: As in `TransJectBlock`.
        residual: As in `TransJectBlock`.
        dropout: As in `TransJectBlock`.
        feedforward_bias: As in `TransJectBlock`.
        is_causal: Hide later tokens from each token; needed for language models and for a cache.

    Raises:
        ConfigError: L is not an integer of at least 0, a name is unknown, or a part refuses its
            arguments.

    Cost: `(E + 1) 2 N d^2` multiply-adds a layer, or `(E + 2) N d^2 + E d^3` a sample when folded
    (N > d). `gradient_checkpointing` keeps only each layer's input and recomputes the rest in
    backward. Constrain the weights in training:
    `constrain_(model, optimizer, where=OrthogonalLinear)`.
    When not to use: if a token must read particular other tokens (copying, lookup); use attention.

    >>> stack, x = TransJectStack(8, 3, num_experts=2, residual="sigmoid"), torch.randn(2, 5, 8)
    >>> output = stack(x)
    >>> back, report = stack.inverse(output.last_hidden_state, output.sigma, output.gates)
    >>> bool((back - x).abs().max() < 1e-4), report.error_bound < 1e-4
    (True, True)
    """

    repr_fields = ("is_causal",)

    def __init__(
        self,
        embed_dim: Size,
        num_layers: Annotated[int, Ge(0)],
        *,
        num_experts: Size = 1,
        spectrum: SpectrumKind = "gram",
        spectrum_norm: Normalization = "max",
        eps: Eps = 1e-6,
        gating: Gating = "pooled",
        residual: ResidualStart = "rezero",
        dropout: Rate = 0.0,
        feedforward_bias: bool = False,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.is_causal = is_causal
        kinds: dict[
            SpectrumKind, Callable[[int], GramSpectrum | LearnedSpectrum | DrawnSpectrum]
        ] = {
            "gram": partial(GramSpectrum, normalization=spectrum_norm, eps=eps),
            "random": LearnedSpectrum,
            "redrawn": DrawnSpectrum,
        }
        self.spectrum = kinds[spectrum](embed_dim)
        gates: dict[str, Any] = {"num_experts": num_experts, "gating": gating, "eps": eps}
        of_layers: dict[str, Any] = {**gates, "residual": residual, "dropout": dropout}
        of_layers["feedforward_bias"] = feedforward_bias
        self.layers = nn.ModuleList(
            TransJectBlock(embed_dim, num_layers, layer_index=index, **of_layers)
            for index in range(num_layers)
        )
        # Hugging Face switches gradient checkpointing on by these names.
        self.gradient_checkpointing = False
        recompute: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
        self._gradient_checkpointing_func = recompute

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cache: TransJectCache | None = None,
        output_hidden_states: bool = False,
        sigma: Tensor | None = None,
        gates: Sequence[Tensor] | None = None,
    ) -> TransJectOutput:
        """Run all layers and return a `TransJectOutput`.

        Args:
            x: Embedded tokens, (batch, tokens, d).
            key_padding_mask: Bool (batch, tokens), or with a cache (batch, cached + tokens); True =
                padding.
            cache: Of earlier tokens, for a causal stack; this call adds its tokens to it.
            output_hidden_states: Keep the input and every layer's output.
            sigma: Use this one, from an earlier pass, instead of a computed one.
            gates: As `sigma`.

        Raises:
            ShapeError: x, the mask, the cache, sigma or gates do not fit, or (checked on the CPU
                only) a sample is padding alone.
            ConfigError: A cache in a stack that is not causal or recomputes its layers, or not L
                gates.
        """
        check_tokens(self, x, self.embed_dim, batched=True, min_tokens=1)
        recomputes = self.recomputes()
        if cache is not None:
            if not self.is_causal:
                raise ConfigError(
                    "TransJectStack: a cache needs is_causal=True: otherwise later tokens change"
                    " earlier ones"
                )
            cache.check_batch(len(x))
            if recomputes:
                raise ConfigError(
                    "TransJectStack: recomputed layers (gradient checkpointing) would fill the"
                    " cache twice; use torch.no_grad() or eval()"
                )

        if gates is not None:
            self._check_count(gates, "TransJectStack")
        padding = check_padding(key_padding_mask, x, cache)
        reading = {"key_padding_mask": padding, "is_causal": self.is_causal, "cache": cache}
        spectrum: Tensor = self.spectrum(x, **reading) if sigma is None else sigma
        hidden = [x]
        used_gates: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            layer_gates = None if gates is None else gates[index]
            run: Callable[..., tuple[Tensor, Tensor]] = partial(layer, gates=layer_gates, **reading)
            if recomputes:
                run = partial(self._gradient_checkpointing_func, once(layer, run))
            x, used = run(x, spectrum)
            used_gates.append(used)
            if output_hidden_states:
                hidden.append(x)

        if cache is not None:
            cache.num_tokens += x.shape[1]
        states = tuple(hidden) if output_hidden_states else None
        return TransJectOutput(x, spectrum, tuple(used_gates), states)

    def recomputes(self) -> bool:
        """Return whether a pass now keeps only the layers' inputs, recomputed in backward."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def reconstruction_loss(
        self, x: Tensor, *, key_padding_mask: Tensor | None = None
    ) -> Tensor | None:
        """Return `GramSpectrum.reconstruction_loss`; None for a learnt or drawn spectrum."""
        if isinstance(self.spectrum, LearnedSpectrum | DrawnSpectrum):
            return None
        padding = check_padding(key_padding_mask, x)
        return self.spectrum.reconstruction_loss(x, key_padding_mask=padding)

    @torch.no_grad()
    def inverse(
        self,
        y: Tensor,
        sigma: Tensor,
        gates: Sequence[Tensor],
        *,
        tol: float | None = None,
        max_iter: int = 1000,
    ) -> tuple[Tensor, Inversion]:
        """Return `X^0` with `forward(X^0) = y`, by 2 L fixed points, and an `Inversion`.

        To rounding, with an a-posteriori error bound for the whole stack in norm tok. Behrmann et
        al. (2019), Algorithm 1. The layers are bijections only for given sigma and gates, which are
        not functions of y.

        Args:
            y: (batch, tokens, d).
            sigma: Of the pass that made y (`TransJectOutput`).
            gates: Of the same pass.
            tol: As in `InvertibleResidual.inverse`.
            max_iter: As in `InvertibleResidual.inverse`.

        Raises:
            NotContractiveError: A layer's contraction is not below 1 (constrain the weights with
                `constrain_`), or not known because a part is wrapped.
            ShapeError: y, sigma or gates do not fit.
            ConvergenceError: y is not finite, or `max_iter` is reached.
            ConfigError: Dropout is active, there are not L gates, or weights are not in memory.

        Cost: about `ln(1e-7) / ln(|r|)` passes through each layer, and 2 d^3 for the bound of each
        weight.
        """
        check_tokens(self, y, self.embed_dim, batched=True, min_tokens=1)
        self._check_count(gates, "TransJectStack.inverse")
        halves: list[nn.Module] = []
        for layer, layer_gates in zip(self.layers, gates, strict=True):
            halves += cast(TransJectBlock, layer).sublayers(sigma, layer_gates)
        return ReversibleSequential(halves, max_iter=max_iter).inverse(y, tol=tol)

    def _check_count(self, gates: Sequence[Tensor], where: str) -> None:
        if len(gates) != len(self.layers):
            raise ConfigError(
                f"{where}: received gates of {len(gates)} layers; expected {len(self.layers)}"
            )
