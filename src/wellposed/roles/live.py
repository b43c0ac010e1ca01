"""Whether modules found in a model are still its parts, by comparing identities alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which `torch.compile`, FSDP and checkpoint wrappers keep a model."""
_ENGINES = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")  # keep it as ``module``
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class LiveParts:
    """Parts of a model by path, which `changes` compares with the model as it is now."""

    def __init__(self, model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        self.model = model
        self.parts = dict(parts)
        self._structure = structure(model)
        self._paths = {_plain(path) for path, _ in model.named_modules()}
        self._places = {_place(model, path) for path in parts}

    def changes(self) -> list[str]:
        """Return, one line each, parts that the model lost, and new modules beside such parts.

        A wrapper around a module is no change, nor is a new module elsewhere. Cost: one walk over
        the modules.
        """
        now = structure(self.model)
        if now == self._structure:
            return []
        lines: list[str] = []
        for path, part in self.parts.items():
            module = module_at(self.model, path)
            if module is None:
                lines.append(f"{path}: the model no longer has it")
            elif unwrapped(module) is not unwrapped(part):
                lines.append(f"{path}: now another module, a {type(module).__name__}")
        own = set(map(id, self.parts.values()))
        for path, module in self.model.named_modules():
            is_new = _plain(path) not in self._paths and id(module) not in own
            if is_new and _place(self.model, path) in self._places:
                lines.append(f"{path}: new in the model")
        if not lines:
            self._structure = now
        return lines


def structure(model: nn.Module) -> tuple[int, ...]:
    """Return the identities of all modules, in an order that their places decide."""
    seen, found = {id(model)}, [model]
    for module in found:  # which grows
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return tuple(map(id, found))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers of compilation, of processes and of checkpointing.

    >>> layer = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(layer)) is layer
    True
    """
    while (inner := _inside(module)) is not None:
        module = inner
    return module


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a dotted path, whatever wrappers lie on it; None if there is none."""
    module: nn.Module | None = model
    for name in path.split(".") if path else ():
        if module is None or (name in _WRAPPED and name not in module._modules):
            continue
        inner: nn.Module | None = module
        while inner is not None and name not in inner._modules:
            inner = _inside(inner)
        module = None if inner is None else inner._modules[name]
    return module


def _inside(module: nn.Module) -> nn.Module | None:
    names = ("module",) if type(module).__name__ in _ENGINES else _WRAPPED
    return next((module._modules[name] for name in names if name in module._modules), None)


def _plain(path: str) -> str:
    return ".".join(name for name in path.split(".") if name not in _WRAPPED)


def _place(model: nn.Module, path: str) -> tuple[type | None, str]:
    """Return the class of the nearest module above a path that is no container, and the rest of the
    path without its numbers."""
    above, _, rest = path.rpartition(".")
    parent = module_at(model, above)
    while above and isinstance(parent, _CONTAINERS):
        above, _, name = above.rpartition(".")
        parent, rest = module_at(model, above), f"{name}.{rest}"
    return type(parent), re.sub(r"\d+", "#", rest)
