"""The body of all TransJect models: an injective embedding and a stack of bi-Lipschitz layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

from wellposed.linalg import isometry_error
from wellposed.model_options import TransJectOptions
from wellposed.models._config import TransJectConfig
from wellposed.models._init import reset_, xavier_
from wellposed.models._inputs import CheckedPreTrainedModel, ModelInputs, read_inputs, takes
from wellposed.nn import (
    InjectiveEmbedding,
    Inversion,
    OrthogonalLinear,
    TransJectCache,
    TransJectStack,
    on_host,
    orthogonal_patterns,
)

# Rounding of a QR factor in float32: a weight closer to orthogonal than this is drawn already.
_DRAWN = 1e-4


class GenerationCache(TransJectCache):
    """`TransJectCache` with the methods that `generate` needs."""

    is_compileable = False

    def get_seq_length(self, _: int = 0) -> int:
        """Return the number of tokens, the same for every layer."""
        return self.num_tokens


@dataclass
class TransJectModelOutput(ModelOutput):
    """Output of the body; `invert` needs its last hidden state, sigma and gates."""

    last_hidden_state: Tensor | None = None
    """(batch, tokens, d)."""
    past_key_values: TransJectCache | None = None
    """Running sums of the prefix, `1 + E L` numbers per channel at any length."""
    hidden_states: tuple[Tensor, ...] | None = None
    """X^0 and the output of each layer."""
    sigma: Tensor | None = None
    """(batch, d); causal (batch, tokens, d); learnt (d,)."""
    gates: tuple[Tensor, ...] | None = None
    """Of each layer: (batch, experts); causal (batch, tokens, experts)."""
    auxiliary_loss: Tensor | None = None
    """In training without a cache: the weighted, mean loss that fits the spectrum's basis."""


