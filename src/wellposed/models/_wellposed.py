"""The body of all wellposed models: embeddings and blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from wellposed.errors import ConfigError
from wellposed.initialize import t_fixup_decoder_factor, t_fixup_factor
from wellposed.models._config import WellposedConfig
from wellposed.models._init import INITS
from wellposed.models._inputs import CheckedPreTrainedModel, ModelInputs, read_inputs, takes
from wellposed.nn import (
    POSITIONS,
    BallEmbedding,
    Block,
    SinusoidalPositions,
    UnitEmbedding,
    build_layers,
    on_host,
    run_block,
)
from wellposed.nn import attention_mask as make_mask


class LayerView:
    """One layer of a Hugging Face cache, as a `wellposed.nn.LayerCache`."""

    def __init__(self, cache: Cache, layer_index: int) -> None:
        self.cache = cache
        self.layer_index = layer_index

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (batch, heads, tokens, head_dim); return all of this layer."""
        return self.cache.update(key, value, self.layer_index)


class MemoryView:
    """The encoder's keys and values in one layer's cache, as a `wellposed.nn.MemoryCache`."""

    def __init__(self, cache: EncoderDecoderCache, layer_index: int) -> None:
        self.cache = cache
        self.layer_index = layer_index

    def once(self, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the stored values; the first time, store those that `project` returns."""
        stored = self.cache.cross_attention_cache
        if not self.cache.is_updated.get(self.layer_index):
            stored.update(*project(), self.layer_index)
            self.cache.is_updated[self.layer_index] = True
        layer: Any = stored.layers[self.layer_index]
        return layer.keys, layer.values


class Embeddings(nn.Module):
    """`x_i = s (E[token_i] + P[position_i])` with `s = sqrt(D)` or 1, then dropout.

    Exact. E has norm 1 with `unit_embeddings`, below 1 with `ball_embeddings`. Vaswani
    et al. (2017), sec. 3.4 and 3.5: sines are added after the factor; `position_scale` is a further
    factor on them. A decoder that shares embeddings has no table, but receives the encoder's at
    every call.
    """

    def __init__(self, config: Any, *, stack: str = "encoder") -> None:
        super().__init__()
        table = UnitEmbedding if config.unit_embeddings else nn.Embedding
        table = BallEmbedding if config.ball_embeddings else table
        owns = stack == "encoder" or not config.share_embeddings
        self.token = table(config.vocab_size, config.hidden_size) if owns else None
        self.position = POSITIONS.get(config.position)(config)
        if isinstance(self.position, SinusoidalPositions):
            self.position.rescale(_position_scale(config, own_depth=owns and stack == "decoder"))
        in_ball = config.unit_embeddings or config.ball_embeddings
        scaled = config.scale_embeddings and not in_ball
        self.scale = math.sqrt(config.hidden_size) if scaled else 1.0
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        inputs_embeds: Tensor | None = None,
        *,
        table: nn.Module | None = None,
    ) -> Tensor:
        """Map ids (batch, tokens), or vectors (batch, tokens, D), to the first block's input."""
        table = cast(nn.Module, table or self.token)
        tokens = table(input_ids) if inputs_embeds is None else inputs_embeds
        positions = self.scale * self.position(positions)
        return self.dropout(torch.add(positions, tokens, alpha=self.scale))


def _position_scale(config: Any, *, own_depth: bool) -> float:
    """Return the factor on sines; under T-Fixup it defaults to that of the token embeddings."""
    if config.position_scale is not None:
        return float(config.position_scale)
    if config.init != "t_fixup":
        return 1.0
    if not config.is_encoder_decoder:
        return t_fixup_factor(2 * config.num_hidden_layers)
    # A shared table of tokens is scaled once, by the depth of the encoder.
    return t_fixup_decoder_factor(config.decoder_depth if own_depth else config.num_hidden_layers)


class WellposedPreTrainedModel(CheckedPreTrainedModel):
    """Saving, loading and initial weights of every wellposed model."""

    config: WellposedConfig
    config_class = WellposedConfig
    _no_split_modules = ["Block"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)
    _supports_sdpa = True
    _is_part = False
    """Whether a larger model contains this one, and initialises it."""

    def check_config(self, config: Any) -> None:
        """Raise `ConfigError` for an unusable configuration, or another kernel of attention."""
        super().check_config(config)
        if config._attn_implementation not in {None, "sdpa"}:
            raise ConfigError(
                f"{type(self).__name__}: received"
                f" attn_implementation={config._attn_implementation!r}; expected 'sdpa' or nothing:"
                " the attention of this model is chosen by the option attention of its"
                " configuration"
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        INITS.get(self.config.init).module(module, self.config)

    def init_weights(self) -> None:
        """Initialise a fresh model, heads included; on the meta device, wait for the checkpoint."""
        super().init_weights()
        initialize = INITS.get(self.config.init).model
        if initialize is not None and not self._is_part and self.device.type != "meta":
            initialize(self)


class WellposedBody(WellposedPreTrainedModel):
    """`x -> LN_final(B_L(... B_1(s (E[token] + P[position]))))`: base of encoders and decoders."""

    def __init__(
        self,
        config: WellposedConfig,
        block: Callable[[Any], Block],
        depth: int,
        *,
        stack: str,
        is_causal: bool,
        is_part: bool,
    ) -> None:
        super().__init__(config)
        self._is_part = is_part
        blocks = build_layers(config, block, depth)  # random numbers are drawn in this order
        self.embeddings = Embeddings(config, stack=stack)
        self.layers, self.final_norm = blocks
        self.is_causal = is_causal
        self.post_init()

    def run(
        self,
        inputs: ModelInputs,
        cache: Cache | None,
        *memory: Tensor,
        reading: Callable[[int], dict[str, Any]] = lambda _: {},
        table: nn.Module | None = None,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states, normed, and all of them if asked for.

        Args:
            inputs: arguments of ``forward``.
            cache: keys and values of earlier tokens.
            *memory: in a decoder, the encoder's states.
            reading: in a decoder, keywords of each layer's block.
            table: token embedding, if the body has none.
        """
        self_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        cached = 0 if self_cache is None else int(self_cache.get_seq_length())
        limit = self.config.max_position_embeddings
        where = type(self).__name__
        read = read_inputs(inputs, self.config, where, cached=cached, limit=limit)
        ids = inputs.input_ids
        # In a causal decoder, padding on the right needs no mask.
        if ids is not None and on_host(ids) and not memory:
            self.warn_if_padding_and_no_attention_mask(ids, inputs.attention_mask)

        mask = make_mask(
            read.padding, self.is_causal, read.length, read.num_keys, read.positions.device
        ).shared_by_layers()
        x = self.embeddings(ids, read.positions, inputs.inputs_embeds, table=table)
        states = [x]
        keep = self.keeps_states(inputs)
        for index, layer in enumerate(self.layers):
            x = run_block(
                cast(Block, layer),
                x,
                *memory,
                mask=mask,
                is_causal=self.is_causal,
                cache=None if self_cache is None else LayerView(self_cache, index),
                **reading(index),
            )
            if keep:
                states.append(x)

        x = self.final_norm(x)
        hidden_states: Any = (*states[:-1], x) if keep else None
        return BaseModelOutputWithPast(cast(Any, x), cache, hidden_states)

    def _has_blocks(self) -> bool:
        return len(self.layers) > 0

    def _recomputes(self) -> bool:
        blocks = [cast(Block, layer) for layer in self.layers]
        return any(block.gradient_checkpointing and block.training for block in blocks)

    def _new_cache(self) -> Cache:
        return DynamicCache(config=self.config)


class WellposedModel(WellposedBody):
    """`x -> LN_final(B_L(... B_1(s (E[token] + P[position]))))`, the hidden states of every token.

    Positions count real tokens and padding is masked, so padding changes nothing for real tokens. A
    row without real tokens gives finite values. If `config.is_causal` is None, it is an encoder.
    Set `is_part` if a larger model initialises it. A `ConfigError` lists values that are not
    usable.

    >>> model = WellposedModel(WellposedConfig(hidden_size=8, num_attention_heads=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: WellposedConfig, *, is_part: bool = False) -> None:
        options = {"stack": "encoder", "is_causal": bool(config.is_causal), "is_part": is_part}
        super().__init__(config, Block, config.num_hidden_layers, **options)

    @takes(ModelInputs)
    def forward(self, inputs: ModelInputs) -> BaseModelOutputWithPast:
        """Return the hidden states of every token.

        Keyword Args:
            input_ids (Tensor): int (batch, tokens).
            attention_mask (Tensor): (batch, cached + new tokens), 1 = real, 0 = padding on any
                side; None = all real.
            position_ids (Tensor): int (batch | 1, tokens); default: counted over real tokens.
            inputs_embeds (Tensor): (batch, tokens, D) in place of `input_ids`, before the factor
                sqrt(D).
            output_hidden_states (bool): also return the input of the first block and the output of
                each.
            output_attentions (bool): must not be True. The fused kernels never form the weights.
            past_key_values (Cache): keys and values of earlier tokens; extended in place.
            use_cache (bool): make and return a cache; default: only if one is given.

        Returns:
            `last_hidden_state` (batch, tokens, D), normed; `past_key_values`; `hidden_states`.

        Raises:
            ShapeError: arguments or (on the CPU) tokens that do not fit.
            ConfigError: attention weights, or a cache in an encoder, in recomputed blocks, or
                against `use_cache=False`.
        """
        return self.run(inputs, self.cache_of(inputs))
