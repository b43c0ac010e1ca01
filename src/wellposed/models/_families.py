"""Models of the families with a head: language models, and classifiers of tokens and sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import modeling_outputs as outputs

from wellposed.models import _heads as heads
from wellposed.models._build import Architecture, register_family
from wellposed.models._config import TransJectConfig, WellposedConfig
from wellposed.models._seq2seq import WellposedForSeq2SeqLM
from wellposed.models._transject import TransJectModel, TransJectPreTrainedModel
from wellposed.models._wellposed import WellposedModel, WellposedPreTrainedModel
from wellposed.nn import TransJectCache


class WellposedHead(heads.Head, WellposedPreTrainedModel):
    """A head on a `WellposedModel`."""

    def build_body(self, config: Any) -> nn.Module:
        """Return the encoder, or causal decoder, without initial weights of its own."""
        return WellposedModel(config, is_part=True)


class WellposedLinearHead(WellposedHead):
    """A linear map to labels, after dropout."""

    chain = "model dropout classifier"

    def add_layers(self, config: Any) -> None:
        """Add dropout and the linear map to logits."""
        self.dropout = nn.Dropout(config.dropout)
        super().add_layers(config)

    def logits_of(self, states: Tensor) -> Tensor:
        """Map states (..., width), after dropout, to logits."""
        return super().logits_of(self.dropout(states))


class WellposedForCausalLM(WellposedHead, heads.CausalLM, GenerationMixin):
    """`logits_i = W x_i`, x_i from tokens 1..i only; if tied, W is the token embedding.

    Causality is exact: later tokens have weight 0. The model keeps a copy of `config` with
    `is_causal=True`. A `ConfigError` lists values that are not usable, `is_causal=False` among
    them.

    >>> import torch
    >>> model = WellposedForCausalLM(WellposedConfig(hidden_size=8, num_attention_heads=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """


class WellposedForMaskedLM(WellposedHead, heads.MaskedLM):
    """`logits_i = W x_i`, x_i from the tokens on both sides; if tied, W is the token embedding.

    Labels are not shifted: give -100 at tokens that were not masked. Padding never changes a logit
    of a real token. A `ConfigError` lists values that are not usable, `is_causal=True` among them.

    >>> import torch
    >>> model = WellposedForMaskedLM(WellposedConfig(hidden_size=8, num_attention_heads=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """


class WellposedForTokenClassification(WellposedLinearHead, heads.TokenClassifier):
    """`logits_i = W x_i + b`: a label for each token, such as a part of speech or a name.

    `config.num_labels` (or `id2label`) sets the number of logits. Padding never changes a logit of
    a real token. If `config.is_causal`, logits depend on earlier tokens only. A `ConfigError` lists
    values that are not usable.

    >>> import torch
    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, num_labels=3)
    >>> WellposedForTokenClassification(config)(input_ids=torch.tensor([[1, 2, 4]])).logits.shape
    torch.Size([1, 3, 3])
    """


class WellposedForSequenceClassification(WellposedLinearHead, heads.SequenceClassifier):
    """`logits = W pool_i(x_i) + b`, pooled over real tokens only: padding never changes a logit.

    `config.num_labels` (or `id2label`) sets the number of logits, `config.pooling` the pool. A
    `ConfigError` lists values that are not usable.

    >>> import torch
    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, num_labels=3)
    >>> WellposedForSequenceClassification(config)(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """


class WellposedForSequencePairClassification(WellposedHead, heads.SequencePairClassifier):
    """`logits = head(pool(f(x)), pool(f(y)))`: one encoder f for both sequences, then `PairHead`.

    Sequences meet in the head only. Padding changes no logit. `config` gives `num_labels`,
    `pooling`, and the width of the head's hidden layer, `intermediate_size`. With
    `feedforward="maxmin"` the head is 1-Lipschitz in both texts for weights of norm 1 (`PairHead`,
    `unit_lipschitz`). A `ConfigError` lists values that are not usable.

    When not to use: to compare words one by one; join the pair to one sequence instead.

    >>> import torch
    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, num_labels=2)
    >>> model = WellposedForSequencePairClassification(config)
    >>> model(torch.tensor([[1, 2, 3]]), input_ids_pair=torch.tensor([[4, 5]])).logits.shape
    torch.Size([1, 2])
    """

    def add_layers(self, config: Any) -> None:
        """Add the head of both vectors."""
        self.classifier = heads.PairHead(
            config.hidden_size,
            config.intermediate_size,
            self.num_labels,
            dropout=config.dropout,
            unit_lipschitz=config.feedforward == "maxmin",
        )


@dataclass
class TransJectHeadOutput(outputs.ModelOutput):
    """Output of a TransJect model with a head; see also `TransJectModelOutput`."""

    loss: Tensor | None = None
    """If labels are given; in training it includes the auxiliary loss."""
    logits: Tensor | None = None
    past_key_values: TransJectCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    sigma: Tensor | None = None
    gates: tuple[Tensor, ...] | None = None
    auxiliary_loss: Tensor | None = None


class TransJectHead(heads.Head, TransJectPreTrainedModel):
    """A head on a `TransJectModel`."""

    output_class = TransJectHeadOutput

    def build_body(self, config: Any) -> nn.Module:
        """Return the encoder, or causal decoder."""
        return TransJectModel(config)


class TransJectForTokenClassification(TransJectHead, heads.TokenClassifier):
    """`logits_i = W x_i^L + b`: a label for each token.

    A token reads the others through sigma and the gates only. `config.num_labels` (or `id2label`)
    sets the number of logits. Padding never changes a logit of a real token. A `ConfigError` lists
    values that are not usable.

    >>> import torch
    >>> model = TransJectForTokenClassification(TransJectConfig(hidden_size=8, num_labels=3))
    >>> model(input_ids=torch.tensor([[1, 2, 4]])).logits.shape
    torch.Size([1, 3, 3])
    """


class TransJectForSequenceClassification(TransJectHead, heads.SequenceClassifier):
    """`logits = W pool_i(x_i^L) + b`, pooled over real tokens only: padding never changes a logit.

    `config.num_labels` (or `id2label`) sets the number of logits, `config.pooling` the pool. A
    `ConfigError` lists values that are not usable.

    >>> import torch
    >>> model = TransJectForSequenceClassification(TransJectConfig(hidden_size=8, num_labels=3))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """


class TransJectForSequencePairClassification(TransJectHead, heads.SequencePairClassifier):
    """`logits = head(pool(f(x)), pool(f(y)))`: one TransJect f for both sequences, then `PairHead`.

    Sequences meet in the head only: each has its own spectrum and gates. Padding changes no logit.
    `config.num_labels` (or `id2label`) sets the number of logits, `config.pooling` the pool. A
    `ConfigError` lists values that are not usable.

    >>> import torch
    >>> model = TransJectForSequencePairClassification(TransJectConfig(hidden_size=8, num_labels=2))
    >>> model(torch.tensor([[1, 2, 3]]), input_ids_pair=torch.tensor([[4, 5]])).logits.shape
    torch.Size([1, 2])
    """

    def add_layers(self, config: Any) -> None:
        """Add the head of both vectors."""
        self.classifier = heads.PairHead(config.hidden_size, config.hidden_size, self.num_labels)


class TransJectLanguageHead(TransJectHead, heads.LanguageHead):
    """An output layer that may be the embedding, which has half the width of a token."""

    chain = "model projection lm_head"

    def add_layers(self, config: Any) -> None:
        """Add the output layer and, if it is the embedding, the projection to its width."""
        tied = config.tie_word_embeddings
        width = config.hidden_size // 2 if tied else config.hidden_size
        self.projection = OutputProjection(config.hidden_size, width) if tied else nn.Identity()
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def logits_of(self, states: Tensor) -> Tensor:
        """Map states (batch, tokens, d) to logits, through the projection if tied."""
        return super().logits_of(self.projection(states))


class TransJectForMaskedLM(TransJectLanguageHead, heads.MaskedLM):
    """`logits_i = W x_i^L`, with sigma and gates of the whole sequence.

    Labels are not shifted: give -100 at tokens that were not masked. A masked token reads d numbers
    of the spectrum and E gates per layer, never a particular neighbour. Padding never changes a
    logit of a real token. A `ConfigError` lists values that are not usable, `is_causal=True` among
    them.

    >>> import torch
    >>> model = TransJectForMaskedLM(TransJectConfig(hidden_size=8))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """


class TransJectForCausalLM(TransJectLanguageHead, heads.CausalLM, GenerationMixin):
    """`logits_i = W x_i^L`, x_i^L from tokens 1..i only, with sigma and gates of the prefix.

    Causality is exact. Token i reads d numbers of the spectrum and E gates per layer from its
    prefix, so it cannot look up or copy a particular token. `generate()` keeps running sums of
    constant size. The model keeps a copy of `config` with `is_causal=True`. A `ConfigError` lists
    values that are not usable, `is_causal=False` among them.

    >>> import torch
    >>> model = TransJectForCausalLM(TransJectConfig(hidden_size=8))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """

    _is_stateful = True  # assisted generation needs to go back, which running sums cannot

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the model makes its own cache, without keys and values."""
        return False

    @staticmethod
    def _reorder_cache(past_key_values: TransJectCache, beam_idx: Tensor) -> TransJectCache:
        """Return the cache of the beams that `generate` chose."""
        return past_key_values.reorder_(beam_idx)


class OutputProjection(nn.Linear):
    """`x -> P x` from a token's width d to that of the embedding, which a tied output layer shares.

    It starts small enough that logits have entries of size one, as embeddings do.
    """

    def __init__(self, width: int, embedding_width: int) -> None:
        super().__init__(width, embedding_width, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight again."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.weight.numel()))


register_family(
    "wellposed",
    Architecture(
        WellposedConfig,
        {
            "causal_lm": WellposedForCausalLM,
            "masked_lm": WellposedForMaskedLM,
            "token_classification": WellposedForTokenClassification,
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
            "masked_lm": TransJectForMaskedLM,
            "token_classification": TransJectForTokenClassification,
            "sequence_classification": TransJectForSequenceClassification,
            "sequence_pair_classification": TransJectForSequencePairClassification,
        },
    ),
    body=TransJectModel,
)
