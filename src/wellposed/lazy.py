"""Public names of a package that are imported on first use."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from pkgutil import walk_packages
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from wellposed.errors import import_extra, nearest_names

T = TypeVar("T")


def import_on_first_use(
    package: str, names_of: Mapping[str, str], *, gone: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports names on first use.

    ``__all__`` contains the names that are not sub-packages. Type checkers read the same names
    below ``if TYPE_CHECKING``; a test compares the two lists.

    Args:
        package: ``__name__`` of the package whose ``__init__`` assigns the result.
        names_of: module below the package -> its names, separated by spaces; "" for sub-packages.
        gone: removed name -> what to use instead, for the `AttributeError`.

    >>> find, names = import_on_first_use("wellposed", {"": "nn", "errors": "DataError ShapeError"})
    >>> find("DataError").__name__, find("__all__")
    ('DataError', ['DataError', 'ShapeError'])
    """
    homes = {name: home for home, names in names_of.items() for name in names.split()}

    def find(name: str) -> Any:
        if name == "__all__":
            return sorted(name for name, home in homes.items() if home)
        if name not in homes:
            hint = gone.get(name) or "nearest: " + ", ".join(nearest_names(name, homes))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; {hint}")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names


def renamed(package: str, new_places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a module for old names: old name -> new place, dotted.

    >>> with warnings.catch_warnings(action="ignore"):
    ...     renamed("wellposed.nowhere", {"Old": "wellposed.errors.DataError"})("Old").__name__
    'DataError'
    """

    def find(name: str) -> Any:
        if name not in new_places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(f"{package}.{name} is {new_places[name]} now", FutureWarning, stacklevel=2)
        home, _, new_name = new_places[name].rpartition(".")
        return getattr(importlib.import_module(home), new_name)

    return find


def renamed_attributes(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a class whose attributes have old names too: ``old="new"``."""

    def declare(owner: type[T]) -> type[T]:
        for old, new in new_names.items():

            def read(instance: Any, old: str = old, new: str = new) -> Any:
                line = f"{owner.__name__}.{old} is {new} now"
                warnings.warn(line, FutureWarning, stacklevel=2)
                return getattr(instance, new)

            setattr(owner, old, property(read))
        return owner

    return declare


def moved_package(old: str, new: str) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a module of 0.3 whose code is now in the package ``new``.

    Its submodules keep their old names and are the same objects. One `FutureWarning` says where to
    import from; `ConfigError` if the package is not installed.
    """
    warnings.warn(f"{old} has moved; import from {new}", FutureWarning, stacklevel=3)
    package = import_extra(new, "lab", old)
    modules = [package]
    for module_info in walk_packages(getattr(package, "__path__", ()), f"{new}."):
        if module_info.name.endswith("__main__"):
            continue
        modules.append(importlib.import_module(module_info.name))
        sys.modules[old + module_info.name.removeprefix(new)] = modules[-1]

    def find(name: str) -> Any:
        values = [vars(module)[name] for module in modules if name in vars(module)]
        # If a file and its function share a name, the old facade had the function.
        values.sort(key=lambda value: isinstance(value, ModuleType))
        if not values:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        return values[0]

    return find
