"""Public names of a package that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from wellposed.errors import nearest_names


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


class ModuleOnFirstUse:
    """Stands for a module, which is imported when an attribute of it is first read.

    Type checkers read the import itself below ``if TYPE_CHECKING``.

    >>> math = ModuleOnFirstUse("math")
    >>> math.gcd(4, 6)
    2
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        module = sys.modules.get(self._name) or importlib.import_module(self._name)
        return getattr(module, attribute)
