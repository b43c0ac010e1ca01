"""Which weights of a model are meant: by names, patterns, types, a function, or the roles they
play."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrize

from wellposed.call_checks import require_module
from wellposed.errors import (
    ConfigError,
    RoleNotFoundError,
    WellposedError,
    listed,
    nearest_names,
    unknown_name,
)
from wellposed.roles import ROLE_NAMES, RoleWeight, find_roles

Where: TypeAlias = (
    str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence["str | type[nn.Module]"]
)
# Adapters (LoRA and kin) keep the layer that they adapt under this name.
_BASE = "base_layer"


@dataclass(frozen=True)
class Candidate:
    """One place in the model where a matrix is, or would be if it were a plain parameter."""

    module_path: str
    name: str
    module: nn.Module
    parameter: nn.Parameter | None
    """None when the module computes its weight (parametrised or packed), so that there is nothing
    to constrain."""
    rows: tuple[int, int] | None = None
    """The output rows of one part of a fused weight, or None for all of the weight."""
    transposed: bool = False
    """Whether the parameter is stored (in, out) and is to be seen as (out, in)."""
    roles: frozenset[str] = frozenset()
    padding: int | None = None
    """The column that is a vector of padding, which may be zero."""
    also: tuple[str, ...] = ()
    """Other names of the same tied parameter."""

    @property
    def parameter_name(self) -> str:
        """The full dotted name, as in ``state_dict``."""
        return f"{self.module_path}.{self.name}" if self.module_path else self.name

    @property
    def label(self) -> str:
        """The name of the matrix: that of the parameter, with the rows where it is a part of it."""
        return (
            self.parameter_name
            if self.rows is None
            else f"{self.parameter_name}[{self.rows[0]}:{self.rows[1]}]"
        )

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the matrix inside a tensor of the parameter's shape: a view."""
        oriented = tensor.mT if self.transposed else tensor
        return oriented if self.rows is None else oriented[self.rows[0] : self.rows[1]]

    @property
    def layer_path(self) -> str:
        """The path of the layer as it is known without adapters."""
        return self.module_path.removesuffix(f".{_BASE}")

    @property
    def is_adapted(self) -> bool:
        """Whether the weight is the frozen one below an adapter."""
        return self.module_path.endswith(f".{_BASE}")

    @property
    def is_main_weight(self) -> bool:
        """Whether the module's own path stands for this weight."""
        return self.name == "weight" or (
            "weight" not in self.module._parameters and self.name.endswith("weight")
        )


@dataclass(frozen=True)
class Part:
    """Rows of a weight, in (out, in) orientation, and the roles they play; None means all rows."""

    rows: tuple[int, int] | None
    transposed: bool
    roles: frozenset[str]


class Parts:
    """The parts of every weight with a role, by owning module and attribute."""

    def __init__(self, model: nn.Module) -> None:
        self.problem: WellposedError | None = None
        self.by_place: Mapping[tuple[int, str], tuple[Part, ...]] = {}
        try:
            weights = list(find_roles(model).weights())
        except WellposedError as error:
            # No model needs roles to be selected from by name; whoever asks for a role is told.
            self.problem = error
            return
        places: dict[tuple[int, str], list[RoleWeight]] = {}
        for weight in weights:
            places.setdefault((id(weight.view.owner), weight.view.attribute), []).append(weight)
        self.by_place = {place: _parts(group) for place, group in places.items()}

    def of(self, module: nn.Module, name: str) -> tuple[Part, ...]:
        """Return the parts of a weight: more than one where it is fused, none where it plays no
        role."""
        return self.by_place.get((id(module), name), ())

    def check(self, wanted: Collection[str]) -> None:
        """Raise for a name that is no role, and for a role that no weight of the model plays."""
        for role in wanted:
            if role not in ROLE_NAMES:
                raise unknown_name("role", role, ROLE_NAMES)
        if wanted and self.problem is not None:
            raise self.problem
        known = set().union(*(part.roles for parts in self.by_place.values() for part in parts))
        missing = [role for role in wanted if role not in known]
        if missing:
            have = ", ".join(role for role in ROLE_NAMES if role in known)
            raise RoleNotFoundError(
                f"no weight of the model plays the role {', '.join(missing)}; it has {have}"
            )


