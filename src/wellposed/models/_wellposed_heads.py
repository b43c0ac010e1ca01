"""Wellposed models with a head: language models, and classifiers of one sequence or of two."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput

from wellposed.models._build import Architecture, register_family
from wellposed.models._config import WellposedConfig
from wellposed.models._heads import CausalLM, SequenceClassifier, SequencePairClassifier
from wellposed.models._pair_head import PairHead
from wellposed.models._seq2seq import WellposedForSeq2SeqLM
from wellposed.models._wellposed import WellposedModel, WellposedPreTrainedModel

_BODY = partial(WellposedModel, is_part=True)


class WellposedForCausalLM(
    CausalLM[CausalLMOutputWithPast, Cache], WellposedPreTrainedModel, GenerationMixin
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
    body = _BODY
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.token.weight"}  # noqa: RUF012 (Hugging Face's rule)


class WellposedForSequenceClassification(
    SequenceClassifier[SequenceClassifierOutput], WellposedPreTrainedModel
):
    """`logits = W pool_i(x_i) + b`, pooled over real tokens only, so padding never changes a logit.

    Args:
        config: what the model is made of; `num_labels` (or `id2label`) sets the number of logits,
            `pooling` the pool.

    Raises:
        ConfigError: the configuration is not usable.

    >>> import torch
    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, num_labels=3)
    >>> WellposedForSequenceClassification(config)(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """

    output_class = SequenceClassifierOutput
    body = _BODY

    def add_classifier(self, config: Any) -> None:
        """Make the linear map to logits, behind dropout."""
        self.dropout = nn.Dropout(config.dropout)
        super().add_classifier(config)

    def logits_of(self, pooled: Tensor) -> Tensor:
        """Map vectors (batch, width), some entries of which dropout sets to zero, to logits."""
        return super().logits_of(self.dropout(pooled))


class WellposedForSequencePairClassification(
    SequencePairClassifier[SequenceClassifierOutput], WellposedPreTrainedModel
):
    """`logits = head(pool(f(x)), pool(f(y)))`: both sequences through the same encoder f, then
    `PairHead`.

    Sequences meet in the head only, so the states of one do not depend on the other; padding
    changes no logit.

    Args:
        config: what the model is made of; `num_labels` sets the number of logits, `pooling` the
            pool, `intermediate_size` the width of the head's hidden layer. With
            `feedforward="maxmin"` the head is 1-Lipschitz in both texts for weights of norm 1
            (`PairHead`, `unit_lipschitz`).

    Raises:
        ConfigError: the configuration is not usable.

    When not to use it: for pairs whose words have to be compared one by one; join them to one
    sequence instead.

    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, num_labels=2)
    >>> import torch
    >>> model = WellposedForSequencePairClassification(config)
    >>> model(input_ids=torch.tensor([[1, 2, 3]]), input_ids_pair=torch.tensor([[4, 5]])).logits.shape
    torch.Size([1, 2])
    """

    output_class = SequenceClassifierOutput
    body = _BODY

    def add_classifier(self, config: Any) -> None:
        """Make the head of both vectors."""
        self.classifier = PairHead(
            config.hidden_size,
            config.intermediate_size,
            self.num_labels,
            dropout=config.dropout,
            unit_lipschitz=config.feedforward == "maxmin",
        )


register_family(
    "wellposed",
    Architecture(
        WellposedConfig,
        {
            "causal_lm": WellposedForCausalLM,
            "sequence_classification": WellposedForSequenceClassification,
            "sequence_pair_classification": WellposedForSequencePairClassification,
            "seq2seq_lm": WellposedForSeq2SeqLM,
        },
    ),
    body=WellposedModel,
)
