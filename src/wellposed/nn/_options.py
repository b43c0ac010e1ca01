"""Options of a configuration that only some parts read: a part says which, so that no other is given one in silence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from wellposed.registry import Registry

Part = TypeVar("Part", bound=Callable[..., Any])


def reads(*options: str) -> Callable[[Part], Part]:
    """Mark a registered builder as one that reads ``options`` of the configuration, which parts do not share.

    Args:
        options: attribute names, for instance ``"contractive"``.

    Returns:
        A decorator; put it under ``REGISTRY.register(name)``.

    >>> @reads("contractive")
    ... def build(config, layer_index): ...
    >>> build.reads
    ('contractive',)
    """

    def mark(part: Part) -> Part:
        part.reads = options  # type: ignore[attr-defined]
        return part

    return mark


def unread_options(
    chosen: Mapping[str, Collection[str]], registries: Mapping[str, Registry[Any]]
) -> dict[str, list[str]]:
    """Return the options that some part reads and the chosen ones do not, each with the choices that would read it.

    An option that parts of two registries read (an attention and an initialisation) needs a reader in each.

    Args:
        chosen: names of the chosen parts by field, for instance ``{"attention": {"l2_tied"}}``.
        registries: registry by field.

    >>> table = Registry("attention")
    >>> _ = table.register("plain")(print), table.register("l2")(reads("width")(lambda config, index: None))
    >>> unread_options({"attention": {"plain"}}, {"attention": table})
    {'width': ["attention 'l2'"]}
    """
    missing: dict[str, list[str]] = {}
    for field, registry in registries.items():
        readers = {name: _read_by(registry.get(name)) for name in registry.names()}
        for option in dict.fromkeys(option for options in readers.values() for option in options):
            if not any(option in readers.get(name, ()) for name in chosen[field]):
                names = [name for name, options in readers.items() if option in options]
                missing.setdefault(option, []).append(f"{field} {' or '.join(map(repr, names))}")
    return missing


def _read_by(part: object) -> Iterable[str]:
    return getattr(part, "reads", ())
