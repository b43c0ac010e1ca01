"""Tables from names to registered objects, whose errors list the nearest names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from wellposed.errors import ConfigError, is_about_resources, unknown_name
from wellposed.install_line import install_line

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from names to objects of one kind; `ConfigError` for an unknown name.

    A new attention, family, task or variant is a file with a ``register`` line. It may be in this
    package, or in a file that `wellposed_lab.plugins.import_file` runs. It may also be in a package
    with an entry point in the group ``entry_points``; `get` imports them one by one, until the name
    is there. ``elsewhere`` names the package to install for some names. Names in ``taken`` cannot be
    registered.

    >>> shapes = Registry[type]("shape")
    >>> @shapes.register("circle")
    ... class Circle: ...
    >>> shapes.get("circel")
    Traceback (most recent call last):
    wellposed.errors.ConfigError: unknown shape 'circel'; nearest: circle
    """

    def __init__(
        self,
        kind: str,
        *,
        entry_points: str = "",
        elsewhere: Mapping[str, str] | None = None,
        taken: Collection[str] = (),
    ) -> None:
        self.kind = kind
        self._elsewhere = elsewhere or {}
        self._taken = taken
        self._entry_points = entry_points
        self._to_load: list[EntryPoint] = []
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its argument under ``name``, once."""

        def store(entry: T) -> T:
            if name in self._taken:
                raise ConfigError(f"{self.kind} {name!r} has a meaning already; give another name")
            if name in self._entries:
                raise ConfigError(
                    f"{self.kind} {name!r} is registered twice: {self._entries[name]!r} and"
                    f" {entry!r}"
                )
            self._entries[name] = entry
            return entry

        return store

    def get(self, name: str) -> T:
        """Return the object registered as ``name``; `ConfigError` with the nearest names."""
        while name not in self._entries and self._pending():
            load_entry_point(self._to_load.pop(0))
        entries = self._entries
        if name not in entries and name in self._elsewhere:
            raise ConfigError(
                f"{self.kind} {name!r} comes with another package, {self._elsewhere[name]}; type:"
                f" {install_line(self._elsewhere[name])}"
            )
        if name not in entries:
            raise unknown_name(self.kind, name, entries)
        return entries[name]

    def names(self) -> tuple[str, ...]:
        """Return every registered name in the order of registration."""
        return tuple(self._all())

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def _all(self) -> dict[str, T]:
        """Return all entries, those of installed packages included."""
        while self._pending():
            load_entry_point(self._to_load.pop(0))
        return self._entries

    def _pending(self) -> list[EntryPoint]:
        """Return the entry points that are not imported yet."""
        if self._entry_points:
            points = entry_points(group=self._entry_points)
            # In one order on all machines: metadata are listed as the file system lists them.
            self._to_load = sorted(points, key=lambda entry: entry.value)
            self._entry_points = ""
        return self._to_load


def load_entry_point(entry: EntryPoint) -> None:
    """Import an entry point (see docs/howto/extend.md); warn if it fails."""
    try:
        entry.load()
    except Exception as error:
        if is_about_resources(error):
            raise
        package = entry.dist.name if entry.dist else "an installed package"
        warnings.warn(
            f"entry point {entry.name} = {entry.value} of {package} in {entry.group} is left out:"
            f" {type(error).__name__}: {error}; repair or remove that package",
            RuntimeWarning,
            stacklevel=2,
        )