def _parts(weights: list[RoleWeight]) -> tuple[Part, ...]:
    roles: dict[tuple[int, int] | None, set[str]] = {}
    for weight in weights:
        roles.setdefault(weight.view.rows, set()).add(weight.role)
    transposed = weights[0].view.transposed
    slices = sorted(rows for rows in roles if rows is not None)
    whole = frozenset().union(*roles.values())
    if None in roles or not slices or not _cover(slices, weights[0]):
        return (Part(None, transposed, whole),)
    return tuple(Part(rows, transposed, frozenset(roles[rows])) for rows in slices)


def _cover(slices: list[tuple[int, int]], weight: RoleWeight) -> bool:
    """Tell whether the slices follow each other from the first row to the last."""
    shape = weight.view.parameter.shape
    starts = [start for start, _ in slices]
    ends = [end for _, end in slices]
    return [*starts, shape[-1 if weight.view.transposed else 0]] == [0, *ends]


def unwrap_model(model: nn.Module, call: str) -> nn.Module:
    """Return the module inside DistributedDataParallel and ``torch.compile`` wrappers, so that
    names are the user's."""
    require_module(call, model)
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def select_weights(
    model: nn.Module,
    where: Where | None = None,
    *,
    roles: str | Sequence[str] | None = None,
    adapters: bool = False,
) -> list[Candidate]:
    """Return what ``where`` matches or what plays one of the ``roles``, in the order of
    ``named_modules``.

    Every part of ``where`` must match something and every role must be played. A part of ``where``
    that fits no name and is the name of a role means that role. The parts of a fused weight
    (GPT-2's ``c_attn``, ``in_proj_weight``) are returned one by one. With ``adapters`` the
    trainable factors of an adapter come in place of the weight below it.
    """
    wanted = [roles] if isinstance(roles, str) else roles or ()
    if not (isinstance(wanted, Iterable) and all(isinstance(role, str) for role in wanted)):
        raise ConfigError(f"roles={roles!r}: expected names of roles, as in ('query', 'key')")
    wanted = list(wanted)
    if where is None and not wanted:
        raise ConfigError(
            "which weights: expected where= (names, patterns, types, a function) or roles="
        )
    parts = Parts(model)
    candidates = [
        split
        for found in _candidates(model)
        for split in _split(found, parts.of(found.module, found.name))
    ]
    matches: list[set[int]] = []
    unmatched: list[str] = []
    for part in [] if where is None else _asked(where):
        matched = _matching(part, candidates)
        if not matched and isinstance(part, str) and part in ROLE_NAMES:
            wanted.append(part)
        elif not matched:
            unmatched.append(_no_match(part, candidates))
        matches.append(matched)
    if unmatched:
        raise RoleNotFoundError("\n".join(unmatched))
    parts.check(wanted)
    chosen = set().union(*matches)
    found = [
        place
        for index, place in enumerate(candidates)
        if index in chosen or not place.roles.isdisjoint(wanted)
    ]
    return _factors(found, candidates) if adapters else found


def _split(found: Candidate, parts: Sequence[Part]) -> Iterator[Candidate]:
    if not parts or found.parameter is None:
        yield replace(found, roles=frozenset().union(*(part.roles for part in parts)))
    for part in parts if found.parameter is not None else ():
        is_slice = part.rows is not None
        yield replace(
            found, rows=part.rows, transposed=part.transposed and is_slice, roles=part.roles
        )


