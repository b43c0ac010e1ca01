"""Whether modules found in a model are still part of it, by comparing identities only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from wellposed.hooks import class_name

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which `torch.compile`, FSDP and checkpoint wrappers keep a model."""
_ENGINES = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")  # keep it as ``module``


class LiveParts:
    """Parts of a model by path, which `changes` compares with the model as it is now."""

    def __init__(self, model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
        self.model = model
        self._parts = parts
        self._structure = structure(model)
        self._paths = {_plain(path) for path, _ in model.named_modules()}
        self._patterns = {_pattern(path) for path in parts}

    def changes(self) -> list[str]:
        """Return a line per lost part and per new module in known layers, ignoring wrappers."""
        now = structure(self.model)
        if now == self._structure:
            return []

        lines: list[str] = []
        for path, part in self._parts.items():
            module = module_at(self.model, path)
            if module is None:
                lines.append(f"{path}: the model no longer has it")
            elif unwrapped(module) is not unwrapped(part):
                lines.append(f"{path}: now another module, a {class_name(module)}")

        paths = {_plain(path) for path, _ in self.model.named_modules()} - self._paths
        new = sorted(path for path in paths if _pattern(path) in self._patterns)
        lines += [f"{path}: new in the model" for path in new]
        if not lines:
            self._structure = now
        return lines


def structure(model: nn.Module) -> tuple[int, ...]:
    """Return the identities of all modules, in an order given by their positions."""
    visited = {id(model)}
    modules = [model]
    for module in modules:  # which grows
        for child in module._modules.values():
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                modules.append(child)
    return tuple(map(id, modules))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers for compilation, processes and checkpointing."""
    while (inner := wrapped_by(module)) is not None:
        module = inner
    return module


def module_at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a dotted path, through any wrappers; None if there is none."""
    module: nn.Module | None = model
    for name in _plain(path).split(".") if path else ():
        while module is not None and name not in module._modules:
            module = wrapped_by(module)
        module = None if module is None else module._modules[name]
    return module


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """Return the module that a wrapper calls; None if this is no wrapper."""
    name = _wrapped_name(module)
    return None if name is None else module._modules[name]


def path_inside(module: nn.Module, dotted: str) -> str:
    """Return the path of a part that wrappers pass on as their own, with the names of wrappers.

    >>> import torch
    >>> path_inside(torch.compile(nn.Sequential(nn.Linear(2, 2))), "0")
    '_orig_mod.0'
    """
    names: list[str] = []
    part: nn.Module | None = module
    for name in dotted.split("."):
        while part is not None and name not in part._modules:
            wrapper = _wrapped_name(part)
            names += [] if wrapper is None else [wrapper]
            part = None if wrapper is None else part._modules[wrapper]
        names.append(name)
        part = None if part is None else part._modules[name]
    return ".".join(names)


def _wrapped_name(module: nn.Module) -> str | None:
    names = ("module",) if class_name(module) in _ENGINES else _WRAPPED
    return next((name for name in names if name in module._modules), None)


def _plain(path: str) -> str:
    return ".".join(name for name in path.split(".") if name not in _WRAPPED)


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "#", _plain(path))
