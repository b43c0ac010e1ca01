"""Decide how every matrix of a model is initialised, do it, and report it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.call_checks import say_moves
from wellposed.errors import ConfigError, RoleNotFoundError, listed, nearest_names
from wellposed.hooks import class_name, is_fsdp_module
from wellposed.initialize._norms import matches, norms_of
from wellposed.interrupts import Undo
from wellposed.linalg import is_sharded
from wellposed.roles import (
    AttentionRole,
    FeedForwardRole,
    Roles,
    Verb,
    WeightView,
    batch_advice,
    heads_advice,
    is_table,
    is_transposed,
    split_path,
)
from wellposed.text_table import aligned, format_number
from wellposed.zero_weights import is_copied


@dataclass(frozen=True)
class InitializedWeight:
    """One weight: its role, its factor, and its size before and after."""

    name: str
    """Full dotted name of the parameter."""
    role: str
    """Role as in `find_roles`, or ``embedding``, ``output_embedding`` or ``other``."""
    stack: str | None
    """encoder, decoder, or None outside the layers."""
    layer: int | None
    shape: tuple[int, int]
    factor: float
    """Factor on the drawn weight; 1 if it was left alone or only drawn."""
    drawn: bool
    """Whether new numbers were drawn; a weight that ``leave`` names is left alone, bit for bit."""
    std_found: float
    """Standard deviation in the model as it came."""
    std_before: float
    """Standard deviation of the draw, before the factor."""
    std_after: float
    """Standard deviation now."""
    moved: float | None = None
    """`|W' - W|_F / |W|_F` of a weight that was loaded from a checkpoint; None of all others."""


@dataclass(frozen=True)
class InitializationReport:
    """Every matrix of the model; ``print`` it for a table."""

    title: str
    rows: tuple[InitializedWeight, ...]
    norms_removed: tuple[str, ...] = ()
    """Dotted paths of the norms that were taken out."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factor by what it scales: encoder, decoder, embeddings, ..."""
    mu: float | None = None
    """Of `dt_fixup_`: the largest token norm that entered the new layers; the factor's mu."""
    tokens: int = 0
    """Of `dt_fixup_`: tokens measured."""

    def table(self) -> str:
        """Return the report as aligned text, one weight to a line."""
        stds = ("std found", "std before", "std after")
        head = ("weight", "role", "shape", "factor", *stds)
        body = []
        for row in self.rows:
            factor = f"{row.factor:.6g}" if row.drawn else "kept"
            sizes = row.std_found, row.std_before, row.std_after
            shape = "x".join(map(str, row.shape))
            body.append((row.name, row.role, shape, factor, *map(format_number, sizes)))
        return "\n".join([*self._lines(), aligned([head, *body], "llr")])

    def _lines(self) -> list[str]:
        lines = [self.title]
        if self.factors:
            named = (f"{name} {value:.6g}" for name, value in self.factors.items())
            lines.append(f"factors: {', '.join(named)}")
        undrawn = [row.role for row in self.rows if not row.drawn]
        which = f" ({', '.join(dict.fromkeys(undrawn))})" if undrawn else ""
        drawn = len(self.rows) - len(undrawn)
        lines.append(f"drawn: {drawn} weights; left as they were: {len(undrawn)}{which}")
        lines.append(f"norms removed: {len(self.norms_removed)}")
        if self.mu is not None:
            lines.append(f"largest norm of {self.tokens} tokens: mu = {self.mu:.4g}")
        return lines

    def __str__(self) -> str:
        return self.table()

    @property
    def moved(self) -> dict[str, float]:
        """How far each weight that was loaded from a checkpoint moved."""
        return {row.name: row.moved for row in self.rows if row.moved is not None}

    def line(self) -> str:
        """Return a summary in one line."""
        drawn = sum(row.drawn for row in self.rows)
        did = f"{drawn} of {len(self.rows)} weights drawn, {len(self.norms_removed)} norms removed"
        return f"{self.title}: {did}"


@dataclass
class LayerStack:
    """A stack of layers: everything below one container, such as ``model.decoder.layers``."""

    path: str
    parts: list[AttentionRole | FeedForwardRole] = field(default_factory=list)
    """Its residual blocks: attention, then feed-forward."""

    @property
    def layers(self) -> int:
        """N: the number of self-attentions or of feed-forward networks, whichever is larger."""
        kinds = [getattr(part, "kind", "feedforward") for part in self.parts]
        return max(kinds.count("self"), kinds.count("feedforward"))

    @property
    def has_cross_attention(self) -> bool:
        """Whether it reads another stack."""
        return any(getattr(part, "kind", None) == "cross" for part in self.parts)

    @property
    def stack(self) -> str:
        """decoder if any part of it is one, else encoder."""
        return "decoder" if any(part.stack == "decoder" for part in self.parts) else "encoder"

    @property
    def layer_paths(self) -> list[str]:
        """Dotted path of each layer, in order."""
        return list(dict.fromkeys(split_path(part.path)[1] for part in self.parts))

    def __str__(self) -> str:
        kind = "with cross-attention" if self.has_cross_attention else self.stack
        size = f"{self.layers} layers, {len(self.parts)} residual blocks"
        return f"{self.path or 'the model'}: {size}, {kind}"


