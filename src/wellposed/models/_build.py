"""Models by name: families, and the Auto classes that load them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from wellposed.errors import ConfigError, listed, unknown_name
from wellposed.model_options import ModelOptions
from wellposed.models._config import CheckedConfig
from wellposed.registry import Registry


class AutoModelForSequencePairClassification(_BaseAutoModelClass):
    """Auto class of models that take `input_ids` and `input_ids_pair`."""

    _model_mapping = _LazyAutoMapping(CONFIG_MAPPING_NAMES, OrderedDict())


AUTO_CLASSES: Mapping[str, Any] = {
    "encoder": transformers.AutoModel,
    "causal_lm": transformers.AutoModelForCausalLM,
    "masked_lm": transformers.AutoModelForMaskedLM,
    "token_classification": transformers.AutoModelForTokenClassification,
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "seq2seq_lm": transformers.AutoModelForSeq2SeqLM,
    "image_classification": transformers.AutoModelForImageClassification,
    "sequence_pair_classification": AutoModelForSequencePairClassification,
}
"""The Auto class of each kind of model; an encoder has no head."""


@dataclass(frozen=True)
class Architecture:
    """A family of models that share a configuration."""

    config: type[PreTrainedConfig]
    """Its configuration."""
    kinds: Mapping[str, type[PreTrainedModel]]
    """Its models by kind: causal_lm, sequence_classification, ..."""


ARCHITECTURES = Registry[Architecture](
    "architecture", entry_points="wellposed.architectures", elsewhere={"lstm": "wellposed-studies"}
)
"""Families of models by name."""


def register_family(
    name: str, family: Architecture, *, body: type[PreTrainedModel] | None = None
) -> None:
    """Add a family to `ARCHITECTURES` and, by its configuration, to the Auto classes."""
    ARCHITECTURES.register(name)(family)
    transformers.AutoConfig.register(family.config.model_type, family.config)
    models = family.kinds if body is None else {**family.kinds, "encoder": body}
    for kind, model in models.items():
        AUTO_CLASSES[kind].register(family.config, model)


def build_model(architecture: str, kind: str, **config_kwargs: Any) -> PreTrainedModel:
    """Return a fresh model of a registered architecture, on the CPU, in training mode.

    Args:
        architecture: name in `ARCHITECTURES`.
        kind: causal_lm, masked_lm, token_classification, sequence_classification,
            sequence_pair_classification or seq2seq_lm.
        **config_kwargs: keywords of the architecture's configuration.

    Raises:
        ConfigError: unknown architecture or kind (lists the nearest three), or unusable values.

    >>> sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2}
    >>> type(build_model("wellposed", "causal_lm", **sizes)).__name__
    'WellposedForCausalLM'
    """
    family = ARCHITECTURES.get(architecture)
    if kind not in family.kinds:
        raise unknown_name(f"kind of {architecture} model", kind, family.kinds)
    return family.kinds[kind](family.config(**config_kwargs)).train()


def model_keywords(options: ModelOptions) -> dict[str, Any]:
    """Return the keywords for `build_model` that ``options`` sets and the architecture takes.

    Raises:
        ConfigError: an unknown architecture, or an option that it lacks is not at its default.

    >>> model_keywords(ModelOptions(architecture="transject", num_experts=2))["num_experts"]
    2
    """
    kind: Any = ARCHITECTURES.get(options.architecture).config
    option_names = {item.name for item in fields(kind)}
    if issubclass(kind, CheckedConfig):
        option_names |= set(kind.part_options())

    values = {i: getattr(options, i.name) for i in fields(options) if i.name != "architecture"}
    foreign = [
        f"model.{item.name}: received {value!r}; leave it {item.default!r}"
        for item, value in values.items()
        if item.name not in option_names
        and value not in (item.default, item.metadata.get("neutral", item.default))
    ]
    if foreign:
        raise ConfigError(f"architecture {options.architecture!r} lacks:\n" + listed(foreign))

    return {i.name: v for i, v in values.items() if i.name in option_names and v is not None}
