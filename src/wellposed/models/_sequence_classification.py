"""Classifier: one label, several labels or numbers for a sequence."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from wellposed.models._config import WellposedConfig
from wellposed.models._embeddings import padding_of
from wellposed.models._heads import body_output, classification_loss
from wellposed.models._pooling import POOLINGS
from wellposed.models._wellposed import WellposedModel, WellposedPreTrainedModel


class WellposedForSequenceClassification(WellposedPreTrainedModel):
    """`logits = W pool_i(x_i) + b`, pooled over real tokens only, so padding never changes a logit.

    Args:
        config: what the model is made of; `num_labels` (or `id2label`) sets the number of logits, `pooling` the pool.

    Raises:
        ConfigError: the configuration is not usable.

    >>> import torch
    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, num_labels=3)
    >>> WellposedForSequenceClassification(config)(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: WellposedConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.model = WellposedModel(config, is_part=True)
        self.pool = POOLINGS.get(config.pooling)
        self.dropout = nn.Dropout(config.dropout)
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
    ) -> SequenceClassifierOutput:
        """Return the logits of every sequence and, with labels, the loss.

        Args:
            input_ids: see `WellposedModel.forward`, as are the arguments not named here.
            labels: int (batch,) for one label, where -100 is not counted; float (batch, num_labels) for several; float
                (batch,) for a number (num_labels = 1). `config.problem_type` settles what the dtype does not.

        Returns:
            `loss` where labels are given: cross-entropy, binary cross-entropy or squared error, averaged; `logits`
            (batch, num_labels); `hidden_states`.

        Raises:
            ShapeError: see `WellposedModel.forward`.
            ConfigError: see `WellposedModel.forward`.
        """
        output = body_output(
            self.model,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden = cast(Tensor, output.last_hidden_state)
        pooled = self.pool(hidden, padding_of(attention_mask, hidden.shape[0], hidden.shape[1]))
        logits = self.classifier(self.dropout(pooled))
        loss = classification_loss(self, logits, labels)
        return SequenceClassifierOutput(
            loss=cast(Any, loss), logits=cast(Any, logits), hidden_states=output.hidden_states
        )
