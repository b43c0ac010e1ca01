"""Selects weights of a model by names, patterns, types, or roles."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.utils import parametrize

from wellposed.errors import (
    ConfigError,
    RoleNotFoundError,
    WellposedError,
    listed,
    nearest_names,
)
from wellposed.model_checks import require_module
from wellposed.roles import (
    ATTENTION,
    FEEDFORWARD,
    ROLE_NAMES,
    Roles,
    RoleWeight,
    Verb,
    WeightView,
    batch_advice,
    block_of,
    find_roles_for,
    heads_advice,
    is_called,
    is_stored,
    layer_deviation,
    sources_of,
    spans_of,
)

Asked: TypeAlias = str | type[nn.Module]
Per: TypeAlias = Literal["head"] | None
Where: TypeAlias = Asked | Sequence[Asked]
CONSTRAIN = Verb.by_name("constrain_", "model, optimizer")
BY_HEAD = Verb("constrain_", "constrain_(model, optimizer, ..., batch=batch)", "")
"""`constrain_` of single heads, which names of weights do not tell."""
LAYERS = "layers"
"""Role of every matrix of attention and feed-forward networks, experts included."""
_LAYER_ROLES = (*ATTENTION, *FEEDFORWARD, "latent")
# Adapters (such as LoRA) keep the layer that they adapt under this name.
_BASE = "base_layer"


@dataclass(frozen=True)
class WeightSlice:
    """A matrix of the model, or a weight that would be one if it were a plain parameter."""

    module_path: str
    name: str
    module: nn.Module
    parameter: nn.Parameter | None
    """None if the module computes its weight (parametrised or packed): nothing to constrain."""
    expert: int | None = None
    """Index in a stack, such as that of an expert; None if the parameter is a matrix."""
    rows: range | None = None
    """The output rows of one part of a fused weight, or None for all rows."""
    transposed: bool = False
    """Whether the parameter is stored (in, out) and read as (out, in)."""
    roles: frozenset[str] = frozenset()
    scattered: bool = False
    """Whether rows of roles interleave, so that this is all of them."""
    padding: int | None = None
    """The column of a padding vector, which may be zero."""
    also: tuple[str, ...] = ()
    """Other names of the same tied parameter."""
    deviation: str | None = None
    """The layer that computes something else than this weight, and why; None if none does."""

    @property
    def parameter_name(self) -> str:
        """The full dotted name, as in ``state_dict``."""
        return f"{self.module_path}.{self.name}" if self.module_path else self.name

    @property
    def label(self) -> str:
        """The parameter's name, with the rows if the matrix is a part of it."""
        expert = "" if self.expert is None else f"[{self.expert}]"
        if self.rows is None:
            return f"{self.parameter_name}{expert}"
        step = f":{self.rows.step}" if self.rows.step > 1 else ""
        return f"{self.parameter_name}{expert}[{self.rows.start}:{self.rows.stop}{step}]"

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the matrix inside a tensor of the parameter's shape: a view."""
        matrix = tensor if self.expert is None else tensor[self.expert]
        oriented = matrix.mT if self.transposed else matrix
        if self.rows is None:
            return oriented
        return oriented[self.rows.start : self.rows.stop : self.rows.step]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix; of a weight in shards, of the whole."""
        assert self.parameter is not None
        rows, columns = self.parameter.shape[-2:]
        if self.transposed:
            rows, columns = columns, rows
        return (rows if self.rows is None else len(self.rows)), columns

    @property
    def part(self) -> tuple[int, ...]:
        """Entry of a stack and first row; empty for a whole parameter."""
        rows = () if self.rows is None else (self.rows.start,)
        return rows if self.expert is None else (self.expert, *rows)

    def overlaps(self, other: WeightSlice) -> bool:
        """Whether two matrices have numbers in common."""
        if self.parameter is not other.parameter or self.expert != other.expert:
            return False
        mine = self.rows
        others = other.rows
        return mine is None or others is None or not set(mine).isdisjoint(others)

    @property
    def layer_path(self) -> str:
        """The path of the layer without its adapter."""
        return self.module_path.removesuffix(f".{_BASE}")

    @property
    def is_adapted(self) -> bool:
        """Whether the weight is the frozen one below an adapter."""
        return self.module_path.endswith(f".{_BASE}")

    @property
    def is_main_weight(self) -> bool:
        """Whether the module's path means this weight."""
        others = "weight" not in self.module._parameters and self.name.endswith("weight")
        return self.name == "weight" or others


def unwrap_model(model: nn.Module, call: str) -> nn.Module:
    """Return the module inside DistributedDataParallel and ``torch.compile`` wrappers."""
    require_module(call, model)
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def roles_or_error(verb: Verb, model: nn.Module, batch: Any) -> Roles | WellposedError:
    """Return the roles of a model, or why there are none: selection by name needs none."""
    try:
        return find_roles_for(verb, model, batch)
    except WellposedError as error:
        return error