def find_layer_stacks(roles: Roles) -> list[LayerStack]:
    """Return the stacks of layers of a model, in model order."""
    stacks: dict[str, LayerStack] = {}
    for part in (*roles.attention, *roles.feedforward):
        path = split_path(part.path)[0]
        stacks.setdefault(path, LayerStack(path)).parts.append(part)
    return list(stacks.values())


def check_blocks(model: nn.Module, roles: Roles) -> None:
    """Raise ConfigError for what a pass shows to be no stack of plain residual blocks."""
    paths = (part.path for part in roles.feedforward)
    numbered = (path for path in paths if path.rpartition(".")[2].isdigit())
    inner = Counter(path.rpartition(".")[0] for path in numbered if path != split_path(path)[1])
    problems = {
        "only some tokens go through an expert, so the size of a step is unknown; use a model"
        " without experts": [
            part.path
            for part in roles.feedforward
            if part.down.expert is not None or inner[part.path.rpartition(".")[0]] > 1
        ],
        "a gated feed-forward network is a product of three weights, for which the papers have no"
        " factor; use plain ones, or a model with norms": [
            part.path for part in roles.feedforward if part.gate is not None
        ],
        "these parts are added to nothing, so they are no residual blocks, for which the rule is": list(
            roles.not_added
        ),
        "these modules call a norm of torch in their own code, so it cannot be taken out": list(
            roles.inline_norms
        ),
    }
    for problem, paths in problems.items():
        if paths:
            raise ConfigError(f"{type(model).__name__}: {problem}:\n{listed(paths)}")


logger = logging.getLogger("wellposed.initialize")

Draw = Literal["xavier_uniform", "xavier_normal", "embedding", "given", "kept"]
UNSCALED_ROLES = ("query", "key")
SCALED_ROLES = ("value", "output", "feedforward_in", "feedforward_out")


@dataclass(frozen=True)
class Step:
    """One weight, how it is drawn, and the factor that follows."""

    role: str
    stack: str | None
    layer: int | None
    view: WeightView
    draw: Draw
    factor: float = 1.0
    padding_index: int | None = None
    values: Tensor | None = None
    """Numbers that were drawn already, (out, in)."""


def plan(
    model: nn.Module,
    roles: Roles,
    factors: Mapping[str, float],
    *,
    draw: Draw,
    embeddings: Mapping[str, float] | None,
    exclude: Sequence[str],
    path: str = "",
    verb: Verb,
) -> list[Step]:
    """Return one step for every matrix of ``model``, or raise; nothing is changed here. ``factors``
    are by path of a role; ``embeddings``, by encoder and decoder, None to keep tables."""
    check_not_sharded(model)
    _check_blocks_are_whole(verb, roles)
    steps = _layer_steps(roles, factors, draw)
    steps += _embedding_steps(model, roles, embeddings)
    steps += _head_steps(model, steps, roles, draw)
    steps = _leave_alone(model, roles, steps, exclude)
    check_writable(steps)
    # Norms, biases, single numbers and numbers of each head, which the attention itself has, need
    # no role.
    known = {id(step.view.parameter) for step in steps}
    norms = tuple(f"{path}." for path in norms_of(model, roles.norms))
    attention = {role.path for role in roles.attention}
    unmatched: list[str] = []
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        vector = parameter.ndim == 1 and parameter.numel() > 1
        gain = vector and "bias" not in last and owner not in attention
        left = id(parameter) in known or name.startswith(norms) or matches(name, exclude)
        if (gain or parameter.ndim >= 2) and not left:
            unmatched.append(f"{name} {tuple(parameter.shape)}")
    if unmatched:
        raise RoleNotFoundError(
            f"{verb.name}: {path or type(model).__name__}: {len(unmatched)} weights match no role, so the"
            f" rule does not say what to do with them:\n{listed(unmatched)}\nIf a vector scales a norm of"
            " another name, put torch.nn.Identity() in the norm's place; leave weights as they are with"
            " exclude='...' (roles, or shell-style patterns on parameter names); or find roles of"
            f" matrices. {batch_advice(verb, model, roles)}"
        )
    return steps


