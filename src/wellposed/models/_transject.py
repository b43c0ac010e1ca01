"""The body that every TransJect model shares: an injective embedding and a stack of bi-Lipschitz
layers."""

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

# Rounding of a QR factor in float32: a weight that is closer to orthogonal than this has been drawn
# already.
_DRAWN = 1e-4


class GenerationCache(TransJectCache):
    """`TransJectCache` with what `generate` asks of a cache."""

    is_compileable = False

    def get_seq_length(self, _: int = 0) -> int:
        """Return how many tokens were seen, which is the same for every layer."""
        return self.num_tokens


@dataclass
class TransJectModelOutput(ModelOutput):
    """What the body returns; with sigma and gates, `invert` goes back from the last hidden
    state."""

    last_hidden_state: Tensor | None = None
    """(batch, tokens, d)."""
    past_key_values: TransJectCache | None = None
    """Running sums of the prefix, `1 + E L` numbers per channel, however long it is."""
    hidden_states: tuple[Tensor, ...] | None = None
    """X^0 and the output of each layer."""
    sigma: Tensor | None = None
    """(batch, d); causal (batch, tokens, d); learnt (d,)."""
    gates: tuple[Tensor, ...] | None = None
    """Of each layer: (batch, experts); causal (batch, tokens, experts)."""
    auxiliary_loss: Tensor | None = None
    """In training without a cache, the weighted loss that teaches the spectrum its basis: mean over
    the batch."""


class TransJectPreTrainedModel(CheckedPreTrainedModel):
    """Saving, loading and initial weights of every TransJect model."""

    config: TransJectConfig
    config_class = TransJectConfig
    _no_split_modules = ["TransJectBlock"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)

    def orthogonal_patterns(self) -> tuple[str, ...]:
        """Return the patterns of the weights that `wellposed.constrain_` is to hold orthogonal in
        training.

        >>> model = TransJectModel(TransJectConfig(hidden_size=8, spectrum="random"))
        >>> model.orthogonal_patterns()
        ('*.left', '*.right', '*.up_proj', '*.down_proj')
        """
        return orthogonal_patterns(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw what a constructor has not drawn: orthogonal weights only where they are not
        orthogonal yet."""
        if type(module) is nn.Linear:
            xavier_(module, self.config)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif not (isinstance(module, OrthogonalLinear) and _is_drawn(module.weight)):
            reset_(module)


class TransJectModel(TransJectPreTrainedModel):
    """`x -> X^L` of `TransJectStack` on `X^0 = [E[token], P[position]]`: distances between tokens
    are kept.

    Exact up to rounding while its orthogonal weights are held: layer l changes the distance of two
    tokens of a sequence by a factor within `[(1-|r_l|)^2, (1+|r_l|)^2]`, `|r_l| < 1/L`, in
    evaluation. Padding changes nothing for real tokens. What tokens can exchange is d numbers
    (sigma) and E gates a layer: see `TransJectStack`. Sengupta et al. (2023), corrected as the
    errata say.

    Train it with `constrain_(model, optimizer, where=model.orthogonal_patterns())`, and add
    `output.auxiliary_loss`.

    Args:
        config: what the model is made of; `config.is_causal` None means an encoder.

    Raises:
        ConfigError: a value of the configuration is not usable.

    Cost: linear in the number of tokens; with gradient checkpointing, training keeps one input a
    layer.

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
            **asdict(TransJectOptions.of(config)),
        )
        self.post_init()

    @takes(ModelInputs)
    def forward(self, given: ModelInputs) -> TransJectModelOutput:
        """Return the hidden states of every token, and what `invert` needs.

        Args:
            input_ids: int (batch, tokens).
            attention_mask: (batch, cached tokens + tokens), 1 = real, 0 = padding, on any side;
                None = all real.
            position_ids: int (batch | 1, tokens); counted over real tokens where None.
            past_key_values: of earlier tokens; extended in place.
            inputs_embeds: X^0 itself, (batch, tokens, d), position codes included, in place of
                `input_ids`.
            use_cache: make and return a cache; only where asked for, or where one is given.
            output_hidden_states: also return X^0 and the output of each layer.
            output_attentions: must not be True: there are none.

        Raises:
            ShapeError: masks, positions, lengths or (on the CPU) tokens that do not fit; a sample
                of padding alone.
            ConfigError: attention weights are asked for; or a cache in an encoder, in recomputed
                layers, or against `use_cache=False`.
        """
        cache = self.cache_of(given)
        # Vectors hold their position codes already, and sines go on beyond their table.
        counted = given.input_ids is not None and self.embeddings.position_kind == "learned"
        read = read_inputs(
            given,
            self.config,
            type(self).__name__,
            cached=0 if cache is None else cache.num_tokens,
            limit=self.config.max_position_embeddings if counted else None,
            note=": X^0, position codes included",
        )
        if given.input_ids is None:
            x = cast(Tensor, given.inputs_embeds)
        elif given.position_ids is None and cache is None and _counts_up(read.padding):
            x = self.embeddings(given.input_ids)
        else:
            positions = read.positions
            x = self.embeddings(given.input_ids, positions[0] if len(positions) == 1 else positions)
        # What is cached is in the running sums already; its part of the mask has been used.
        padding = None if read.padding is None else read.padding[:, -read.length :]
        how = {"cache": cache, "output_hidden_states": self.keeps_states(given)}
        output = self.stack(x, key_padding_mask=padding, **how)
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
        """Return `X^0` with `X^L = hidden`, token by token, and how well: see
        `TransJectStack.inverse`.

        Status: to rounding. The report's `error_bound` bounds every token's distance from the exact
        inverse of `hidden` as given, for the stored weights, sigma and gates, rounding included;
        what rounding the forward pass put into `hidden` comes on top, over `prod(1 - c)`.

        Args:
            hidden: last hidden state, (batch, tokens, d).
            sigma: of the pass that made it (`output.sigma`).
            gates: of that pass (`output.gates`).
            tol: size of a residual at which a fixed point ends; near rounding where None.
            max_iter: iterations of a sublayer.

        Returns:
            `X^0` (batch, tokens, d) and the `Inversion`.

        Raises:
            NotContractiveError: the weights are off orthogonality: hold them with `constrain_`.
            ConvergenceError: `hidden` is not finite, or `max_iter` is reached.
            ConfigError: dropout is active (call `eval()`), or there are not L gates.

        Cost: about `ln(1e-7) / ln(|r|)` passes through each layer, and one in float64 for the
        bound.
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
    """Whether real tokens stand at 0, 1, 2, ...: there is no padding, or (looked for on the CPU)
    only behind them."""
    if padding is None:
        return True
    return on_host(padding) and not bool((padding[:, :-1] & ~padding[:, 1:]).any())
