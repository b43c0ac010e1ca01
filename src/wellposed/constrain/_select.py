"""Selects weights of a model by names, patterns, types, or the roles they play."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

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
from wellposed.roles import (
    ATTENTION,
    FEEDFORWARD,
    ROLE_NAMES,
    RoleWeight,
    WeightView,
    block_of,
    find_roles,
    is_stored,
    sources_of,
    spans_of,
)

Asked: TypeAlias = str | type[nn.Module]
Per: TypeAlias = Literal["head"] | None
Where: TypeAlias = Asked | Sequence[Asked]
LAYERS = "layers"
"""Role of every matrix of attention and feed-forward networks, of experts too; no embedding, no head."""
_LAYER_ROLES = (*ATTENTION, *FEEDFORWARD, "latent")
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
    entry: int | None = None
    """Which matrix of a stack, such as that of one expert; None where the parameter is a matrix."""
    rows: range | None = None
    """The output rows of one part of a fused weight, or None for all of the weight."""
    transposed: bool = False
    """Whether the parameter is stored (in, out) and is to be seen as (out, in)."""
    roles: frozenset[str] = frozenset()
    scattered: bool = False
    """Whether rows of one role lie between those of another, so that this is all of them."""
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
        entry = "" if self.entry is None else f"[{self.entry}]"
        if self.rows is None:
            return f"{self.parameter_name}{entry}"
        step = f":{self.rows.step}" if self.rows.step > 1 else ""
        return f"{self.parameter_name}{entry}[{self.rows.start}:{self.rows.stop}{step}]"

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the matrix inside a tensor of the parameter's shape: a view."""
        matrix = tensor if self.entry is None else tensor[self.entry]
        oriented = matrix.mT if self.transposed else matrix
        if self.rows is None:
            return oriented
        return oriented[self.rows.start : self.rows.stop : self.rows.step]

    @property
    def part(self) -> tuple[int, ...]:
        """Index of the matrix inside its parameter: entry of a stack and first row; empty for a whole one."""
        rows = () if self.rows is None else (self.rows.start,)
        return rows if self.entry is None else (self.entry, *rows)

    def overlaps(self, other: Candidate) -> bool:
        """Tell whether two matrices have numbers in common."""
        if self.parameter is not other.parameter or self.entry != other.entry:
            return False
        mine, others = self.rows, other.rows
        return mine is None or others is None or not set(mine).isdisjoint(others)

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
        others = "weight" not in self.module._parameters and self.name.endswith("weight")
        return self.name == "weight" or others


def unwrap_model(model: nn.Module, call: str) -> nn.Module:
    """Return the module inside DistributedDataParallel and ``torch.compile`` wrappers, so that
    names are the user's."""
    require_module(call, model)
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
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
    per: Per = None,
    batch: Any = None,
) -> list[Candidate]:
    """Return what ``where`` matches or what plays one of the ``roles``, in the order of
    ``named_modules``.

    Every part of ``where`` must match something and every role must be played. A part of ``where``
    that fits no name and is the name of a role means that role. The parts of a fused weight
    (GPT-2's ``c_attn``, ``in_proj_weight``) are returned one by one, with ``per="head"`` the rows of
    each head of queries, keys and values. The role ``"layers"`` is every role of attention and
    feed-forward networks that the model has.
    """
    wanted = [roles] if isinstance(roles, str) else roles or ()
    if not (isinstance(wanted, Iterable) and all(isinstance(role, str) for role in wanted)):
        raise ConfigError(f"roles={roles!r}: expected names of roles, as in ('query', 'key')")
    wanted = list(wanted)
    if where is None and not wanted:
        expected = "expected where= (names, patterns, types) or roles=, such as ('query', 'key')"
        raise ConfigError(f"which weights: {expected}, or 'layers' for every matrix of the layers")
    weights: dict[tuple[int, str], list[RoleWeight]] = {}
    problem: WellposedError | None = None
    notes: Sequence[str] = ()
    try:
        roles_found = find_roles(model, batch)
        notes = roles_found.notes
        for weight in roles_found.weights():
            weights.setdefault((id(weight.view.owner), weight.view.attribute), []).append(weight)
    except WellposedError as error:
        # No model needs roles to be selected from by name; whoever asks for a role is told.
        problem = error
    candidates: list[Candidate] = []
    for each in all_candidates(model):
        candidates += _parts(each, weights.get((id(each.module), each.name), []), per=per)
    chosen: set[int] = set()
    unmatched: list[str] = []
    for asked in [] if where is None else _asked(where):
        matched = _matching(asked, candidates)
        if not matched and isinstance(asked, str) and asked in ROLE_NAMES:
            wanted.append(asked)
        elif not matched:
            unmatched.append(_no_match(asked, candidates))
        chosen |= matched
    if unmatched:
        raise RoleNotFoundError("\n".join(unmatched))
    known = frozenset().union(*(place.roles for place in candidates))
    if LAYERS in wanted:
        wanted += [role for role in _LAYER_ROLES if role in known] or _LAYER_ROLES
        wanted = [role for role in wanted if role != LAYERS]
    _check_roles(wanted, known, problem, notes)
    played = {id(place) for place in candidates if not place.roles.isdisjoint(wanted)}
    found = [place for place in candidates if id(place) in chosen | played]
    scattered = [place.label for place in found if place.scattered and id(place) in played]
    if scattered:
        raise ConfigError(
            "the rows of a role lie between those of others in these weights; give per='head', or name"
            f" the whole weight in where=:\n{listed(scattered)}"
        )
    return found


