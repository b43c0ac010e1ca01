"""Language models: the next token from all earlier ones."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar, cast

from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from wellposed.call_checks import known_keywords
from wellposed.errors import ConfigError
from wellposed.models._config import WellposedConfig
from wellposed.models._heads import LanguageHead, Output, following, kept_positions, share_of
from wellposed.models._wellposed import WellposedModel, WellposedPreTrainedModel

CacheKind = TypeVar("CacheKind")
ConfigKind = TypeVar("ConfigKind", bound=PreTrainedConfig)


class GenericForCausalLM(LanguageHead[Output], Generic[Output, CacheKind]):
    """`logits_i = W x_i` for the states x of a causal body `model`, of whatever family."""

    @can_return_tuple
    @known_keywords
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        past_key_values: CacheKind | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Output:
        """Return the logits of the next token at every position and, with labels, their mean
        cross-entropy in nats.

        Args:
            input_ids: see `forward` of the body, `WellposedModel` or `TransJectModel`, as are the
                arguments not named here.
            labels: int (batch, tokens), usually the input ids; shifted inside; -100 is not counted.
            logits_to_keep: only the last so many positions, or the positions in a tensor; 0 = all.
            num_items_in_batch: divide the summed loss by this, the labels of all micro-batches of a
                step, in place of the number of labels here; an auxiliary loss then counts by the
                part of them that is here.

        Returns:
            `loss` where labels are given, plus the body's auxiliary loss where it has one; `logits`
            (batch, kept tokens, vocab_size); and of what the body returns all that the output has a
            field for.

        Raises:
            ShapeError: see the body's `forward`.
            ConfigError: see the body's `forward`.
        """
        output = self.run_body(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        kept = kept_positions(logits_to_keep)
        logits = self.logits_of(cast(Tensor, output.last_hidden_state)[:, kept])
        if labels is None:
            return self.result(logits, None, output)
        targets = following(labels)[:, kept]
        loss = self.token_loss(logits, targets, num_items_in_batch)
        return self.result(logits, loss, output, share=share_of(targets, num_items_in_batch))


class WellposedForCausalLM(
    GenericForCausalLM[CausalLMOutputWithPast, Cache], WellposedPreTrainedModel, GenerationMixin
):
    """`logits_i = W x_i`, where `x_i` depends on tokens 1..i only; `W` is the token embedding where
    tied.

    Causality is exact: later tokens have weight 0, not a small one.

    Args:
        config: what the model is made of. The model keeps a copy with `is_causal=True`.

    Raises:
        ConfigError: the configuration is not usable, or says `is_causal=False`.

    >>> import torch
    >>> model = WellposedForCausalLM(WellposedConfig(hidden_size=8, num_attention_heads=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """

    output_class = CausalLMOutputWithPast
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.token.weight"}  # noqa: RUF012 (Hugging Face's rule)

    def __init__(self, config: WellposedConfig) -> None:
        config = as_causal(config, type(self).__name__)
        super().__init__(config)
        self.model = WellposedModel(config, is_part=True)
        self.add_head(config.hidden_size, config.vocab_size)
        self.post_init()


def as_causal(config: ConfigKind, where: str) -> ConfigKind:
    """Return a copy that says `is_causal=True`; raise `ConfigError` where it says otherwise."""
    if getattr(config, "is_causal", None) is False:
        raise ConfigError(
            f"{where}: received is_causal=False; a language model is causal, leave it None"
        )
    config = copy.copy(config)
    config.is_causal = True
    config.use_cache = config.use_cache and config.num_hidden_layers > 0
    return config