def select_weights(
    model: nn.Module,
    where: Where | None,
    *,
    per: Per = None,
    batch: Any = None,
    model_roles: Roles | WellposedError | None = None,
    verb: Verb = CONSTRAIN,
) -> list[WeightSlice]:
    """Return the weights that ``where`` matches by name, type or role, in order of the modules.

    Every part of ``where`` must match, else `RoleNotFoundError`; a part that is the name of a module
    and another's role is a `ConfigError`. Parts of a fused weight (GPT-2's
    ``c_attn``) are returned separately, with ``per="head"`` also heads of queries, keys and values.
    The role ``"layers"`` is every role of attention and feed-forward networks in the model.
    ``model_roles`` are those that `roles_or_error` returned, if a caller needs them too. Errors speak
    in the words of ``verb``.
    """
    if model_roles is None:
        model_roles = roles_or_error(verb, model, batch)
    candidates = _candidates_with_roles(model, model_roles, per)
    chosen: set[int] = set()
    unmatched: list[str] = []
    wanted: list[str] = []
    present = frozenset().union(*(part.roles for part in candidates))
    for asked in _asked(where):
        matched = _matching(asked, candidates)
        roles = _LAYER_ROLES if asked == LAYERS else [role for role in ROLE_NAMES if role == asked]
        players = {id(part) for part in candidates if not part.roles.isdisjoint(roles)}
        if matched and players and matched != players:
            raise ConfigError(
                f"where={asked!r} is the name of a module, and a role of other weights; write"
                f" where='re:{asked}' for the module, or names of all weights with that role"
            )
        if roles and not matched:
            wanted += [role for role in roles if role in present] or roles
        elif not matched:
            unmatched.append(_no_match(asked, candidates))
        chosen |= matched
    if unmatched:
        raise RoleNotFoundError("\n".join(unmatched))
    _check_roles(verb, model, wanted, present, model_roles)
    played = {id(part) for part in candidates if not part.roles.isdisjoint(wanted)}
    selected = [part for part in candidates if id(part) in chosen | played]
    if per is not None:
        _check_heads(verb, selected, model_roles)
    scattered = [part.label for part in selected if part.scattered and id(part) in played]
    if scattered:
        raise ConfigError(
            "the rows of roles interleave in these weights; give per='head', or name the whole weight"
            f" in where=:\n{listed(scattered)}"
        )
    return selected


def _candidates_with_roles(
    model: nn.Module, model_roles: Roles | WellposedError, per: Per
) -> list[WeightSlice]:
    """Return all matrices of the model, and parts of those that are fused of several roles."""
    weights: dict[tuple[int, str], list[RoleWeight]] = {}
    for weight in model_roles.weights() if isinstance(model_roles, Roles) else ():
        weights.setdefault((id(weight.view.owner), weight.view.attribute), []).append(weight)
    candidates: list[WeightSlice] = []
    for part in all_candidates(model):
        candidates += _parts(part, weights.get((id(part.module), part.name), []), per=per)
    return candidates


def _check_roles(
    verb: Verb,
    model: nn.Module,
    wanted: Iterable[str],
    present: frozenset[str],
    model_roles: Roles | WellposedError,
) -> None:
    """Raise for a role that no weight of the model plays."""
    if wanted and isinstance(model_roles, WellposedError):
        raise model_roles
    missing = ", ".join(role for role in wanted if role not in present)
    if missing and isinstance(model_roles, Roles):
        have = ", ".join(role for role in ROLE_NAMES if role in present)
        problem = f"no weight of the model plays the role {missing}; it has {have}"
        lines = [f"{verb.name}: {problem}", *model_roles.notes]
        raise RoleNotFoundError("\n".join([*lines, batch_advice(verb, model, model_roles)]))


def _check_heads(
    verb: Verb, selected: Iterable[WeightSlice], model_roles: Roles | WellposedError
) -> None:
    """Raise if heads are asked for and those of a selected query, key or value are unknown."""
    if isinstance(model_roles, WellposedError):
        raise model_roles
    # Extra projections, such as a rotary key that all heads read, belong to no head.
    headless = {
        (id(weight.view.owner), weight.view.attribute, weight.role)
        for weight in model_roles.loose
        if weight.role in ATTENTION[:3] and not weight.heads
    }
    unknown = [
        part.label
        for part in selected
        if any((id(part.module), part.name, role) in headless for role in part.roles)
    ]
    if unknown:
        raise ConfigError(
            f"{verb.name}: per='head' and to='logits' need heads, and those of these weights are unknown:"
            f"\n{listed(unknown)}\n{heads_advice(verb, model_roles)}. Whole matrices need none"
        )


def _parts(
    weight_slice: WeightSlice, weights: Sequence[RoleWeight], *, per: Per
) -> list[WeightSlice]:
    """Return the matrices of a parameter by role, by head (``per``) and by expert of a stack."""
    around = (weight.view.deviation for weight in weights)
    matrix = replace(
        weight_slice,
        roles=frozenset(weight.role for weight in weights),
        deviation=next(filter(None, around), weight_slice.deviation),
    )
    parameter = weight_slice.parameter
    entries = {weight.view.expert for weight in weights}
    if parameter is None or entries == {None}:
        return _blocks(matrix, weights, per=per)
    if parameter.ndim != 3 or entries != set(range(len(parameter))):
        return [matrix]
    return [
        part
        for expert in range(len(parameter))
        for part in _blocks(
            replace(matrix, expert=expert, transposed=weights[0].view.transposed),
            [weight for weight in weights if weight.view.expert == expert],
            per=per,
        )
    ]


