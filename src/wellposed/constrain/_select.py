"""Which weights of a model a ``where`` means: names, patterns, types or a function."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrize

from wellposed.errors import ConfigError, RoleNotFoundError, nearest_names

Where: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence["str | type[nn.Module]"]


@dataclass(frozen=True)
class Candidate:
    """One place in the model where a weight is, or would be if it were a plain parameter."""

    module_path: str
    name: str
    module: nn.Module
    parameter: nn.Parameter | None
    """None when the module computes its weight (parametrised or packed), so that there is nothing to constrain."""

    @property
    def parameter_name(self) -> str:
        """The full dotted name, as in ``state_dict``."""
        return f"{self.module_path}.{self.name}" if self.module_path else self.name

    @property
    def is_main_weight(self) -> bool:
        """Whether the module's own path stands for this weight."""
        return self.name == "weight" or ("weight" not in self.module._parameters and self.name.endswith("weight"))


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and ``torch.compile`` wrappers, so that names are the user's."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def select_weights(model: nn.Module, where: Where) -> list[Candidate]:
    """Return what ``where`` matches, in the order of ``named_modules``; every part of it must match something."""
    candidates = list(_candidates(model))
    parts = _parts(where)
    matches = [_matching(part, candidates) for part in parts]
    unmatched = [part for part, found in zip(parts, matches, strict=True) if not found]
    if unmatched:
        raise RoleNotFoundError("\n".join(_no_match(part, candidates) for part in unmatched))
    wanted = set().union(*matches)
    return [found for index, found in enumerate(candidates) if index in wanted]


def _parts(where: Where) -> list[str | type[nn.Module] | Callable[[str, nn.Module], bool]]:
    if isinstance(where, str) or callable(where):
        return [where]
    if isinstance(where, Sequence) and where and all(isinstance(part, (str, type)) for part in where):
        return list(where)
    raise ConfigError(
        f"where={where!r}: expected a name, an fnmatch pattern, a 're:' pattern, a module type, a function "
        "(dotted name, module) -> bool, or a non-empty list of names and types"
    )


def _candidates(model: nn.Module) -> Iterator[Candidate]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield Candidate(path, name, module, parameter)
        if "weight" not in module._parameters and (
            parametrize.is_parametrized(module, "weight") or callable(getattr(module, "weight", None))
        ):
            yield Candidate(path, "weight", module, None)


def _matching(part: str | type[nn.Module] | Callable[[str, nn.Module], bool], candidates: list[Candidate]) -> set[int]:
    main = {index: found for index, found in enumerate(candidates) if found.is_main_weight}
    if isinstance(part, str):
        # Parameter names only where no module path matches, or "layers.0*" would take the biases of its modules too.
        by_path = {index for index, found in main.items() if _names(part, found.module_path)}
        return by_path or {index for index, found in enumerate(candidates) if _names(part, found.parameter_name)}
    if isinstance(part, type):
        return {index for index, found in main.items() if isinstance(found.module, part)}
    return {index for index, found in main.items() if part(found.module_path, found.module)}


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return _compiled(pattern).fullmatch(name) is not None
    # The leading dot lets "*.q_proj" also match a module "q_proj" at the top of the model.
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f".{name}", pattern)


def _compiled(part: str) -> re.Pattern[str]:
    try:
        return re.compile(part.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"where={part!r} is not a regular expression: {error}") from error


def _no_match(part: str | type[nn.Module] | Callable[[str, nn.Module], bool], candidates: list[Candidate]) -> str:
    matrices = [found for found in candidates if found.is_main_weight]
    if isinstance(part, str):
        near = nearest_names(part.removeprefix("re:").lstrip("*."), [found.module_path for found in matrices])
        hint = f"nearest: {', '.join(near)}" if near else "the model has no weights"
        return f"where={part!r} matches no module that holds a weight and no parameter; {hint}"
    kinds = sorted({type(found.module).__name__ for found in matrices})
    what = part.__name__ if isinstance(part, type) else f"the function {getattr(part, '__name__', part)!r}"
    return f"where: no module with a weight is matched by {what}; types that hold one: {', '.join(kinds) or 'none'}"
