"""The body that every wellposed model shares: embeddings and blocks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from wellposed.errors import ConfigError, ShapeError
from wellposed.models._config import WellposedConfig
from wellposed.models._embeddings import Embeddings, check_positions, check_tokens, on_host, padding_of, positions_of
from wellposed.models._init import INITS
from wellposed.nn import Block, TransformerStack, run_block
from wellposed.nn import attention_mask as make_mask


class LayerView:
    """One layer of a Hugging Face cache, as `wellposed.nn.LayerCache` wants it."""

    def __init__(self, cache: Cache, layer_index: int) -> None:
        self.cache = cache
        self.layer_index = layer_index

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (batch, heads, tokens, head_dim) and return all of this layer."""
        return self.cache.update(key, value, self.layer_index)


class WellposedPreTrainedModel(PreTrainedModel):
    """Saving, loading and initial weights of every wellposed model."""

    config: WellposedConfig
    config_class = WellposedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)
    _supports_sdpa = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: WellposedConfig) -> None:
        config.check()
        refuse_attentions(config.output_attentions)
        if config._attn_implementation not in {None, "sdpa"}:
            raise ConfigError(
                f"{type(self).__name__}: received attn_implementation={config._attn_implementation!r}; expected 'sdpa' "
                "or nothing: the attention of this model is chosen by the option attention of its configuration"
            )
        super().__init__(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        INITS.get(self.config.init).module(module, self.config)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return cast(WellposedModel, self.base_model).embeddings.token

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        cast(WellposedModel, self.base_model).embeddings.token = cast(nn.Embedding, value)


class WellposedModel(WellposedPreTrainedModel):
    """`x -> LN_final(B_L(... B_1(s (E[token] + P[position]))))`, the hidden states of every token.

    Positions are counted over real tokens and padding is masked, so padding changes nothing for real tokens. A row
    without any real token gives finite values.

    Args:
        config: what the model is made of; `config.is_causal` None means an encoder.

    Raises:
        ConfigError: a value of the configuration is not usable.

    >>> model = WellposedModel(WellposedConfig(hidden_size=8, num_attention_heads=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: WellposedConfig) -> None:
        super().__init__(config)
        stack = TransformerStack(config, is_causal=bool(config.is_causal))
        self.embeddings = Embeddings(config)
        self.layers = stack.layers
        self.final_norm = stack.final_norm
        self.is_causal = stack.is_causal
        self.post_init()

    def init_weights(self) -> None:
        """Give a fresh model its weights; a model on the meta device waits for its checkpoint."""
        super().init_weights()
        whole = INITS.get(self.config.init).model
        if whole is not None and self.device.type != "meta":
            whole(self)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states of every token.

        Args:
            input_ids: int (batch, tokens).
            attention_mask: (batch, cached tokens + tokens), 1 = real, 0 = padding, on any side; None = all real.
            position_ids: int (batch | 1, tokens); counted over real tokens where None.
            past_key_values: keys and values of earlier tokens; extended in place.
            inputs_embeds: (batch, tokens, D) in place of `input_ids`, before the factor sqrt(D).
            use_cache: make and return a cache; only where asked for, or where one is given.
            output_hidden_states: also return the states before the first block and after each, the last one normed.
            output_attentions: must not be True: the fused kernels never form the weights.

        Returns:
            `last_hidden_state` (batch, tokens, D); `past_key_values`; `hidden_states`.

        Raises:
            ShapeError: masks, positions, lengths or (on the CPU) tokens that do not fit.
            ConfigError: attention weights are asked for; or a cache in an encoder, in recomputed blocks, or against
                `use_cache=False`.
        """
        refuse_attentions(output_attentions)
        batch, num_queries, device = self._check_input(input_ids, inputs_embeds, attention_mask)
        past_key_values = self._cache(past_key_values, use_cache)
        num_keys = num_queries + (0 if past_key_values is None else int(past_key_values.get_seq_length()))
        padding = padding_of(attention_mask, batch, num_keys)
        positions = positions_of(padding, num_queries, num_keys, device) if position_ids is None else position_ids
        limit = self.config.max_position_embeddings
        check_positions(positions, num_keys, limit, given=position_ids is not None, where=type(self).__name__)
        mask = make_mask(padding, self.is_causal, num_queries, num_keys, device)
        x = self.embeddings(input_ids, positions, inputs_embeds)
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [x]
        for index, layer in enumerate(self.layers):
            cache = None if past_key_values is None else LayerView(past_key_values, index)
            x = run_block(cast(Block, layer), x, mask=mask, is_causal=self.is_causal, cache=cache)
            if keep:
                states.append(x)
        x = self.final_norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=cast(Any, x),
            past_key_values=past_key_values,
            hidden_states=cast(Any, (*states[:-1], x)) if keep else None,
        )

    def _check_input(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, attention_mask: Tensor | None
    ) -> tuple[int, int, torch.device]:
        if (input_ids is None) == (inputs_embeds is None):
            received = "neither" if input_ids is None else "both"
            raise ShapeError(f"{type(self).__name__}: received {received} of input_ids and inputs_embeds; give one")
        if input_ids is not None:
            check_tokens(input_ids, self.config.vocab_size)
            if on_host(input_ids):
                self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            return input_ids.shape[0], input_ids.shape[1], input_ids.device
        inputs_embeds = cast(Tensor, inputs_embeds)
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
            raise ShapeError(
                f"inputs_embeds: received shape {tuple(inputs_embeds.shape)}; expected (batch, tokens, "
                f"{self.config.hidden_size})"
            )
        return inputs_embeds.shape[0], inputs_embeds.shape[1], inputs_embeds.device

    def _cache(self, past_key_values: Cache | None, use_cache: bool | None) -> Cache | None:
        if past_key_values is None and not use_cache:
            return None
        reason = None
        if use_cache is False:
            reason = "past_key_values were given together with use_cache=False; give one of them"
        elif not self.is_causal:
            reason = "the model is not causal, so earlier tokens change with later ones; call it with use_cache=False"
        elif torch.is_grad_enabled() and any(self._recomputed(cast(Block, layer)) for layer in self.layers):
            reason = "recomputed blocks (gradient checkpointing) would fill it twice; use torch.no_grad() or eval()"
        if reason is not None:
            raise ConfigError(f"{type(self).__name__}: no cache can be used: {reason}")
        return DynamicCache(config=self.config) if past_key_values is None else past_key_values

    @staticmethod
    def _recomputed(layer: Block) -> bool:
        return layer.gradient_checkpointing and layer.training


def refuse_attentions(output_attentions: bool | None) -> None:
    """Raise `ConfigError` where attention weights are asked for.

    >>> refuse_attentions(True)
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: output_attentions=True: the attention kernels never form the weights, so none can be \
returned; leave it False, and use wellposed.measure(model, batch) for attention statistics
    """
    if output_attentions:
        raise ConfigError(
            "output_attentions=True: the attention kernels never form the weights, so none can be returned; leave it "
            "False, and use wellposed.measure(model, batch) for attention statistics"
        )
