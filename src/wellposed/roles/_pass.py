"""Find attention calls and feed-forward networks in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from wellposed.errors import ConfigError
from wellposed.hooks import (
    call_model,
    eager_calls,
    is_tracked,
    observing_paused,
    own_batch,
    quiet_run,
    without_backward_hooks,
)
from wellposed.interrupts import undoing
from wellposed.roles._adapters import without_adapters
from wellposed.roles._check import Claim, Replay, contradictions, moves_of
from wellposed.roles._reader import Incomplete, Reader
from wellposed.roles._record import Attention, Product, Record
from wellposed.roles._roles import (
    AttentionRole,
    EmbeddingRole,
    FeedForwardRole,
    Part,
    Roles,
    key_of,
    once,
)
from wellposed.roles._stand_ins import stand_in_problem
from wellposed.roles._trace import Tracer
from wellposed.roles._views import WeightView

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class Trace:
    """Result of one pass: roles, calls with missing weights, and the record."""

    roles: Roles
    incomplete: Incomplete
    record: Record
    claims: Sequence[Claim]
    forced: bool
    refused: Sequence[tuple[Part, str]] = ()
    """Parts of the pass that its check contradicts, and why."""
    convolved: Sequence[tuple[WeightView, WeightView]] = ()
    """Two weights with a convolution between them."""
    unchecked: str = "check=False"
    """Why the pass was not checked; empty if it was."""

    def reached(self, parameter: Tensor) -> bool:
        """Return whether the pass read a parameter."""
        return parameter.untyped_storage().data_ptr() in self.record.used


def trace(model: nn.Module, batch: Any = None, *, check: bool = True) -> Trace | str:
    """Return the roles that one pass shows (``check``: two more passes), or why it cannot run."""
    inner = getattr(model, "_orig_mod", model)  # a compiled model keeps the original here
    if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        inner = inner.module

    problem = _problem(model)
    if problem:
        return problem

    try:
        batch = own_batch(inner) if batch is None else batch
    except (AttributeError, TypeError) as error:
        return f"no batch was given, and none can be made from its configuration ({error})"

    if batch is None:
        return "no batch was given"
    traced = _pass(model, inner, batch, forced=False)
    if traced.record.switched:
        second = _pass(model, inner, batch, forced=True)
        counts = [
            len(item.roles.attention) + len(item.roles.feedforward) for item in (traced, second)
        ]
        traced = second if counts[1] > counts[0] else traced

    return _checked(model, inner, batch, traced) if check else traced


def _problem(model: nn.Module) -> str:
    """Return why a model cannot run a pass; "" if it can."""
    weights = [*model.parameters(), *model.buffers()]
    if any(item.is_meta for item in weights):
        return "weights are on the meta device"
    if is_tracked():
        return (
            "a mode that follows calls of modules is active; call find_roles outside CommDebugMode"
        )
    problem = stand_in_problem(model)
    if problem:
        return problem
    kinds = {type(item).__name__ for item in weights if type(item) not in _PLAIN}
    return f"weights are {', '.join(sorted(kinds))}, not plain tensors" if kinds else ""


@contextmanager
def _running(model: nn.Module) -> Iterator[None]:
    quiet = quiet_run(model)
    plain = without_adapters(model)
    grad = torch.enable_grad()
    backward = without_backward_hooks(model)
    with observing_paused(), quiet, plain, backward, grad, eager_calls():
        yield


def _run(inner: nn.Module, batch: Any, tracer: Tracer) -> list[Tensor]:
    before = register_module_forward_pre_hook
    after = register_module_forward_hook
    marked = tree_map_only(Tensor, tracer.mark_input, batch)
    with undoing() as undo:
        undo.hook(before, tracer.entered)
        undo.hook(after, tracer.left)
        undo.later(_left, tracer)
        tracer.__enter__()
        output = call_model(inner, marked)
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _left(tracer: Tracer) -> None:
    # It is there twice if an interrupt came inside its own handler.
    while any(mode is tracer for mode in _get_current_function_mode_stack()):
        tracer.__exit__(None, None, None)


def _pass(model: nn.Module, inner: nn.Module, batch: Any, *, forced: bool) -> Trace:
    tracer = Tracer(model, forced=forced)
    record = tracer.record
    with _running(model):
        reader = Reader(model, record, _run(inner, batch, tracer))
        claims = [*map(reader.attention, record.of_kind(Attention))]
        claims += map(reader.feedforward, record.of_kind(Product))
        every = model.named_modules(remove_duplicate=False)
        alike = [(path, module, record.alike.get(module)) for path, module in every]
        norms = [path for path, m, like in alike if like is not None and _ignores_scale(m, like)]

    norms = [path for path in norms if not any(n.startswith(f"{path}.") for n in norms)]
    claims = [claim for claim in claims if claim is not None]
    parts = once(part for claim in claims for part in claim.parts)
    attention = tuple(part for part in parts if isinstance(part, AttentionRole))
    networks = tuple(part for part in parts if isinstance(part, FeedForwardRole))
    widths = {role.query.shape[1] for role in attention} | {role.up.shape[1] for role in networks}
    tables = record.tables.values()
    inline = (path for path, module in model.named_modules() if module in record.inline_norms)
    roles = Roles(
        attention,
        networks,
        tuple(
            EmbeddingRole(view.owner_path, kind, view)
            for view, kind in tables
            if kind == "token" or view.shape[1] in widths
        ),
        norms=tuple(norms),
        inline_norms=tuple(path for path in inline if path not in norms),
        not_added=tuple(reader.not_added),
    )
    convolved = reader.convolved

    return Trace(roles, reader.incomplete, record, claims, forced, convolved=convolved)


def _checked(model: nn.Module, inner: nn.Module, batch: Any, traced: Trace) -> Trace:
    """Return a trace without the parts that two more passes contradict."""
    moves = moves_of(traced.record, traced.claims)
    replays: list[Record] = []
    for odd in (False, True):
        replay = Replay(model, traced.record, moves, odd=odd, forced=traced.forced)
        try:
            with _running(model):
                _run(inner, batch, replay)
        except ConfigError as error:
            return replace(traced, unchecked=f"it fails with moved rows: {error}")
        if replay.diverged or len(replay.record.cuts) != len(traced.record.cuts):
            return replace(traced, unchecked="two passes on one batch differ")
        replays.append(replay.record)

    if not all(claim.last.leaf.isfinite().all() for claim in traced.claims):
        return replace(traced, unchecked="on this batch numbers are not finite")
    refused: list[tuple[Part, str]] = []
    for claim in traced.claims:
        problem = "; ".join(contradictions(claim, traced.record, replays))
        refused += [(part, problem) for part in claim.parts if problem]

    refused_keys = {key_of(part) for part, _ in refused}
    roles = replace(
        traced.roles,
        attention=tuple(
            part for part in traced.roles.attention if key_of(part) not in refused_keys
        ),
        feedforward=tuple(
            part for part in traced.roles.feedforward if key_of(part) not in refused_keys
        ),
    )

    return replace(traced, roles=roles, refused=refused, unchecked="")


@torch.no_grad()
def _ignores_scale(module: nn.Module, like: Tensor) -> bool:
    """Return whether f(2x) = f(x) and f(-x) differs, as for norms."""
    # large, so that eps has no effect; every second one small, where activations bend
    inputs = 30 * torch.randn_like(like)
    inputs[..., ::2] *= 0.01
    once, twice, turned = (module(scale * inputs) for scale in (1, 2, -1))
    limit = 0.01 * once.abs().max()
    return bool((once - twice).abs().max() <= limit < (once - turned).abs().max())
