"""Models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from wellposed.errors import unknown_name
from wellposed.models._causal_lm import WellposedForCausalLM
from wellposed.models._config import WellposedConfig
from wellposed.models._seq2seq import WellposedForSeq2SeqLM
from wellposed.models._sequence_classification import WellposedForSequenceClassification
from wellposed.models._sequence_pair_classification import WellposedForSequencePairClassification
from wellposed.registry import Registry


@dataclass(frozen=True)
class Architecture:
    """A family of models that share a configuration."""

    config: type[PreTrainedConfig]
    """Its configuration."""
    kinds: Mapping[str, type[PreTrainedModel]]
    """Its models by kind: causal_lm, sequence_classification, ..."""


ARCHITECTURES = Registry[Architecture]("architecture")
"""Families of models by name."""

ARCHITECTURES.register("wellposed")(
    Architecture(
        WellposedConfig,
        {
            "causal_lm": WellposedForCausalLM,
            "sequence_classification": WellposedForSequenceClassification,
            "sequence_pair_classification": WellposedForSequencePairClassification,
            "seq2seq_lm": WellposedForSeq2SeqLM,
        },
    )
)


def build_model(architecture: str, kind: str, **config_kwargs: Any) -> PreTrainedModel:
    """Return a fresh model of a registered architecture, on the CPU, in training mode.

    Args:
        architecture: name in `ARCHITECTURES`.
        kind: causal_lm or sequence_classification.
        **config_kwargs: keywords of the architecture's configuration.

    Raises:
        ConfigError: an unknown architecture or kind (the nearest three are named), or a configuration not usable.

    >>> model = build_model("wellposed", "causal_lm", vocab_size=11, hidden_size=8, num_attention_heads=2)
    >>> type(model).__name__
    'WellposedForCausalLM'
    """
    family = ARCHITECTURES.get(architecture)
    if kind not in family.kinds:
        raise unknown_name(f"kind of {architecture} model", kind, family.kinds)
    return family.kinds[kind](family.config(**config_kwargs)).train()
