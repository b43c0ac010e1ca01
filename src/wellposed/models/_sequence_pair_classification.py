"""Classifier of two sequences through one encoder: the two-tower model of document retrieval."""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from wellposed.certification import LayerBound, Site, register_rule
from wellposed.errors import ShapeError
from wellposed.models._classifier import Classifier
from wellposed.models._config import WellposedConfig
from wellposed.models._heads import Output
from wellposed.models._wellposed import WellposedModel, WellposedPreTrainedModel


class PairHead(nn.Module):
    """`logits = W_2 ReLU(W_1 [a, b, a*b, a-b] + b_1) + b_2` of two pooled vectors a, b.

    Exact. The head of document retrieval in the Long Range Arena (Tay et al. 2021), with one hidden layer. It is not
    symmetric in its arguments and, through `a*b`, not globally Lipschitz.

    Args:
        width: entries of a and of b.
        hidden: entries of the hidden layer.
        num_labels: number of logits.
        dropout: on the features, in [0, 1).

    Cost: 4 width x hidden multiplications a pair.

    >>> PairHead(8, 16, 2)(torch.zeros(3, 8), torch.zeros(3, 8)).shape
    torch.Size([3, 2])
    """

    def __init__(self, width: int, hidden: int, num_labels: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(4 * width, hidden)
        self.output = nn.Linear(hidden, num_labels)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Map two batches of vectors (batch, width) to logits (batch, num_labels)."""
        features = torch.cat((first, second, first * second, first - second), dim=-1)
        return self.output(torch.relu(self.hidden(self.dropout(features))))


class GenericForSequencePairClassification(Classifier[Output]):
    """`logits = head(pool(f(x)), pool(f(y)))` for a body `model` f, of whatever family."""

    classifier: PairHead

    @can_return_tuple
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
            labels: as for `forward` of the classifier of one sequence, `WellposedForSequenceClassification`.

        Returns:
            `loss` where labels are given, plus the mean of the body's auxiliary losses where it has one; `logits`
            (batch, num_labels); `auxiliary_loss` where the output has a field for it.

        Raises:
            ShapeError: sides of different batch size, and what `forward` of the body refuses.
        """
        vector, output = self.pooled(input_ids, attention_mask, inputs_embeds=inputs_embeds, output_hidden_states=False)
        other_vector, other = self.pooled(
            input_ids_pair, attention_mask_pair, inputs_embeds=inputs_embeds_pair, output_hidden_states=False
        )
        check_pairs(vector, other_vector)
        logits = self.classifier(vector, other_vector)
        losses = [output.get("auxiliary_loss"), other.get("auxiliary_loss")]
        found = {} if None in losses else {"auxiliary_loss": sum(losses) / 2}
        return self.result(logits, self.label_loss(logits, labels), found)


class WellposedForSequencePairClassification(
    GenericForSequencePairClassification[SequenceClassifierOutput], WellposedPreTrainedModel
):
    """`logits = head(pool(f(x)), pool(f(y)))`: both sequences through the same encoder f, then `PairHead`.

    Sequences meet in the head only, so the states of one do not depend on the other; padding changes no logit.

    Args:
        config: what the model is made of; `num_labels` sets the number of logits, `pooling` the pool,
            `intermediate_size` the width of the head's hidden layer.

    Raises:
        ConfigError: the configuration is not usable.

    When not to use it: for pairs whose words have to be compared one by one; join them to one sequence instead.

    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, num_labels=2)
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
        self.classifier = PairHead(config.hidden_size, hidden, self.num_labels, dropout=config.dropout)
        self.post_init()


def check_pairs(first: Tensor, second: Tensor) -> None:
    """Raise `ShapeError` where the two sides hold different numbers of sequences.

    >>> check_pairs(torch.zeros(2, 8), torch.zeros(3, 8))
    Traceback (most recent call last):
    ...
    wellposed.errors.ShapeError: input_ids_pair: received 3 sequences for 2 in input_ids; expected one for each
    """
    if first.shape[0] != second.shape[0]:
        raise ShapeError(
            f"input_ids_pair: received {second.shape[0]} sequences for {first.shape[0]} in input_ids; "
            "expected one for each"
        )


class AutoModelForSequencePairClassification(_BaseAutoModelClass):
    """Auto class of the models that take `input_ids` and `input_ids_pair`; a new architecture registers with it."""

    _model_mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())


@register_rule(WellposedForSequencePairClassification)
def _no_bound(module: WellposedForSequencePairClassification, site: Site) -> LayerBound:
    del module
    return site.refuse(
        "two inputs meet in a product a*b, which has no global bound; certify the encoder alone: "
        "wellposed.certify(model.model, ...)"
    )
