"""The models of the families with a head: language models, and classifiers of one sequence or of
two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers import modeling_outputs as outputs

from wellposed.models import _heads as heads
from wellposed.models._build import Architecture, register_family
from wellposed.models._config import TransJectConfig, WellposedConfig
from wellposed.models._seq2seq import WellposedForSeq2SeqLM
from wellposed.models._transject import TransJectModel, TransJectPreTrainedModel
from wellposed.models._wellposed import WellposedModel, WellposedPreTrainedModel
from wellposed.nn import TransJectCache

# A bare partial would bind, from 3.14 on.
_BODY = staticmethod(partial(WellposedModel, is_part=True))


class WellposedForCausalLM(
    heads.CausalLM[outputs.CausalLMOutputWithPast, Cache], WellposedPreTrainedModel, GenerationMixin
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

    output_class = outputs.CausalLMOutputWithPast
    body = _BODY
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.token.weight"}  # noqa: RUF012 (Hugging Face's rule)


class WellposedForSequenceClassification(
    heads.SequenceClassifier[outputs.SequenceClassifierOutput], WellposedPreTrainedModel
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

    output_class = outputs.SequenceClassifierOutput
    body = _BODY

    def add_classifier(self, config: Any) -> None:
        """Make the linear map to logits, behind dropout."""
        self.dropout = nn.Dropout(config.dropout)
        super().add_classifier(config)

    def logits_of(self, pooled: Tensor) -> Tensor:
        """Map vectors (batch, width), some entries of which dropout sets to zero, to logits."""
        return super().logits_of(self.dropout(pooled))


class WellposedForSequencePairClassification(
    heads.SequencePairClassifier[outputs.SequenceClassifierOutput], WellposedPreTrainedModel
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

    output_class = outputs.SequenceClassifierOutput
    body = _BODY

    def add_classifier(self, config: Any) -> None:
        """Make the head of both vectors."""
        self.classifier = heads.PairHead(
            config.hidden_size,
            config.intermediate_size,
            self.num_labels,
            dropout=config.dropout,
            unit_lipschitz=config.feedforward == "maxmin",
        )


@dataclass
class TransJectHeadOutput(outputs.ModelOutput):
    """What a TransJect model with a head returns; the fields are those of `TransJectModelOutput`
    and these."""

    loss: Tensor | None = None
    """Where labels are given; in training with the auxiliary loss in it."""
    logits: Tensor | None = None
    past_key_values: TransJectCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    sigma: Tensor | None = None
    gates: tuple[Tensor, ...] | None = None
    auxiliary_loss: Tensor | None = None


class TransJectForSequenceClassification(
    heads.SequenceClassifier[TransJectHeadOutput], TransJectPreTrainedModel
):
    """`logits = W pool_i(x_i^L) + b`, pooled over real tokens only, so padding never changes a
    logit.

    Args:
        config: what the model is made of; `num_labels` (or `id2label`) sets the number of logits,
            `pooling` the pool.

    Raises:
        ConfigError: the configuration is not usable.

    >>> import torch
    >>> model = TransJectForSequenceClassification(TransJectConfig(hidden_size=8, num_labels=3))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """

    output_class = TransJectHeadOutput
    body = TransJectModel


class TransJectForSequencePairClassification(
    heads.SequencePairClassifier[TransJectHeadOutput], TransJectPreTrainedModel
):
    """`logits = head(pool(f(x)), pool(f(y)))`: both sequences through the same TransJect f, then
    `PairHead`.

    Sequences meet in the head only: each has a spectrum and gates of its own. Padding changes no
    logit.

    Args:
        config: what the model is made of; `num_labels` sets the number of logits, `pooling` the
            pool.

    Raises:
        ConfigError: the configuration is not usable.

    >>> import torch
    >>> model = TransJectForSequencePairClassification(TransJectConfig(hidden_size=8, num_labels=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]]), input_ids_pair=torch.tensor([[4, 5]])).logits.shape
    torch.Size([1, 2])
    """

    output_class = TransJectHeadOutput
    body = TransJectModel

    def add_classifier(self, config: Any) -> None:
        """Make the head of both vectors."""
        self.classifier = heads.PairHead(config.hidden_size, config.hidden_size, self.num_labels)


class TransJectForCausalLM(
    heads.CausalLM[TransJectHeadOutput, TransJectCache], TransJectPreTrainedModel, GenerationMixin
):
    """`logits_i = W x_i^L`, where `x_i^L` depends on tokens 1..i only: sigma and gates are those of
    the prefix.

    Causality is exact: the running sums of token i hold no later token. What token i knows of the
    prefix is d numbers
    of the spectrum and the E gates of each layer, no more: it cannot look up or copy a particular
    token. `generate()` keeps these sums, whose size does not grow with the text.

    Args:
        config: what the model is made of. The model keeps a copy with `is_causal=True`.

    Raises:
        ConfigError: the configuration is not usable, or says `is_causal=False`.

    >>> import torch
    >>> model = TransJectForCausalLM(TransJectConfig(hidden_size=8))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """

    output_class = TransJectHeadOutput
    body = TransJectModel
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.token.weight"}  # noqa: RUF012 (Hugging Face's rule)
    _is_stateful = (
        True  # running sums cannot go back to fewer tokens, as assisted generation would ask
    )

    def add_output(self, config: Any) -> None:
        """Make the output layer, and the projection to its width where it is the embedding."""
        tied = config.tie_word_embeddings
        width = config.hidden_size // 2 if tied else config.hidden_size
        self.projection = OutputProjection(config.hidden_size, width) if tied else nn.Identity()
        self.add_head(width, config.vocab_size)

    def logits_of(self, states: Tensor) -> Tensor:
        """Map states (batch, tokens, d) to logits; where the embedding is the output layer,
        projected to its width."""
        return super().logits_of(self.projection(states))

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the model makes its own cache, which holds no keys and values."""
        return False

    @staticmethod
    def _reorder_cache(past_key_values: TransJectCache, beam_idx: Tensor) -> TransJectCache:
        """Return the cache of the beams that `generate` chose."""
        return past_key_values.reorder_(beam_idx)


class OutputProjection(nn.Linear):
    """`x -> P x` from a token's width d to that of the embedding, which a tied output layer shares.

    At the start it is so small that logits have entries of size one: embeddings have entries of
    size one.

    >>> import torch
    >>> OutputProjection(8, 4)(torch.ones(2, 8)).shape
    torch.Size([2, 4])
    """

    def __init__(self, width: int, embedding_width: int) -> None:
        super().__init__(width, embedding_width, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.weight.numel()))


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
register_family(
    "transject",
    Architecture(
        TransJectConfig,
        {
            "causal_lm": TransJectForCausalLM,
            "sequence_classification": TransJectForSequenceClassification,
            "sequence_pair_classification": TransJectForSequencePairClassification,
        },
    ),
    body=TransJectModel,
)