def _check_roles(
    wanted: Iterable[str],
    known: frozenset[str],
    problem: WellposedError | None,
    notes: Sequence[str],
) -> None:
    """Raise for a name that is no role, and for a role that no weight of the model plays."""
    for role in wanted:
        if role not in ROLE_NAMES:
            raise unknown_name("role", role, (*ROLE_NAMES, LAYERS))
        if isinstance(problem, RoleNotFoundError):
            choose = "Or choose weights by name or type: where='*.q_proj', where=torch.nn.Linear"
            raise RoleNotFoundError(f"{problem}\n{choose}") from problem
        if problem is not None:
            raise problem
    if missing := ", ".join(role for role in wanted if role not in known):
        have = ", ".join(role for role in ROLE_NAMES if role in known)
        problem_line = f"no weight of the model plays the role {missing}; it has {have}"
        raise RoleNotFoundError("\n".join((problem_line, *notes)))


def _parts(found: Candidate, weights: Sequence[RoleWeight], *, per: Per) -> list[Candidate]:
    """Return the matrices of a parameter: of each entry of a stack the blocks of rows that play roles
    (with ``per``, those of each head) and what lies between them, or the weight as a whole, with the
    roles it plays."""
    whole = replace(found, roles=frozenset(weight.role for weight in weights))
    parameter, entries = found.parameter, {weight.view.entry for weight in weights}
    if parameter is None or entries == {None}:
        return _blocks(whole, weights, per=per)
    if parameter.ndim != 3 or entries != set(range(len(parameter))):
        return [whole]
    return [
        part
        for entry in range(len(parameter))
        for part in _blocks(
            replace(whole, entry=entry, transposed=weights[0].view.transposed),
            [weight for weight in weights if weight.view.entry == entry],
            per=per,
        )
    ]


def _blocks(whole: Candidate, weights: Sequence[RoleWeight], *, per: Per) -> list[Candidate]:
    """Return the blocks of rows of one matrix, or all of it where what plays a role is no block."""
    held = [(w.role, (per and w.heads) or (w.view.spans,)) for w in weights]
    pieces = [(spans, role) for role, several in held for spans in several]
    if not pieces or whole.parameter is None or any(spans is None for spans, _ in pieces):
        return [replace(whole, roles=frozenset(weight.role for weight in weights))]
    roles: dict[range | None, set[str]] = {}
    for spans, role in pieces:
        roles.setdefault(block_of(spans or ()), set()).add(role)
    blocks = [rows for rows in roles if rows is not None]
    if len(blocks) < len(roles):
        return [replace(whole, scattered=True)]
    transposed = weights[0].view.transposed
    left = set(range(whole.parameter.shape[-1 if transposed else -2]))
    for rows in blocks:
        if not left.issuperset(rows):
            return [whole]
        left.difference_update(rows)
    free = [range(*span) for span in spans_of(sorted(left))]
    return [
        replace(whole, rows=rows, transposed=transposed, roles=frozenset(roles.get(rows, ())))
        for rows in sorted([*blocks, *free], key=lambda rows: (rows.start, rows.step))
    ]


def _asked(where: Where) -> list[Asked]:
    parts: list[Any] = list(where) if isinstance(where, (list, tuple)) else [where]
    if parts and all(isinstance(part, (str, type)) for part in parts):
        return parts
    raise ConfigError(
        f"where={where!r}: expected a name, an fnmatch pattern, a 're:' pattern, a module type, or a"
        " non-empty list of these"
    )


def all_candidates(model: nn.Module) -> Iterator[Candidate]:
    """Yield every parameter of the model under each of its names, and every computed weight."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList):
            continue
        computed = sources_of(module)
        hidden = {name for names in computed.values() for name in names}
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in hidden:
                stored = name != "weight" or is_stored(WeightView(path, module, name))
                yield Candidate(path, name, module, parameter if stored else None)
        is_packed = "weight" not in computed and callable(getattr(module, "weight", None))
        for name in (*computed, *(["weight"] if is_packed else [])):
            yield Candidate(path, name, module, None)


def _matching(asked: Asked, candidates: list[Candidate]) -> set[int]:
    """Return the ids of the candidates that are meant."""
    main = [found for found in candidates if found.is_main_weight]
    if isinstance(asked, type):
        return {id(found) for found in main if isinstance(found.module, asked)}
    # Parameter names only where no module path matches, or "layers.0*" would take the biases of
    # its modules too.
    by_path = {id(found) for found in main if _names(asked, found.module_path, found.layer_path)}
    named = (each for each in candidates if _names(asked, each.parameter_name, each.label))
    return by_path or set(map(id, named))


def _names(pattern: str, *names: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return any(re.fullmatch(pattern.removeprefix("re:"), name) for name in names)
        except re.error as error:
            raise ConfigError(f"where={pattern!r} is not a regular expression: {error}") from error
    # The leading dot lets "*.q_proj" also match a module "q_proj" at the top of the model; a name
    # of a part has brackets, which are no pattern there.
    forms = [form for name in names for form in (name, f".{name}")]
    return pattern in names or any(fnmatch.fnmatchcase(form, pattern) for form in forms)


def _no_match(part: Asked, candidates: list[Candidate]) -> str:
    matrices = [found for found in candidates if found.is_main_weight]
    if isinstance(part, str):
        paths = [found.module_path for found in matrices]
        near = nearest_names(part.removeprefix("re:").lstrip("*."), paths)
        hint = f"nearest: {', '.join(near)}" if near else "the model has no weights"
        return f"where={part!r} matches no module that holds a weight and no parameter; {hint}"
    kinds = ", ".join(sorted({type(found.module).__name__ for found in matrices})) or "none"
    return f"where: no module with a weight is a {part.__name__}; types that hold one: {kinds}"
