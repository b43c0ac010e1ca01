"""TransJect with a head: classifiers of sequences and of pairs of sequences, and a language model."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
)
from transformers.modeling_outputs import ModelOutput
from transformers.utils.generic import can_return_tuple

from wellposed.errors import ConfigError
from wellposed.models._build import ARCHITECTURES, Architecture
from wellposed.models._embeddings import padding_of
from wellposed.models._heads import body_output, classification_loss, following, kept_positions, token_loss
from wellposed.models._pooling import POOLINGS
from wellposed.models._sequence_pair_classification import (
    AutoModelForSequencePairClassification,
    PairHead,
    check_pairs,
)
from wellposed.models._transject import TransJectModel, TransJectModelOutput, TransJectPreTrainedModel
from wellposed.models._transject_config import TransJectConfig
from wellposed.nn import TransJectCache


@dataclass
class TransJectHeadOutput(ModelOutput):
    """What a TransJect model with a head returns; the fields are those of `TransJectModelOutput` and these."""

    loss: Tensor | None = None
    """Where labels are given; in training with the auxiliary loss in it."""
    logits: Tensor | None = None
    past_key_values: TransJectCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    sigma: Tensor | None = None
    gates: tuple[Tensor, ...] | None = None
    auxiliary_loss: Tensor | None = None


class _Classifier(TransJectPreTrainedModel):
    """What the two classifiers share: body, pooling and loss."""

    def __init__(self, config: TransJectConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        self.num_labels = config.num_labels or 2
        self.model = TransJectModel(config)
        self.pool = POOLINGS.get(config.pooling)

    def pooled(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, TransJectModelOutput]:
        """Return one vector per sequence, (batch, d), and the output of the body."""
        output = body_output(self.model, input_ids=input_ids, attention_mask=attention_mask, **given)
        hidden = cast(Tensor, output.last_hidden_state)
        return self.pool(hidden, padding_of(attention_mask, hidden.shape[0], hidden.shape[1])), output

    def loss(self, logits: Tensor, labels: Tensor | None, auxiliary: Tensor | None) -> Tensor | None:
        """Return cross-entropy, binary cross-entropy or squared error, plus the auxiliary loss; None without labels."""
        loss = classification_loss(self, logits, labels)
        return None if loss is None else _added(loss, auxiliary)


class TransJectForSequenceClassification(_Classifier):
    """`logits = W pool_i(x_i^L) + b`, pooled over real tokens only, so padding never changes a logit.

    Args:
        config: what the model is made of; `num_labels` (or `id2label`) sets the number of logits, `pooling` the pool.

    Raises:
        ConfigError: the configuration is not usable.

    >>> import torch
    >>> model = TransJectForSequenceClassification(TransJectConfig(hidden_size=8, num_labels=3))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: TransJectConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> TransJectHeadOutput:
        """Return the logits of every sequence and, with labels, the loss.

        Args:
            input_ids: see `TransJectModel.forward`, as are the arguments not named here.
            labels: int (batch,) for one label, where -100 is not counted; float (batch, num_labels) for several; float
                (batch,) for a number (num_labels = 1). `config.problem_type` settles what the dtype does not.

        Returns:
            `loss` where labels are given; `logits` (batch, num_labels); and what the body returns.

        Raises:
            ShapeError: see `TransJectModel.forward`.
            ConfigError: see `TransJectModel.forward`.
        """
        pooled, output = self.pooled(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.classifier(pooled)
        return _head_output(output, logits, self.loss(logits, labels, output.auxiliary_loss))


class TransJectForSequencePairClassification(_Classifier):
    """`logits = head(pool(f(x)), pool(f(y)))`: both sequences through the same TransJect f, then `PairHead`.

    Sequences meet in the head only: each has a spectrum and gates of its own. Padding changes no logit.

    Args:
        config: what the model is made of; `num_labels` sets the number of logits, `pooling` the pool.

    Raises:
        ConfigError: the configuration is not usable.

    >>> import torch
    >>> model = TransJectForSequencePairClassification(TransJectConfig(hidden_size=8, num_labels=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]]), input_ids_pair=torch.tensor([[4, 5]])).logits.shape
    torch.Size([1, 2])
    """

    def __init__(self, config: TransJectConfig) -> None:
        super().__init__(config)
        self.classifier = PairHead(config.hidden_size, config.hidden_size, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_ids_pair: Tensor | None = None,
        attention_mask_pair: Tensor | None = None,
        *,
        labels: Tensor | None = None,
    ) -> TransJectHeadOutput:
        """Return the logits of every pair and, with labels, the loss.

        Args:
            input_ids: int (batch, tokens) of the first sequences.
            attention_mask: 1 = real token of the first sequences; None = all real.
            input_ids_pair: int (batch, other tokens) of the second sequences.
            attention_mask_pair: 1 = real token of the second sequences; None = all real.
            labels: as for `TransJectForSequenceClassification`.

        Returns:
            `loss` where labels are given; `logits` (batch, num_labels); `auxiliary_loss`, the mean of both sides.

        Raises:
            ShapeError: sides of different batch size, and what `TransJectModel.forward` refuses.
        """
        first, output = self.pooled(input_ids, attention_mask)
        second, other = self.pooled(input_ids_pair, attention_mask_pair)
        check_pairs(first, second)
        logits = self.classifier(first, second)
        auxiliary = None
        if output.auxiliary_loss is not None and other.auxiliary_loss is not None:
            auxiliary = (output.auxiliary_loss + other.auxiliary_loss) / 2
        return TransJectHeadOutput(loss=self.loss(logits, labels, auxiliary), logits=logits, auxiliary_loss=auxiliary)


class TransJectForCausalLM(TransJectPreTrainedModel, GenerationMixin):
    """`logits_i = W x_i^L`, where `x_i^L` depends on tokens 1..i only: sigma and gates are those of the prefix.

    Causality is exact: the running sums of token i hold no later token. What token i knows of the prefix is d numbers
    of the spectrum and the E gates of each layer, no more: it cannot look up or copy a particular token.
    `generate()` keeps these sums, whose size does not grow with the text.

    Args:
        config: what the model is made of. The model keeps a copy with `is_causal=True`.

    Raises:
        ConfigError: the configuration is not usable, or says `is_causal=False`.

    >>> import torch
    >>> model = TransJectForCausalLM(TransJectConfig(hidden_size=8))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.token.weight"}  # noqa: RUF012 (Hugging Face's rule)
    _is_stateful = True  # running sums cannot go back to fewer tokens, as assisted generation would ask

    def __init__(self, config: TransJectConfig) -> None:
        if config.is_causal is False:
            raise ConfigError(
                "TransJectForCausalLM: received is_causal=False; a language model is causal, leave it None"
            )
        config = copy.copy(config)
        config.is_causal = True
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.model = TransJectModel(config)
        tied = config.tie_word_embeddings
        width = config.hidden_size // 2 if tied else config.hidden_size
        self.projection = OutputProjection(config.hidden_size, width) if tied else nn.Identity()
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer."""
        self.lm_head = cast(nn.Linear, new_embeddings)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        past_key_values: TransJectCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> TransJectHeadOutput:
        """Return the logits of the next token at every position and, with labels, their mean cross-entropy in nats.

        Args:
            input_ids: see `TransJectModel.forward`, as are the arguments not named here.
            labels: int (batch, tokens), usually the input ids; shifted inside; -100 is not counted.
            logits_to_keep: only the last so many positions, or the positions in a tensor; 0 = all.
            num_items_in_batch: divide the summed loss by this, in place of the number of labels.

        Returns:
            `loss` where labels are given; `logits` (batch, kept tokens, vocab_size); and what the body returns.

        Raises:
            ShapeError: see `TransJectModel.forward`.
            ConfigError: see `TransJectModel.forward`.
        """
        output = body_output(
            self.model,
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
        logits = self.lm_head(self.projection(cast(Tensor, output.last_hidden_state)[:, kept]))
        loss = None
        if labels is not None:
            loss = token_loss(self, logits, following(labels)[:, kept], num_items_in_batch)
            loss = _added(loss, output.auxiliary_loss)
        return _head_output(output, logits, loss)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Say that the model makes its own cache: keys and values are none of its state."""
        return False

    @staticmethod
    def _reorder_cache(past_key_values: TransJectCache, beam_idx: Tensor) -> TransJectCache:
        """Keep the beams that `generate` goes on with."""
        return past_key_values.reorder_(beam_idx)


class OutputProjection(nn.Linear):
    """`x -> P x` from a token's width d to that of the embedding, which a tied output layer shares.

    At the start it is so small that logits have entries of size one: embeddings have entries of size one.

    >>> import torch
    >>> OutputProjection(8, 4)(torch.ones(2, 8)).shape
    torch.Size([2, 4])
    """

    def __init__(self, width: int, embedding_width: int) -> None:
        super().__init__(width, embedding_width, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.weight.numel()))


def _added(loss: Tensor, auxiliary: Tensor | None) -> Tensor:
    return loss if auxiliary is None else loss + auxiliary


def _head_output(output: TransJectModelOutput, logits: Tensor, loss: Tensor | None) -> TransJectHeadOutput:
    return TransJectHeadOutput(
        loss=loss,
        logits=logits,
        past_key_values=output.past_key_values,
        hidden_states=output.hidden_states,
        sigma=output.sigma,
        gates=output.gates,
        auxiliary_loss=output.auxiliary_loss,
    )


ARCHITECTURES.register("transject")(
    Architecture(
        TransJectConfig,
        {
            "causal_lm": TransJectForCausalLM,
            "sequence_classification": TransJectForSequenceClassification,
            "sequence_pair_classification": TransJectForSequencePairClassification,
        },
    )
)
AutoConfig.register(TransJectConfig.model_type, TransJectConfig)
AutoModel.register(TransJectConfig, TransJectModel)
AutoModelForCausalLM.register(TransJectConfig, TransJectForCausalLM)
AutoModelForSequenceClassification.register(TransJectConfig, TransJectForSequenceClassification)
AutoModelForSequencePairClassification.register(TransJectConfig, TransJectForSequencePairClassification)