def _factors(found: Iterable[Candidate], candidates: Iterable[Candidate]) -> list[Candidate]:
    """Put the factors of its adapter, as far as they train, in the place of each adapted weight."""
    result: dict[str, Candidate] = {}
    bare: list[str] = []
    for place in found:
        inside, base = f"{place.layer_path}.", f"{place.layer_path}.{_BASE}"
        own = [
            other
            for other in candidates
            if other.module_path.startswith(inside)
            and not f"{other.module_path}.".startswith(f"{base}.")
            and other.parameter is not None
            and other.parameter.requires_grad
            and other.parameter.ndim == 2
        ]
        if not place.is_adapted or not own:
            bare.append(place.label)
        result.update((other.label, other) for other in own if place.is_adapted)
    if bare:
        raise ConfigError(
            "adapters=True, but these weights have no adapter with a factor that trains; narrow"
            f" the selection, or leave adapters=False for them:\n{listed(bare)}"
        )
    return list(result.values())


def _asked(where: Where) -> list[str | type[nn.Module] | Callable[[str, nn.Module], bool]]:
    if isinstance(where, str) or callable(where):
        return [where]
    if (
        isinstance(where, Sequence)
        and where
        and all(isinstance(part, (str, type)) for part in where)
    ):
        return list(where)
    raise ConfigError(
        f"where={where!r}: expected a name, an fnmatch pattern, a 're:' pattern, a module type, a"
        " function (dotted name, module) -> bool, or a non-empty list of names and types"
    )


def _candidates(model: nn.Module) -> Iterator[Candidate]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield Candidate(path, name, module, parameter)
        if "weight" not in module._parameters and (
            parametrize.is_parametrized(module, "weight")
            or callable(getattr(module, "weight", None))
        ):
            yield Candidate(path, "weight", module, None)


def _matching(
    part: str | type[nn.Module] | Callable[[str, nn.Module], bool], candidates: list[Candidate]
) -> set[int]:
    main = {index: found for index, found in enumerate(candidates) if found.is_main_weight}
    if isinstance(part, str):
        # Parameter names only where no module path matches, or "layers.0*" would take the biases of
        # its modules too.
        by_path = {
            index
            for index, found in main.items()
            if _names(part, found.module_path, found.layer_path)
        }
        return by_path or {
            i
            for i, found in enumerate(candidates)
            if _names(part, found.parameter_name, found.label)
        }
    if isinstance(part, type):
        return {index for index, found in main.items() if isinstance(found.module, part)}
    return {index for index, found in main.items() if part(found.module_path, found.module)}


def _names(pattern: str, *names: str) -> bool:
    if pattern.startswith("re:"):
        return any(_compiled(pattern).fullmatch(name) for name in names)
    # The leading dot lets "*.q_proj" also match a module "q_proj" at the top of the model; a name
    # of a part has brackets, which are no pattern there.
    forms = [form for name in names for form in (name, f".{name}")]
    return pattern in names or any(fnmatch.fnmatchcase(form, pattern) for form in forms)


def _compiled(part: str) -> re.Pattern[str]:
    try:
        return re.compile(part.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"where={part!r} is not a regular expression: {error}") from error


def _no_match(
    part: str | type[nn.Module] | Callable[[str, nn.Module], bool], candidates: list[Candidate]
) -> str:
    matrices = [found for found in candidates if found.is_main_weight]
    if isinstance(part, str):
        near = nearest_names(
            part.removeprefix("re:").lstrip("*."), [found.module_path for found in matrices]
        )
        hint = f"nearest: {', '.join(near)}" if near else "the model has no weights"
        return f"where={part!r} matches no module that holds a weight and no parameter; {hint}"
    kinds = sorted({type(found.module).__name__ for found in matrices})
    what = (
        part.__name__
        if isinstance(part, type)
        else f"the function {getattr(part, '__name__', part)!r}"
    )
    return (
        f"where: no module with a weight is matched by {what}; types that hold one:"
        f" {', '.join(kinds) or 'none'}"
    )
