"""Models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from wellposed.errors import ConfigError, listed, unknown_name
from wellposed.model_options import ModelOptions
from wellposed.models._causal_lm import WellposedForCausalLM
from wellposed.models._checked_config import CheckedConfig
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
        kind: causal_lm, sequence_classification, sequence_pair_classification or seq2seq_lm.
        **config_kwargs: keywords of the architecture's configuration.

    Raises:
        ConfigError: an unknown architecture or kind (the nearest three are named), or a
        configuration not usable.

    >>> model = build_model("wellposed", "causal_lm", vocab_size=11, hidden_size=8, num_attention_heads=2)
    >>> type(model).__name__
    'WellposedForCausalLM'
    """
    family = ARCHITECTURES.get(architecture)
    if kind not in family.kinds:
        raise unknown_name(f"kind of {architecture} model", kind, family.kinds)
    return family.kinds[kind](family.config(**config_kwargs)).train()


def model_keywords(options: ModelOptions) -> dict[str, Any]:
    """Return the keywords of `build_model` that the architecture's configuration takes and
    ``options`` gives.

    Raises:
        ConfigError: an unknown architecture, or an option that it lacks and that is not at its
        default.

    >>> model_keywords(ModelOptions(architecture="transject", num_experts=2))["num_experts"]
    2
    """
    kind = ARCHITECTURES.get(options.architecture).config
    known = (
        kind.names() if issubclass(kind, CheckedConfig) else {item.name for item in fields(kind)}
    )
    given = {
        item: getattr(options, item.name) for item in fields(options) if item.name != "architecture"
    }
    foreign = [
        f"model.{item.name}: received {value!r}; leave it {item.default!r}"
        for item, value in given.items()
        if item.name not in known
        and value not in (item.default, item.metadata.get("neutral", item.default))
    ]
    if foreign:
        raise ConfigError(
            f"architecture {options.architecture!r} has no such option:\n" + listed(foreign)
        )
    return {
        item.name: value
        for item, value in given.items()
        if item.name in known and value is not None
    }
