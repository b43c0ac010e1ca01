"""Heads of all families: what `forward` takes is written out, what it returns is the family's, and losses are one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional as F
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

from .transject import IDS, MASK

SIZES: dict[str, Any] = {"vocab_size": 13, "hidden_size": 8, "num_labels": 3}
CONFIGS: dict[str, Any] = {
    "wellposed": WellposedConfig(**SIZES, num_attention_heads=2),
    "transject": TransJectConfig(**SIZES, num_experts=2, reconstruction_weight=0.5),
}
LANGUAGE = (
    "input_ids attention_mask position_ids | past_key_values inputs_embeds labels use_cache output_hidden_states "
    "output_attentions logits_to_keep num_items_in_batch"
)
CLASSES = "input_ids attention_mask position_ids | inputs_embeds labels output_hidden_states output_attentions"
PAIRS = "input_ids attention_mask input_ids_pair attention_mask_pair |"
HEADS: list[tuple[Any, str, str, Any]] = [
    (WellposedForCausalLM, "wellposed", LANGUAGE, CausalLMOutputWithPast),
    (TransJectForCausalLM, "transject", LANGUAGE, TransJectHeadOutput),
    (WellposedForSequenceClassification, "wellposed", CLASSES, SequenceClassifierOutput),
    (TransJectForSequenceClassification, "transject", CLASSES, TransJectHeadOutput),
    (
        WellposedForSequencePairClassification,
        "wellposed",
        f"{PAIRS} inputs_embeds inputs_embeds_pair labels",
        SequenceClassifierOutput,
    ),
    (TransJectForSequencePairClassification, "transject", f"{PAIRS} labels", TransJectHeadOutput),
]


@pytest.mark.parametrize(("cls", "family", "arguments", "output_class"), HEADS)
def test_arguments_are_written_out_as_the_trainer_reads_them(
    cls: Any, family: str, arguments: str, output_class: Any
) -> None:
    places, keywords = (part.split() for part in arguments.split("|"))
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == places
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == keywords
    assert all(p.annotation is not p.empty and p.default in (None, 0) for p in parameters)
    assert cls.forward.__doc__ is not None
    assert cls.config_class is type(CONFIGS[family])
    assert cls.can_generate() == ("CausalLM" in cls.__name__)


@pytest.mark.parametrize(("cls", "family", "arguments", "output_class"), HEADS)
@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_that_of_the_logits_and_what_the_body_adds(
    cls: Any, family: str, arguments: str, output_class: Any, training: bool
) -> None:
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
    torch.testing.assert_close(output.loss, expected if added is None else expected + added)
