"""Classifiers: one label, several labels or numbers for a sequence."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from wellposed.call_checks import known_keywords
from wellposed.models._classifier import Classifier
from wellposed.models._config import WellposedConfig
from wellposed.models._heads import Output
from wellposed.models._wellposed import WellposedModel, WellposedPreTrainedModel


class GenericForSequenceClassification(Classifier[Output]):
    """`logits = W pool_i(x_i) + b` for the states x of a body `model`, of whatever family."""

    classifier: nn.Linear

    @can_return_tuple
    @known_keywords
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
    ) -> Output:
        """Return the logits of every sequence and, with labels, the loss.

        Args:
            input_ids: see `forward` of the body, `WellposedModel` or `TransJectModel`, as are the
                arguments not named here.
            labels: int (batch,) for one label, where -100 is not counted; float (batch, num_labels)
                for several; float (batch,) for a number (num_labels = 1). `config.problem_type`
                settles what the dtype does not.

        Returns:
            `loss` where labels are given: cross-entropy, binary cross-entropy or squared error,
            averaged, plus the body's auxiliary loss where it has one; `logits` (batch, num_labels);
            and of what the body returns all that the output has a field for.

        Raises:
            ShapeError: see the body's `forward`.
            ConfigError: see the body's `forward`.
        """
        pooled, output = self.pooled(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.logits_of(pooled)
        return self.result(logits, self.label_loss(logits, labels), output)

    def logits_of(self, pooled: Tensor) -> Tensor:
        """Map vectors (batch, width) to logits (batch, num_labels)."""
        return self.classifier(pooled)


class WellposedForSequenceClassification(
    GenericForSequenceClassification[SequenceClassifierOutput], WellposedPreTrainedModel
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

    def __init__(self, config: WellposedConfig) -> None:
        super().__init__(config)
        self.model = WellposedModel(config, is_part=True)
        self.add_pool(config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def logits_of(self, pooled: Tensor) -> Tensor:
        """Map vectors (batch, width), some entries of which dropout sets to zero, to logits."""
        return super().logits_of(self.dropout(pooled))
