"""A configuration whose every value is checked, when it is made and again when a model is made of
it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Annotated, Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from wellposed.errors import ConfigError, listed, nearest_names
from wellposed.model_options import PartOptions
from wellposed.options import Ge, Lt, checked_hints, fits, misfits
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
MOST_LABELS = 1_000_000
"""Hugging Face keeps a name for each label: beyond this a configuration alone fills the memory."""
_Labels = Annotated[int, Ge(1), Lt(MOST_LABELS + 1)]


class CheckedConfig(PreTrainedConfig):
    """What the configurations of all families share: bad values, and keys that nobody reads, in one
    error.

    The annotations of the fields say what their values must be. The options that only some parts
    read are declared with the parts; a configuration has them as attributes.
    """

    absent_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that another family has, and what to do without them here."""
    named: ClassVar[Mapping[str, Registry[Any]]] = {}
    """Where the names that fields give are looked up."""

    def __post_init__(self, **kwargs: Any) -> None:
        for name, item in self.part_options().items():
            setattr(self, name, kwargs.pop(name, item.default))
        if kwargs.get("num_labels", 0) is None:
            del kwargs["num_labels"]
        unusable = _label_problems(kwargs.get("num_labels"), self.id2label)
        unknown = self._unknown_keys(kwargs)
        if unusable:
            kwargs, self.id2label = {**kwargs, "num_labels": 2}, None
        super().__post_init__(**kwargs)
        self.check([*unknown, *unusable])

    @classmethod
    def part_classes(cls) -> list[type[PartOptions]]:
        """Return the classes of the options that only some parts read."""
        return []

    @classmethod
    def part_options(cls) -> dict[str, Field[Any]]:
        """Return the options that only some parts read."""
        return {item.name: item for options in cls.part_classes() for item in fields(options)}

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return what values must be, by name, as `wellposed.options` writes it."""
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, CheckedConfig):
                found |= inspect.get_annotations(base, eval_str=True)
        own = {item.name: found[item.name] for item in fields(cls) if item.name in found}
        for options in cls.part_classes():
            own |= checked_hints(options)
        return own

    def check(self, problems: list[str] | None = None) -> None:
        """Raise `ConfigError` naming every value that no model can be built from."""
        problems = [*(problems or []), *self.problems()]
        if problems:
            count = "1 value is" if len(problems) == 1 else f"{len(problems)} values are"
            raise ConfigError(f"{type(self).__name__}: {count} not usable:\n{listed(problems)}")

    def problems(self) -> list[str]:
        """Return one line for each value that no model can be built from."""
        # An option that a part registered after this configuration was made is not its own.
        hints = {name: hint for name, hint in self.hints().items() if hasattr(self, name)}
        values = {name: getattr(self, name) for name in hints}
        wrong = {
            name: f"{name}: received {value!r}; expected {expected}"
            for name, value, expected in misfits(values, hints)
            if name not in self.named
        }
        return [
            *wrong.values(),
            *(
                f"{name}: unknown {registry.kind} {values[name]!r}; "
                f"nearest: {', '.join(nearest_names(str(values[name]), registry))}"
                for name, registry in self.named.items()
                if not (isinstance(values[name], str) and values[name] in registry)
            ),
            *(
                f"{name}: received {token!r}; expected a token in [0, {self.vocab_size})"
                for name in values
                if name.endswith("_token_id") and name not in wrong and "vocab_size" not in wrong
                for token in _tokens(values[name])
                if not fits(token, Annotated[int, Ge(0), Lt(self.vocab_size)])
            ),
        ]

    def _unknown_keys(self, kwargs: Mapping[str, Any]) -> list[str]:
        """List keys that neither the class nor Hugging Face reads; a misspelt option must not pass
        in silence."""
        known = {item.name for item in fields(self)} | set(self.part_options())
        accepted = known | _HUGGING_FACE | {"per_layer_config", *GenerationConfig().to_dict()}
        return [
            f"{key}: unknown key;"
            f" {self.absent_keys.get(key) or 'nearest: ' + ', '.join(nearest_names(key, known))}"
            for key in kwargs
            if key not in accepted and not key.startswith("_")
        ]


def _tokens(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _label_problems(count: Any, names: Any) -> list[str]:
    """Return one line for labels that no head has; before Hugging Face makes a name for each."""
    wrong = misfits({"num_labels": count}, {"num_labels": _Labels | None})
    problems = [f"{name}: received {value!r}; expected {words}" for name, value, words in wrong]
    if names is not None and not (
        isinstance(names, Mapping) and names and all(str(key).isdigit() for key in names)
    ):
        problems.append(
            f"id2label: received {names!r:.200}; expected names of labels by number, such as"
            " {0: 'bad', 1: 'good'}"
        )
    return problems
