"""TransJect: one spectrum, L layers, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wellposed.errors import ConfigError
from wellposed.nn._checks import Eps, check_tokens
from wellposed.nn.invertible import Inversion, ReversibleSequential
from wellposed.nn.transject._block import TransJectBlock
from wellposed.nn.transject._gram import (
    Gating,
    GramSpectrum,
    LearnedSpectrum,
    Normalization,
    TransJectCache,
    check_padding,
)
from wellposed.nn.transject._parts import ResetByParts, ResidualStart
from wellposed.options import Rate, Size

SpectrumKind = Literal["gram", "random"]


@dataclass(frozen=True)
class TransJectOutput:
    """What a pass of `TransJectStack` gives; sigma and gates are what `inverse` needs."""

    last_hidden_state: Tensor
    """(batch, tokens, d)."""
    sigma: Tensor
    """(batch, d); causal (batch, tokens, d); learnt (d,)."""
    gates: tuple[Tensor, ...]
    """Of each layer: (batch, experts); causal (batch, tokens, experts)."""
    hidden_states: tuple[Tensor, ...] | None = None
    """The input and the output of each layer, where asked for."""


class TransJectStack(ResetByParts):
    """`X^0 -> X^L`: for given sigma and gates, distances change by factors in
    `[prod (1-|r_l|)^2, prod (1+|r_l|)^2]`.

    Exact up to rounding for orthogonal weights, for any two tokens of one sequence,
    `r_l = alpha_l/L`, `|alpha_l| < 1`: within `[(1-1/L)^(2L), (1+1/L)^(2L)]` whatever is learnt.
    Linear in the number of tokens, in time and memory. Sengupta et al. (2023), sec. 3.5 and Theorem
    2, with the corrections of the errata: padding enters neither spectrum nor gates; sigma is at
    most 1; no biases; `is_causal` is causal in sigma, its normalisation and the gates.

    What tokens can exchange: d numbers (sigma, once, from `X^0`) and the E gates of each layer,
    which are the same for the whole sequence (causal: for the prefix). Nothing else: given those,
    every token is mapped by itself, whatever its neighbours say and in whatever order they stand.
    Order is seen only through the position codes in `X^0`.

    Args:
        embed_dim: width d.
        num_layers: L.
        num_experts, gating: see `ExpertMixture`.
        spectrum: `"gram"` (`GramSpectrum`) or `"random"` (`LearnedSpectrum`).
        spectrum_norm, eps: see `GramSpectrum`; eps serves the gates too.
        residual: see `InjectiveResidual`. dropout: see `OrthogonalFeedForward`.
        is_causal: whether a token is kept from later tokens; only then can it model language, and
            be cached.

    Raises:
        ConfigError: L is no integer of at least 1, an unknown name, or a part refuses its
            arguments.

    Cost: `(E + 1) 2 N d^2` multiply-adds a layer, or `(E + 2) N d^2 + E d^3` a sample when folded
    (N > d). Hold the weights in training: `constrain_(model, optimizer, where=OrthogonalLinear)`.
    With `gradient_checkpointing` set, each layer keeps only its input in training and is computed
    again in the backward pass.
    When not to use: where a token must read what particular other tokens say (copying, lookup); use
    attention.

    >>> stack = TransJectStack(8, 3, num_experts=2, residual="sigmoid")
    >>> x = torch.randn(2, 5, 8)
    >>> output = stack(x)
    >>> back, report = stack.inverse(output.last_hidden_state, output.sigma, output.gates)
    >>> bool((back - x).abs().max() < 1e-4), report.error_bound < 1e-4
    (True, True)
    """

    shown = ("is_causal",)

    def __init__(
        self,
        embed_dim: Size,
        num_layers: Size,
        *,
        num_experts: Size = 1,
        spectrum: SpectrumKind = "gram",
        spectrum_norm: Normalization = "max",
        eps: Eps = 1e-6,
        gating: Gating = "pooled",
        residual: ResidualStart = "rezero",
        dropout: Rate = 0.0,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.is_causal = is_causal
        self.spectrum: GramSpectrum | LearnedSpectrum
        if spectrum == "gram":
            self.spectrum = GramSpectrum(embed_dim, normalization=spectrum_norm, eps=eps)
        else:
            self.spectrum = LearnedSpectrum(embed_dim)
        gates: dict[str, Any] = {"num_experts": num_experts, "gating": gating, "eps": eps}
        of_layers: dict[str, Any] = {**gates, "residual": residual, "dropout": dropout}
        self.layers = nn.ModuleList(
            TransJectBlock(embed_dim, num_layers, layer_index=index, **of_layers)
            for index in range(num_layers)
        )
        # The names under which Hugging Face switches gradient checkpointing on.
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
        """Run all layers.

        Args:
            x: embedded tokens, (batch, tokens, d).
            key_padding_mask: bool (batch, tokens), True = padding; with a cache (batch, cached +
                tokens) will do.
            cache: of earlier tokens, for a causal stack; this call adds its tokens to it.
            output_hidden_states: keep the input and every layer's output.
            sigma, gates: use these, from an earlier pass, in place of computed ones.

        Returns:
            `TransJectOutput`.

        Raises:
            ShapeError: x, the mask, the cache, sigma or gates do not fit, or (looked for on the
                CPU) a sample has padding alone.
            ConfigError: a cache for a stack that is not causal, or whose recomputed layers would
                fill it twice; or there are not L gates.
        """
        check_tokens(self, x, self.embed_dim, batched=True, least=1)
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
        found: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            given = None if gates is None else gates[index]
            run: Callable[..., tuple[Tensor, Tensor]] = partial(layer, gates=given, **reading)
            if recomputes:
                run = partial(self._gradient_checkpointing_func, run)
            x, used = run(x, spectrum)
            found.append(used)
            if output_hidden_states:
                hidden.append(x)
        if cache is not None:
            cache.num_tokens += x.shape[1]
        states = tuple(hidden) if output_hidden_states else None
        return TransJectOutput(x, spectrum, tuple(found), states)

    def recomputes(self) -> bool:
        """Return whether a pass now would keep only inputs of layers, for a backward pass that runs
        them again."""
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def reconstruction_loss(
        self, x: Tensor, *, key_padding_mask: Tensor | None = None
    ) -> Tensor | None:
        """Return `GramSpectrum.reconstruction_loss` of the embedded tokens; None for a learnt
        spectrum."""
        if isinstance(self.spectrum, LearnedSpectrum):
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
        """Return `X^0` with `forward(X^0) = y`, by a fixed point for each of the 2 L halves, and
        how well.

        To rounding, with an a-posteriori error bound for the whole stack. Behrmann et al. (2019),
        Algorithm 1, for maps
        that are bijections only once sigma and gates are known: they are not functions of y.

        Args:
            y: (batch, tokens, d).
            sigma, gates: of the pass that made y (`TransJectOutput`).
            tol, max_iter: see `InvertibleResidual.inverse`.

        Returns:
            `X^0` and an `Inversion`: `error_bound` in norm tok, the largest 2-norm of a token's
            error.

        Raises:
            NotContractiveError: a layer's contraction is not below 1 (hold the weights with
                `constrain_`), or not known, since a part is wrapped.
            ShapeError: y, sigma or gates do not fit.
            ConvergenceError: y is not finite, or `max_iter` is reached.
            ConfigError: dropout is active, there are not L gates, or weights are not in memory.

        Cost: about `ln(1e-7) / ln(|r|)` passes through each layer, and 2 d^3 for the bound of each
        weight.
        """
        check_tokens(self, y, self.embed_dim, batched=True, least=1)
        self._check_count(gates, "TransJectStack.inverse")
        halves: list[nn.Module] = []
        for layer, kept in zip(self.layers, gates, strict=True):
            halves += cast(TransJectBlock, layer).sublayers(sigma, kept)
        return ReversibleSequential(halves, max_iter=max_iter).inverse(y, tol=tol)

    def _check_count(self, gates: Sequence[Tensor], where: str) -> None:
        if len(gates) != len(self.layers):
            raise ConfigError(
                f"{where}: received gates of {len(gates)} layers; expected {len(self.layers)}"
            )
