"""Options of a configuration that only some parts read: ranges, and the refusal where no chosen part reads one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from wellposed.nn import unread_options
from wellposed.registry import Registry

_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "contractive": ("a number in (0, 1)", lambda value: _is_number(value) and 0 < value < 1),
    "lipschitz_norm": ("'tok', 'inf' or '2'", lambda value: value in ("tok", "inf", "2")),
    "query_width": ("1 or 2", lambda value: value in (1, 2) and not isinstance(value, bool)),
    "l2_init_scale": ("a finite number > 0", lambda value: _is_number(value) and 0 < value < math.inf),
    "cosine_eps": ("a finite number > 0", lambda value: _is_number(value) and 0 < value < math.inf),
}
_MAY_BE_NONE = ("contractive", "l2_init_scale")


def part_option_problems(config: Any, registries: Mapping[str, Registry[Any]]) -> list[str]:
    """Return one line for each such option of ``config`` that is out of range, or set though nobody reads it.

    Args:
        config: a configuration whose fields hold the options and, by the names in ``registries``, the chosen parts.
        registries: registry of each field that names a part.
    """
    problems = [
        f"{name}: received {getattr(config, name)!r}; expected {expected}"
        for name, (expected, holds) in _RANGES.items()
        if not (holds(getattr(config, name)) or (name in _MAY_BE_NONE and getattr(config, name) is None))
    ]
    if problems:
        return problems
    chosen = {name: {getattr(config, name)} for name in registries}
    # Cross-attentions carry the names of the attentions and read the same options.
    chosen["attention"].add(getattr(config, "cross_attention", None))
    defaults = {name: item.default for name, item in type(config).__dataclass_fields__.items()}
    return [
        f"{name}: received {getattr(config, name)!r}, which only {' with '.join(readers)} reads; "
        f"leave it {defaults[name]!r}"
        for name, readers in unread_options(chosen, registries).items()
        if name in defaults and getattr(config, name) != defaults[name]
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
