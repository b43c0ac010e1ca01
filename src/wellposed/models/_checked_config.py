"""A configuration whose every value is checked, when it is made and again when a model is made of
it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from wellposed.errors import ConfigError, listed, nearest_names
from wellposed.options import Size, fits, misfits
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


class CheckedConfig(PreTrainedConfig):
    """What the configurations of all families share: bad values, and keys that nobody reads, in one
    error.

    The options that only some parts read are declared with the parts; a configuration has them as
    attributes.
    """

    absent_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that another family has, and what to do without them here."""

    def __post_init__(self, **kwargs: Any) -> None:
        for name, item in self.part_options().items():
            setattr(self, name, kwargs.pop(name, item.default))
        unknown = unknown_keys(kwargs, self.names(), self.absent_keys)
        super().__post_init__(**kwargs)
        self.check(unknown)

    @classmethod
    def part_options(cls) -> dict[str, Field[Any]]:
        """Return the options that only some parts read."""
        return {}

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return what values must be, by name, as `wellposed.options` writes it."""
        return {}

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of everything that the configuration holds."""
        return {item.name for item in fields(cls)} | set(cls.part_options())

    def check(self, problems: list[str] | None = None) -> None:
        """Raise `ConfigError` naming every value that no model can be built from."""
        problems = [*(problems or []), *self.problems()]
        if problems:
            count = "1 value is" if len(problems) == 1 else f"{len(problems)} values are"
            raise ConfigError(f"{type(self).__name__}: {count} not usable:\n{listed(problems)}")

    def problems(self) -> list[str]:
        """Return one line for each value that no model can be built from."""
        hints = self.hints()
        values = {name: getattr(self, name) for name in hints}
        return [
            f"{name}: received {value!r}; expected {expected}"
            for name, value, expected in misfits(values, hints)
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
    if not fits(config.vocab_size, Size):
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
    return (
        [f"num_labels: received {labels}; expected at least 1"]
        if labels is not None and labels < 1
        else []
    )


def unknown_keys(kwargs: Iterable[str], known: set[str], absent: Mapping[str, str]) -> list[str]:
    """List keys that neither the class nor Hugging Face reads; a misspelt option must not pass in
    silence.

    ``absent`` says of keys that other families have why this one does not.
    """
    accepted = known | _HUGGING_FACE | set(GenerationConfig().to_dict())
    return [
        f"{key}: unknown key;"
        f" {absent.get(key) or 'nearest: ' + ', '.join(nearest_names(key, known))}"
        for key in kwargs
        if key not in accepted and not key.startswith("_") and key != "per_layer_config"
    ]