def _blocks(matrix: WeightSlice, weights: Sequence[RoleWeight], *, per: Per) -> list[WeightSlice]:
    """Return the blocks of rows of one matrix, or the matrix if its roles are not blocks."""
    by_role = [(w.role, (per and w.heads) or (w.view.spans,)) for w in weights]
    pieces = [(spans, role) for role, several in by_role for spans in several]
    if not pieces or matrix.parameter is None or any(spans is None for spans, _ in pieces):
        return [replace(matrix, roles=frozenset(weight.role for weight in weights))]
    roles: dict[range | None, set[str]] = {}
    for spans, role in pieces:
        roles.setdefault(block_of(spans or ()), set()).add(role)
    blocks = [rows for rows in roles if rows is not None]
    if len(blocks) < len(roles):
        return [replace(matrix, scattered=True)]
    transposed = weights[0].view.transposed
    left = set(range(matrix.parameter.shape[-1 if transposed else -2]))
    for rows in blocks:
        if not left.issuperset(rows):
            return [matrix]
        left.difference_update(rows)
    free = [range(*span) for span in spans_of(sorted(left))]
    return [
        replace(matrix, rows=rows, transposed=transposed, roles=frozenset(roles.get(rows, ())))
        for rows in sorted([*blocks, *free], key=lambda rows: (rows.start, rows.step))
    ]


def _asked(where: Where | None) -> list[Asked]:
    parts: list[Any] = list(where) if isinstance(where, (list, tuple)) else [where]
    if parts and all(isinstance(part, (str, type)) for part in parts):
        return parts
    raise ConfigError(
        f"where={where!r}: expected a role such as 'query', a name, an fnmatch pattern, a 're:' pattern,"
        " a module type, or a non-empty list of these; 'layers' is every matrix of the layers"
    )


def has_empty_weights(slices: Iterable[WeightSlice]) -> bool:
    """Whether a weight is on the meta device, so that it has no values."""
    parameters = (weight_slice.parameter for weight_slice in slices)
    return any(parameter is not None and parameter.is_meta for parameter in parameters)


def all_candidates(model: nn.Module) -> Iterator[WeightSlice]:
    """Yield every parameter of the model under each of its names, and every computed weight."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList):
            continue
        computed = sources_of(module)
        hidden = {name for names in computed.values() for name in names}
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in hidden:
                view = WeightView(path, module, name)
                differs = layer_deviation(view) if is_called(model, path) else None
                stored = name != "weight" or is_stored(view)
                part = WeightSlice(path, name, module, parameter if stored else None)
                yield replace(part, deviation=None if differs is None else differs.text)
        is_packed = "weight" not in computed and callable(getattr(module, "weight", None))
        for name in (*computed, *(["weight"] if is_packed else [])):
            yield WeightSlice(path, name, module, None)


def _matching(asked: Asked, candidates: list[WeightSlice]) -> set[int]:
    """Return the ids of the matching candidates."""
    main = [part for part in candidates if part.is_main_weight]
    if isinstance(asked, type):
        return {id(part) for part in main if isinstance(part.module, asked)}
    # Parameter names only if no module path matches, or "layers.0*" would include biases.
    by_path = {id(part) for part in main if _names(asked, part.module_path, part.layer_path)}
    named = (part for part in candidates if _names(asked, part.parameter_name, part.label))
    return by_path or set(map(id, named))


def _names(pattern: str, *names: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return any(re.fullmatch(pattern.removeprefix("re:"), name) for name in names)
        except re.error as error:
            raise ConfigError(f"where={pattern!r} is not a regular expression: {error}") from error
    # The leading dot lets "*.q_proj" also match a top-level module "q_proj". `pattern in names` is
    # for names of parts, whose brackets are not meant as a pattern.
    forms = [form for name in names for form in (name, f".{name}")]
    return pattern in names or any(fnmatch.fnmatchcase(form, pattern) for form in forms)


def _no_match(part: Asked, candidates: list[WeightSlice]) -> str:
    matrices = [weight_slice for weight_slice in candidates if weight_slice.is_main_weight]
    if isinstance(part, str):
        paths = [weight_slice.module_path for weight_slice in matrices]
        near = nearest_names(part.removeprefix("re:").lstrip("*."), [*paths, *ROLE_NAMES, LAYERS])
        return (
            f"where={part!r} is no role, and matches no module with a weight and no parameter;"
            f" nearest: {', '.join(near)}"
        )
    classes = sorted({type(weight_slice.module).__name__ for weight_slice in matrices})
    kinds = ", ".join(classes) or "none"
    return f"where: no module with a weight is a {part.__name__}; types with one: {kinds}"
