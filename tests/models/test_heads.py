"""Heads of all families: what `forward` takes is written out, what it returns is the family's, and
losses are one."""

import inspect

import pytest
import torch
from tests.support.transject import IDS, MASK
from torch.nn import functional as F
from torch.testing import assert_close
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput

from wellposed.models import (
    TransJectConfig,
    TransJectForCausalLM,
    TransJectForSequenceClassification,
    TransJectForSequencePairClassification,
    TransJectHeadOutput,
    WellposedConfig,
    WellposedForCausalLM,
    WellposedForSequenceClassification,
    WellposedForSequencePairClassification,
)

SIZES = {"vocab_size": 13, "hidden_size": 8, "num_labels": 3}
CONFIGS = {
    "wellposed": WellposedConfig(**SIZES, num_attention_heads=2),
    "transject": TransJectConfig(**SIZES, num_experts=2, reconstruction_weight=0.5),
}
LANGUAGE = (
    "input_ids attention_mask position_ids | past_key_values inputs_embeds labels use_cache"
    " output_hidden_states output_attentions logits_to_keep num_items_in_batch"
)
CLASSES = (
    "input_ids attention_mask position_ids | inputs_embeds labels output_hidden_states"
    " output_attentions"
)
PAIRS = (
    "input_ids attention_mask input_ids_pair attention_mask_pair | inputs_embeds inputs_embeds_pair"
    " labels"
)
HEADS = [
    (WellposedForCausalLM, "wellposed", LANGUAGE, CausalLMOutputWithPast),
    (TransJectForCausalLM, "transject", LANGUAGE, TransJectHeadOutput),
    (WellposedForSequenceClassification, "wellposed", CLASSES, SequenceClassifierOutput),
    (TransJectForSequenceClassification, "transject", CLASSES, TransJectHeadOutput),
    (WellposedForSequencePairClassification, "wellposed", PAIRS, SequenceClassifierOutput),
    (TransJectForSequencePairClassification, "transject", PAIRS, TransJectHeadOutput),
]


@pytest.mark.parametrize(("cls", "family", "arguments", "output_class"), HEADS)
def test_arguments_are_written_out_as_the_trainer_reads_them(cls, family, arguments, output_class):
    places, keywords = (part.split() for part in arguments.split("|"))
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == places
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(keywords)
    assert all(p.annotation is not p.empty and p.default in (None, 0) for p in parameters)
    assert cls.forward.__doc__ is not None
    assert cls.config_class is type(CONFIGS[family])
    assert cls.can_generate() == ("CausalLM" in cls.__name__)


@pytest.mark.parametrize(("cls", "family", "arguments", "output_class"), HEADS)
@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_that_of_the_logits_and_what_the_body_adds(
    cls, family, arguments, output_class, training
):
    class Renamed(cls):
        """A user's class, whose name does not tell transformers which loss it has."""

    model = Renamed(CONFIGS[family]).train(training)
    labels = IDS if "CausalLM" in cls.__name__ else torch.tensor([2, 0])
    given = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    if "Pair" in cls.__name__:
        given |= {"input_ids_pair": IDS.flip(0), "attention_mask_pair": MASK.flip(0)}
    output = model(**given)
    assert type(output) is output_class
    if "CausalLM" in cls.__name__:
        expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    else:
        expected = F.cross_entropy(output.logits, labels)
    added = getattr(output, "auxiliary_loss", None)
    assert (added is not None) == (family == "transject" and training)
    assert_close(output.loss, expected if added is None else expected + added)


@pytest.mark.parametrize("cls", [WellposedForCausalLM, TransJectForCausalLM])
def test_micro_batches_add_up_to_the_loss_of_the_whole_batch(cls):
    model = cls(CONFIGS["transject" if cls is TransJectForCausalLM else "wellposed"]).train()
    ids = torch.randint(1, 13, (4, 6))
    items = ids[:, 1:].numel()
    whole = model(input_ids=ids, labels=ids, num_items_in_batch=items)
    parts = [
        model(input_ids=row, labels=row, num_items_in_batch=items).loss for row in ids.split(1)
    ]
    assert_close(sum(parts), whole.loss)
    assert_close(whole.loss, model(input_ids=ids, labels=ids).loss)


def test_a_sequence_without_a_label_is_left_out():
    model = WellposedForSequenceClassification(CONFIGS["wellposed"]).eval()
    both = model(input_ids=IDS, attention_mask=MASK, labels=torch.tensor([2, -100])).loss
    one = model(input_ids=IDS[:1], attention_mask=MASK[:1], labels=torch.tensor([2])).loss
    assert_close(both, one)
