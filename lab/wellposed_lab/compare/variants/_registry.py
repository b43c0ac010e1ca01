"""The registry of variants, and how the words that name one become a configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from wellposed.errors import ConfigError
from wellposed.registry import Registry
from wellposed_lab.training.config import RunConfig

Variant = Callable[..., RunConfig]
VARIANTS: Registry[Variant] = Registry(
    "variant", entry_points="wellposed.variants", elsewhere={"lstm": "wellposed-studies"}
)
"""Variants by name, in the order of the help."""


def apply_variant(spec: str, base: RunConfig) -> RunConfig:
    """Return the configuration of variant ``spec`` (``name`` or ``name:value``) built on ``base``.

    Raises:
        ConfigError: an unknown variant (nearest three named), a value that is no number or not
            taken, or an architecture if ``base`` starts from a model (usable variants are listed).

    >>> apply_variant("pre_ln", RunConfig(task="listops")).model.norm
    'pre'
    >>> apply_variant("oc1:1e-4", RunConfig(task="listops")).penalty.affinity
    0.0001
    """
    name, colon, text = spec.partition(":")
    variant = VARIANTS.get(name)
    values = [_value(spec, name, text, variant)] if colon else []
    try:
        return replace(variant(base, *values), variant=spec)
    except OwnArchitectureError:
        raise ConfigError(
            f"variant {spec!r} makes its own architecture, but {base.start.model} already has one;"
            f" variants for such a model: {', '.join(_of_start_model(base))}"
        ) from None


def variant_folder(spec: str) -> str:
    """Return the folder name of a variant, such as ``oc3-1e-4`` for ``oc3:1e-4``."""
    return spec.replace(":", "-")


def summary(name: str) -> str:
    """Return the first paragraph of the variant's description, as one line."""
    return (inspect.getdoc(VARIANTS.get(name)) or "").partition("\n\n")[0].replace("\n", " ")


class OwnArchitectureError(ConfigError):
    """A variant that makes an architecture was applied to a configuration with a start model."""


def _of_start_model(base: RunConfig) -> list[str]:
    names = []
    for name in VARIANTS:
        with suppress(ConfigError):
            VARIANTS.get(name)(base)
            names.append(name)
    return names


def _value(spec: str, name: str, text: str, variant: Variant) -> float | str:
    parameters = list(inspect.signature(variant).parameters.values())
    if len(parameters) < 2:
        raise ConfigError(f"variant {spec!r}: {name} takes no value; write {name!r}")
    if parameters[1].annotation in (str, "str"):
        return text
    with suppress(ValueError):
        value = float(text)
        if math.isfinite(value):
            return value
    received = f"{parameters[1].name} must be a finite number, received {text[:40]!r}"
    problem = f"{received}; write {name}:1e-2, for instance"
    raise ConfigError(f"variant {spec!r}: {problem}")