def _check_blocks_are_whole(verb: Verb, roles: Roles) -> None:
    """Raise for weights of attention or a network of which the rest, or the heads, are unknown."""
    parts = [
        f"{weight.role}: {weight.view.label}"
        for weight in roles.loose
        if weight.role in (*UNSCALED_ROLES, *SCALED_ROLES)
    ]
    if parts:
        raise RoleNotFoundError(
            f"{verb.name}: the factors are those of whole blocks, and these weights belong to none that"
            f" is known with its heads:\n{listed(parts)}\n{heads_advice(verb, roles)}"
        )


def _layer_steps(roles: Roles, factors: Mapping[str, float], draw: Draw) -> list[Step]:
    steps: dict[object, Step] = {}
    clashes: list[str] = []
    for weight in roles.weights():
        if weight.role in (*UNSCALED_ROLES, *SCALED_ROLES):
            factor = factors[weight.path] if weight.role in SCALED_ROLES else 1.0
            step = Step(weight.role, weight.stack, weight.layer, weight.view, draw, factor)
            first = steps.setdefault(weight.view.key, step)
            if first.factor != step.factor:
                clashes.append(f"{weight.view.parameter_name}: {first.role} and {step.role}")
    if clashes:
        raise ConfigError("one weight plays two roles with different factors:\n" + listed(clashes))
    return list(steps.values())


def _embedding_steps(
    model: nn.Module, roles: Roles, factors: Mapping[str, float] | None
) -> list[Step]:
    """Return one step for each table; tables outside the decoder get the encoder's factor."""
    known = [(id(table.weight.parameter), table) for table in roles.embeddings]
    tables = {key: (f"{table.kind}_embedding", table.weight) for key, table in known}
    places = {key: [table.path] for key, table in known}
    for path, module in model.named_modules(remove_duplicate=False):
        if is_table(module):
            key = id(module.weight)
            tables.setdefault(key, ("embedding", WeightView(path, module, "weight")))
            places.setdefault(key, []).append(path)
    steps: list[Step] = []
    for key, (role, view) in tables.items():
        step = Step(role, None, None, view, "kept")
        if factors is not None and view.parameter.requires_grad:
            inner = all("decoder" in name for name in places[key])
            factor = factors["decoder" if inner and "decoder" in factors else "encoder"]
            padding = getattr(view.owner, "padding_idx", None)
            step = replace(step, draw="embedding", factor=factor, padding_index=padding)
        steps.append(step)
    return steps


def _head_steps(model: nn.Module, done: Sequence[Step], roles: Roles, draw: Draw) -> list[Step]:
    """Return steps of linear layers outside the stacks; an untied output layer is N(0, 1/d)."""
    known = {id(step.view.parameter) for step in done}
    paths = (path for stack in find_layer_stacks(roles) for path in stack.layer_paths)
    inside = tuple(f"{path}." if path else "" for path in paths)
    getter: Any = getattr(model, "get_output_embeddings", None)
    output = getter() if callable(getter) else None
    steps: list[Step] = []
    for path, module in model.named_modules():
        transposed = is_transposed(module)
        linear = isinstance(module, nn.Linear) or transposed
        if not linear or id(module.weight) in known or f"{path}.".startswith(inside):
            continue
        known.add(id(module.weight))
        view = WeightView(path, module, "weight", transposed=transposed)
        drawn: Draw = "embedding" if module is output and draw == "xavier_uniform" else draw
        role = "output_embedding" if module is output else "other"
        steps.append(Step(role, None, None, view, drawn))
    return steps


def _leave_alone(
    model: nn.Module, roles: Roles, steps: Sequence[Step], exclude: Sequence[str]
) -> list[Step]:
    """Return the steps, with those named in ``exclude`` neither drawn nor scaled."""
    # A weight may have several names and roles; any of them matches.
    named = list(model.named_parameters(remove_duplicate=False))
    played = [(weight.role, weight.view.key) for weight in roles.weights()]
    played += [(step.role, step.view.key) for step in steps]
    names = [*(name for name, _ in named), *norms_of(model, roles.norms)]
    known = [*dict.fromkeys(role for role, _ in played), *names]
    unknown = [
        f"{entry!r}; nearest: {', '.join(nearest_names(entry, known))}"
        for entry in exclude
        if entry not in known and not any(matches(name, [entry]) for name in names)
    ]
    if unknown:
        expected = "expected roles, or patterns on names of parameters and norms, received"
        raise ConfigError(f"exclude: {expected}\n{listed(unknown)}")
    left = {id(parameter) for name, parameter in named if matches(name, exclude)}
    left |= {key for role, key in played if role in exclude}
    return [
        replace(step, draw="kept", factor=1.0)
        if left & {step.view.key, id(step.view.parameter)}
        else step
        for step in steps
    ]