class TransJectPreTrainedModel(CheckedPreTrainedModel):
    """Saving, loading and initial weights of every TransJect model."""

    config: TransJectConfig
    config_class = TransJectConfig
    _no_split_modules = ["TransJectBlock"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)

    def orthogonal_patterns(self) -> tuple[str, ...]:
        """Return patterns of the weights that `wellposed.constrain_` must keep orthogonal."""
        return orthogonal_patterns(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights that no constructor has drawn."""
        if type(module) is nn.Linear:
            xavier_(module, self.config)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif not (isinstance(module, OrthogonalLinear) and _is_drawn(module.weight)):
            reset_(module)


class TransJectModel(TransJectPreTrainedModel):
    """`x -> X^L` of `TransJectStack` on `X^0 = [E[token], P[position]]`, bi-Lipschitz between
    tokens.

    Exact up to rounding, in evaluation, while `constrain_` keeps its weights orthogonal: layer l
    scales the distance of two tokens of a sequence by a factor in `[(1-|r_l|)^2, (1+|r_l|)^2]`,
    `|r_l| < 1/L`. Padding changes nothing for real tokens. Tokens exchange only d numbers (sigma)
    and E gates a layer: see `TransJectStack`. Sengupta et al. (2023), corrected as in the errata.

    Train it with `constrain_(model, optimizer, where=model.orthogonal_patterns())`, and add
    `output.auxiliary_loss`. If `config.is_causal` is None, it is an encoder; a `ConfigError` lists
    values that are not usable. Cost: linear in tokens; checkpointing keeps one input a layer.

    >>> model = TransJectModel(TransJectConfig(hidden_size=8, num_experts=2)).eval()
    >>> output = model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    >>> start, report = model.invert(output.last_hidden_state, output.sigma, output.gates)
    >>> bool((start - output.hidden_states[0]).abs().max() < 1e-4), report.error_bound < 1e-4
    (True, True)
    """

    cache_class = TransJectCache

    def __init__(self, config: TransJectConfig) -> None:
        super().__init__(config)
        self.is_causal = bool(config.is_causal)
        self.embeddings = InjectiveEmbedding(
            config.vocab_size,
            config.hidden_size,
            position=cast(Literal["sinusoidal", "learned"], config.position),
            max_positions=config.max_position_embeddings,
        )
        self.stack = TransJectStack(
            config.hidden_size,
            config.num_hidden_layers,
            gating=cast(Any, config.gating),
            residual=cast(Any, config.residual),
            eps=config.spectrum_eps,
            dropout=config.dropout,
            is_causal=self.is_causal,
            **asdict(TransJectOptions.from_config(config)),
        )
        self.post_init()

    @takes(ModelInputs)
    def forward(self, inputs: ModelInputs) -> TransJectModelOutput:
        """Return the hidden states of every token, and the arguments of `invert`.

        Keyword Args:
            input_ids (Tensor): int (batch, tokens).
            attention_mask (Tensor): (batch, cached + new tokens), 1 = real, 0 = padding on any
                side; None = all real.
            position_ids (Tensor): int (batch | 1, tokens); default: counted over real tokens.
            inputs_embeds (Tensor): X^0, (batch, tokens, d), with position codes, in place of
                `input_ids`.
            output_hidden_states (bool): X^0 and the output of each layer are returned as well.
            output_attentions (bool): must not be True: there are none.
            past_key_values (TransJectCache): of earlier tokens; extended in place.
            use_cache (bool): make and return a cache; default: only if one is given.

        Raises:
            ShapeError: arguments or (on the CPU) tokens that do not fit, or a row with only
                padding.
            ConfigError: attention weights, or a cache that cannot be used.
        """
        cache = self.cache_of(inputs)
        # Vectors contain their position codes, and sines have no limit.
        counted = inputs.input_ids is not None and self.embeddings.position_kind == "learned"
        read = read_inputs(
            inputs,
            self.config,
            type(self).__name__,
            cached=0 if cache is None else cache.num_tokens,
            limit=self.config.max_position_embeddings if counted else None,
            note=": X^0, position codes included",
        )
        if inputs.input_ids is None:
            x = cast(Tensor, inputs.inputs_embeds)
        elif inputs.position_ids is None and cache is None and _counts_up(read.padding):
            x = self.embeddings(inputs.input_ids)
        else:
            positions = read.positions[0] if len(read.positions) == 1 else read.positions
            x = self.embeddings(inputs.input_ids, positions)

        # Cached tokens are in the running sums; drop their part of the mask.
        padding = None if read.padding is None else read.padding[:, -read.length :]
        options = {"cache": cache, "output_hidden_states": self.keeps_states(inputs)}
        output = self.stack(x, key_padding_mask=padding, **options)
        return TransJectModelOutput(
            last_hidden_state=output.last_hidden_state,
            past_key_values=cache,
            hidden_states=output.hidden_states,
            sigma=output.sigma,
            gates=output.gates,
            auxiliary_loss=self._auxiliary_loss(x, padding) if cache is None else None,
        )

    def invert(
        self,
        hidden: Tensor,
        sigma: Tensor,
        gates: Sequence[Tensor],
        *,
        tol: float | None = None,
        max_iter: int = 1000,
    ) -> tuple[Tensor, Inversion]:
        """Return `X^0` with `X^L = hidden`, token by token, and an `Inversion`.

        Status: to rounding. `error_bound` bounds every token's distance from the exact inverse of
        `hidden` as given, for the stored weights, sigma and gates, rounding included. Rounding in
        the forward pass that made `hidden` comes on top, divided by `prod(1 - c)`.

        Args:
            hidden: (batch, tokens, d), the last hidden state.
            sigma: `output.sigma` of the pass that made it.
            gates: `output.gates` of the same pass.
            tol: residual at which a fixed point ends; default near rounding.
            max_iter: iterations of a sublayer.

        Raises:
            NotContractiveError: the weights are not orthogonal: keep them so with `constrain_`.
            ConvergenceError: `hidden` is not finite, or `max_iter` is reached.
            ConfigError: dropout is active (call `eval()`), or there are not L gates.

        Cost: about `ln(1e-7) / ln(|r|)` passes per layer, and one in float64 for the bound.
        """
        return self.stack.inverse(hidden, sigma, gates, tol=tol, max_iter=max_iter)

    def _auxiliary_loss(self, x: Tensor, padding: Tensor | None) -> Tensor | None:
        weight = self.config.reconstruction_weight
        if not self.training or not weight:
            return None
        loss = self.stack.reconstruction_loss(x, key_padding_mask=padding)
        return None if loss is None else weight * loss

    def _recomputes(self) -> bool:
        return self.stack.recomputes()

    def _new_cache(self) -> TransJectCache:
        return GenerationCache()


def _is_drawn(weight: Tensor) -> bool:
    return weight.is_meta or float(isometry_error(weight)) < _DRAWN


def _counts_up(padding: Tensor | None) -> bool:
    """Return whether real tokens are at 0, 1, 2, ...; padding is looked for on the CPU only."""
    if padding is None:
        return True
    return on_host(padding) and not bool((padding[:, :-1] & ~padding[:, 1:]).any())
