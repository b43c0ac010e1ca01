"""Classifier of two sequences through one encoder: the two-tower model of document retrieval."""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from wellposed.call_checks import known_keywords
from wellposed.errors import ShapeError
from wellposed.models._classifier import Classifier
from wellposed.models._config import WellposedConfig
from wellposed.models._heads import Output
from wellposed.models._pair_head import PairHead
from wellposed.models._wellposed import WellposedModel, WellposedPreTrainedModel


class GenericForSequencePairClassification(Classifier[Output]):
    """`logits = head(pool(f(x)), pool(f(y)))` for a body `model` f, of whatever family."""

    classifier: PairHead

    @can_return_tuple
    @known_keywords
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_ids_pair: Tensor | None = None,
        attention_mask_pair: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        inputs_embeds_pair: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Output:
        """Return the logits of every pair and, with labels, the loss.

        Args:
            input_ids: int (batch, tokens) of the first sequences.
            attention_mask: 1 = real token of the first sequences; None = all real.
            input_ids_pair: int (batch, other tokens) of the second sequences.
            attention_mask_pair: 1 = real token of the second sequences; None = all real.
            inputs_embeds: (batch, tokens, D) in place of `input_ids`.
            inputs_embeds_pair: (batch, other tokens, D) in place of `input_ids_pair`.
            labels: as for `forward` of the classifier of one sequence,
            `WellposedForSequenceClassification`.

        Returns:
            `loss` where labels are given, plus the mean of the body's auxiliary losses where it has
            one; `logits` (batch, num_labels); `auxiliary_loss` where the output has a field for it.

        Raises:
            ShapeError: sides of different batch size, and what `forward` of the body refuses.
        """
        vector, output = self.pooled(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, output_hidden_states=False
        )
        other_vector, other = self.pooled(
            input_ids_pair,
            attention_mask_pair,
            inputs_embeds=inputs_embeds_pair,
            output_hidden_states=False,
        )
        check_pairs(vector, other_vector)
        logits = self.classifier(vector, other_vector)
        losses = [output.get("auxiliary_loss"), other.get("auxiliary_loss")]
        found = {} if None in losses else {"auxiliary_loss": sum(losses) / 2}
        return self.result(logits, self.label_loss(logits, labels), found)


class WellposedForSequencePairClassification(
    GenericForSequencePairClassification[SequenceClassifierOutput], WellposedPreTrainedModel
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

    def __init__(self, config: WellposedConfig) -> None:
        super().__init__(config)
        self.model = WellposedModel(config, is_part=True)
        self.add_pool(config)
        hidden = cast(int, config.intermediate_size)
        self.classifier = PairHead(
            config.hidden_size,
            hidden,
            self.num_labels,
            dropout=config.dropout,
            unit_lipschitz=config.feedforward == "maxmin",
        )
        self.post_init()


def check_pairs(first: Tensor, second: Tensor) -> None:
    """Raise `ShapeError` where the two sides hold different numbers of sequences.

    >>> import torch
    >>> check_pairs(torch.zeros(2, 8), torch.zeros(3, 8))
    Traceback (most recent call last):
    ...
    wellposed.errors.ShapeError: input_ids_pair: received 3 sequences for 2 in input_ids; expected
    one for each
    """
    if first.shape[0] != second.shape[0]:
        raise ShapeError(
            f"input_ids_pair: received {second.shape[0]} sequences for {first.shape[0]} in"
            " input_ids; expected one for each"
        )


class AutoModelForSequencePairClassification(_BaseAutoModelClass):
    """Auto class of the models that take `input_ids` and `input_ids_pair`; a new architecture
    registers with it."""

    _model_mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())
