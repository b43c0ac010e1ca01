"""Which Auto class loads a saved model, by the class it was saved from."""

from __future__ import annotations

from typing import Any

import transformers

from wellposed.models._sequence_pair_classification import AutoModelForSequencePairClassification

AUTO_CLASSES: dict[str, Any] = {
    "ForCausalLM": transformers.AutoModelForCausalLM,
    "LMHeadModel": transformers.AutoModelForCausalLM,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForSequencePairClassification": AutoModelForSequencePairClassification,
    "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
    "ForSeq2SeqLM": transformers.AutoModelForSeq2SeqLM,
}
"""Auto class by the end of a class name."""


def auto_class(architecture: str) -> Any | None:
    """Return the Auto class that loads ``architecture``; None where its name says nothing.

    >>> auto_class("WellposedForSeq2SeqLM").__name__
    'AutoModelForSeq2SeqLM'
    """
    return next((auto for suffix, auto in AUTO_CLASSES.items() if architecture.endswith(suffix)), None)