def check_not_sharded(model: nn.Module) -> None:
    """Raise for FSDP2 and tensor parallelism: a rank has shards, or a copy that the next gather replaces."""
    sharded = [
        path or class_name(part)
        for path, part in model.named_modules()
        if is_fsdp_module(part) or any(map(is_sharded, part.parameters(recurse=False)))
    ]
    if sharded:
        raise ConfigError(
            "weights in shards cannot be drawn; initialise the model before fully_shard or"
            f" parallelize_module:\n{listed(sharded)}"
        )
    if copied := [name for name, weight in model.named_parameters() if is_copied(weight)]:
        raise ConfigError(
            "DeepSpeed ZeRO steps copies of these weights, which would replace drawn ones;"
            f" initialise the model before deepspeed.initialize:\n{listed(copied)}"
        )


def check_writable(steps: Sequence[Step]) -> None:
    views = [step.view for step in steps if step.draw != "kept"]
    problems: dict[str, Callable[[WeightView], bool]] = {
        "layers that compute something else than these weights cannot be drawn; remove the hook, the"
        " replaced forward or the wrapper first": lambda view: view.deviation is not None,
        "parametrized, hooked (prune, weight_norm, spectral_norm) and adapted weights cannot be drawn;"
        " initialise before these are put on": lambda view: view.is_computed,
        "frozen weights (requires_grad=False) would keep these random numbers for good; unfreeze"
        " them, or give the new layers to dt_fixup_": lambda view: not view.parameter.requires_grad,
        "weights on the meta device hold no numbers; materialise the model first": (
            lambda view: view.parameter.is_meta
        ),
    }
    for problem, is_so in problems.items():
        names = [view.parameter_name for view in views if is_so(view)]
        if names:
            raise ConfigError(f"{problem}:\n{listed(names)}")


@torch.no_grad()
def carry_out(
    steps: Sequence[Step], undo: Undo, generator: torch.Generator | None = None
) -> list[InitializedWeight]:
    """Draw and scale every weight, in place, and return one row for each; ``undo`` restores them."""
    rows: list[InitializedWeight] = []
    for step in steps:
        weight = step.view.tensor()
        padding = step.padding_index
        original = before = after = _std(weight, padding)
        moved = None
        is_drawn = step.draw != "kept"
        if is_drawn:
            values = _drawn(step, weight, generator)
            before = _std(values, padding)
            values = values.mul_(step.factor).to(weight)
            after = _std(values, padding)
            # from_pretrained marks weights that came from a checkpoint.
            if getattr(step.view.parameter, "_is_hf_initialized", False):
                moved = float((values - weight).norm() / weight.norm())
            undo.later(_restore, weight, weight.clone())
            weight.copy_(values)
        row = InitializedWeight(
            name=step.view.parameter_name,
            role=step.role,
            stack=step.stack,
            layer=step.layer,
            shape=step.view.shape,
            factor=step.factor,
            drawn=is_drawn,
            std_found=original,
            std_before=before,
            std_after=after,
            moved=moved,
        )
        rows.append(row)
    return rows


@torch.no_grad()
def _restore(weight: Tensor, values: Tensor) -> None:
    weight.copy_(values)


def reported(report: InitializationReport) -> InitializationReport:
    """Log a report and return it; weights with ``moved`` came from a checkpoint."""
    if report.moved:
        say_moves(logger, report.line(), report.moved)
    else:
        logger.info("%s", report.line())
    return report


def _drawn(step: Step, weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return fresh numbers (out, in) before the factor, in float32 at least."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if step.values is not None:
        return step.values.to(weight.device, dtype)
    device = weight.device if generator is None else generator.device
    values = torch.empty(step.view.shape, dtype=dtype, device=device)
    if step.draw == "embedding":
        nn.init.normal_(values, std=1.0 / math.sqrt(values.shape[1]), generator=generator)
    else:
        getattr(nn.init, f"{step.draw}_")(values, generator=generator)
    if step.padding_index is not None:
        values[step.padding_index] = 0.0
    return values.to(weight.device)


def _std(weight: Tensor, padding_index: int | None) -> float:
    values = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    if padding_index is not None and values.shape[0] > 1:
        rows = torch.arange(values.shape[0], device=values.device)
        values = values[rows != padding_index % values.shape[0]]
    return values.std(correction=0).item()
