"""Checks that every configuration of ours makes: sizes, rates, names, tokens, and keys that nobody reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from wellposed.errors import ConfigError, listed, nearest_names
from wellposed.registry import Registry

# What Hugging Face itself writes into, or accepts in, a configuration beside its declared fields.
_HUGGING_FACE = {
    "model_type",
    "num_labels",
    "name_or_path",
    "torch_dtype",
    "output_attentions",
    "attn_implementation",
    "experts_implementation",
    "auto_map",
    "quantization_config",
    "custom_pipelines",
    "task_specific_params",
    "use_cache",
}


def is_size(value: object) -> bool:
    """Return whether ``value`` is an integer of at least 1.

    >>> is_size(3), is_size(0), is_size(True)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def size_problems(config: object, names: Iterable[str]) -> list[str]:
    """Return one line for each of the fields ``names`` that is no integer of at least 1."""
    return [
        f"{name}: received {getattr(config, name)!r}; expected an integer >= 1"
        for name in names
        if not is_size(getattr(config, name))
    ]


def rate_problems(config: object, names: Iterable[str]) -> list[str]:
    """Return one line for each of the fields ``names`` that is no number in [0, 1)."""
    values = {name: getattr(config, name) for name in names}
    return [
        f"{name}: received {value!r}; expected a number in [0, 1)"
        for name, value in values.items()
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1
    ]


def name_problems(config: object, registries: Mapping[str, Registry[Any]]) -> list[str]:
    """Return one line for each field that names nothing in its registry, with the nearest three."""
    return [
        f"{name}: unknown {registry.kind} {getattr(config, name)!r}; "
        f"nearest: {', '.join(nearest_names(str(getattr(config, name)), registry))}"
        for name, registry in registries.items()
        if getattr(config, name) not in registry
    ]


def token_problems(config: Any, names: Iterable[str]) -> list[str]:
    """Return one line for each token, in the fields ``names``, that is outside the vocabulary."""
    if not is_size(config.vocab_size):
        return []
    problems = []
    for name in names:
        value = getattr(config, name)
        problems += [
            f"{name}: received {token!r}; expected a token in [0, {config.vocab_size})"
            for token in (value if isinstance(value, (list, tuple)) else [value])
            if token is not None and not 0 <= token < config.vocab_size
        ]
    return problems


def label_problems(config: PreTrainedConfig) -> list[str]:
    """Return one line where the number of labels is below 1."""
    labels = config.num_labels
    return [f"num_labels: received {labels}; expected at least 1"] if labels is not None and labels < 1 else []


def unknown_keys(config: object, kwargs: Iterable[str], absent: Mapping[str, str]) -> list[str]:
    """List keys that neither the class nor Hugging Face reads; a misspelt option must not pass in silence.

    ``absent`` says of keys that other families have why this one does not.
    """
    fields: set[str] = set(type(config).__dataclass_fields__)  # type: ignore[attr-defined]
    accepted = fields | _HUGGING_FACE | set(GenerationConfig().to_dict())
    return [
        f"{key}: unknown key; {absent.get(key) or 'nearest: ' + ', '.join(nearest_names(key, fields))}"
        for key in kwargs
        if key not in accepted and not key.startswith("_") and key != "per_layer_config"
    ]


def refuse_config(config: object, problems: list[str]) -> None:
    """Raise `ConfigError` with all ``problems``, if there are any."""
    if problems:
        count = "1 value is" if len(problems) == 1 else f"{len(problems)} values are"
        raise ConfigError(f"{type(config).__name__}: {count} not usable:\n{listed(problems)}")
