"""`constrain_`: check everything, move weights to the nearest of their set, install the hooks."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from wellposed.call_checks import checked_arguments, say_moves
from wellposed.constrain._handle import Constraint, handles_of
from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._plan import planned
from wellposed.constrain._precision import half_warning
from wellposed.constrain._report import ConstraintReport
from wellposed.constrain._select import (
    BY_HEAD,
    CONSTRAIN,
    WeightSlice,
    Where,
    roles_or_error,
    select_weights,
    unwrap_model,
)
from wellposed.constrain._set import SETS, TOLERANCES, MatrixSet, SetOptions, ZeroColumns
from wellposed.constrain._start import start_weights
from wellposed.constrain._trial import behaviour_of, overwrites
from wellposed.constrain._wholes import Wholes
from wellposed.constrain.logits import (
    Logits,
    attention_of,
    check_not_compiled,
    head_rows,
    held_logits,
)
from wellposed.errors import ConfigError, ConvergenceError, ShapeError, listed, shortened
from wellposed.interrupts import run_all
from wellposed.linalg import cut_of, is_sharded
from wellposed.options import Positive
from wellposed.removed_names import removed_keywords
from wellposed.roles import is_table, is_transposed, spans_of, split_path

logger = logging.getLogger(__name__)

SETS.register("logits")(Logits)

Set: TypeAlias = Literal["orthogonal", "spectral", "columns", "logits"] | str
"""One of these, or a name registered in `SETS`."""
_NO_STEPS = frozenset({"LBFGS", "SparseAdam"})


@removed_keywords(roles="where")
@checked_arguments
def constrain_(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    where: Where | None = None,
    *,
    to: Set = "orthogonal",
    per: Literal["head"] | None = None,
    batch: Any = None,
    bound: Positive | str | None = None,
    gain: Positive | Literal["fit"] | None = None,
    embeddings: Literal["refuse", "fit"] = "refuse",
    batched: bool | None = None,
    dry_run: bool = False,
) -> Constraint:
    """Keep the chosen weights in a set through every ``optimizer.step()``.

    Status: by set.
    - ``"orthogonal"``: ``W^T W = gain^2 I`` (``W W^T`` if wide), to tolerance: the largest entry of
      ``|W^T W / gain^2 - I|`` is at most 1e-5 in float32 (measured: singular values within
      1e-4 at width 256), 1e-11 in float64, and as stored 8e-3 in bfloat16, 1e-3 in float16.
    - ``"spectral"``: ``|W|_2 <= bound``, or ``X sqrt(fan_out / fan_in)`` for ``bound="rms:X"``.
      Certified as stored, in every dtype.
    - ``"columns"``: ``|W e_j| = bound`` for columns of W (out, in) and embedding vectors, up to
      rounding. Nothing is claimed of ``|W|_2``.
    - ``"logits"``: attention logits at most ``bound``, by QK-clip. Exact for the batch that was
      seen with the weights before the step, empirical for others (docs/howto/logits.md).
    Source: Absil et al. 2008, Edelman et al. 1998; Yang et al. 2023 (rms); Kimi Team 2025 (logits).
    Details: docs/theory/steps.md.

    Weights stay plain parameters; hooks retract them after each step. Attaching moves each to the
    nearest in its set. Orthogonal and column weights do not decay. A weight edited between steps is
    back in its set after its next step with a gradient.

    Args:
        model: Any module. With FSDP2 or tensor parallelism, call after sharding.
        optimizer: The optimizer of the weights, or several; wrappers (Accelerate) are unwrapped.
        where: Roles of `find_roles`, such as ``("query", "key")``; names, fnmatch patterns or
            ``"re:"`` patterns of modules, else of parameters; or module types. Parts of fused
            weights, and experts, are separate. The default of ``"spectral"``, ``"layers"``, is all
            matrices of attention and feed-forward; that of ``"logits"``, all queries.
        to: The set.
        per: ``"head"``: each head alone; needed if roles interleave (GPT-NeoX, Bloom, Falcon).
        batch: Model input for `find_roles` and logits, if the model's config does not describe it.
        bound: Largest singular value or logit (default 100, others 1), or length; above 0.
        gain: Singular value of orthogonal weights, or ``"fit"``: each weight's mean singular value.
            The default is ``"fit"`` for pretrained Hugging Face models, else 1.
        embeddings: Refuse (``"refuse"``) those with more vectors than dimensions, or ``"fit"``:
            Each is orthogonal on its smaller side, with its mean singular value as gain.
        batched: Use one product for all weights of one shape. None: not for large ones on a CPU.
        dry_run: Print the moves and the plan of a step (`wellposed.plan.Plan`); change nothing.

    Returns:
        `Constraint` with ``.report`` (how far weights moved), ``.error()`` and ``.remove()``.

    Raises:
        RoleNotFoundError: ``where`` matches nothing.
        ShapeError: No matrix or stack of experts, or an embedding of more vectors than dimensions.
        ConfigError: A weight, optimizer or option that cannot be used. From ``optimizer.step``: a
            weight was replaced, or an orthogonal one changed its dtype.
        ConvergenceError: A weight, or later a step, is not finite.

    Cost: a step adds 3 to 6 products of its size for a square orthogonal weight, and keeps a copy
    of it; 2 to 6, at most 35, for a spectral one. (A matmul, forward and backward, is 3.)
    When not to use: if a weight must shrink or grow freely (use `wellposed.OrthogonalityPenalty`),
    or the optimizer keeps its own copy of the weights (DeepSpeed ZeRO, schedule-free and
    Lookahead are refused).

    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> handle = constrain_(model, optimizer, where="weight")
    >>> model(torch.randn(4, 8)).square().sum().backward()
    >>> optimizer.step()
    >>> handle.error().worst < 1e-5
    True
    """
    options = SetOptions(bound=bound, gain=gain, embeddings=embeddings)
    matrix_set = _set_for(to, options, others={"per": per, "batched": batched})
    if to == "logits":
        check_not_compiled(model)
        per = "head"
    is_default = to != "logits" and where is None and matrix_set.default_where is not None
    where = matrix_set.default_where if where is None else where
    model = unwrap_model(model, "constrain_")
    options = replace(options, is_pretrained=_is_pretrained(model))
    embedded = [module for module in model.modules() if is_table(module)]
    tables = {id(module.weight): module for module in embedded}
    verb = CONSTRAIN if per is None else BY_HEAD
    model_roles = roles_or_error(verb, model, batch)
    selected = select_weights(model, where, per=per, model_roles=model_roles, verb=verb)
    if matrix_set.reads_orientation(options):
        selected = [_oriented(weight_slice, tables) for weight_slice in selected]
    attention = attention_of(model_roles, selected) if to == "logits" else []
    if to == "logits":
        selected = [part.place for role in attention for part in head_rows(role)]
    slices = _merge_tied(model, selected)

    def refusal(weight_slice: WeightSlice) -> str | None:
        is_of_table = id(weight_slice.parameter) in tables
        return matrix_set.refusal(weight_slice, options, is_table=is_of_table)

    owners = _check(slices, _optimizers(optimizer), to, refusal)
    is_empty = dry_run and any(
        weight_slice.parameter.is_meta
        for weight_slice in slices
        if weight_slice.parameter is not None
    )
    if not is_empty:
        _check_values(slices, lambda zeros: matrix_set.refusal_of_zeros(zeros, options))

    weights: list[ConstrainedMatrix] = []
    for weight_slice, owner in zip(slices, owners, strict=True) if to != "logits" else ():
        is_of_table = id(weight_slice.parameter) in tables
        chosen = matrix_set.chosen(weight_slice, options, is_table=is_of_table)
        weights.append(ConstrainedMatrix(weight_slice, owner, chosen))
    if to == "logits":
        owner_of = dict(
            zip((weight_slice.parameter for weight_slice in slices), owners, strict=True)
        )
        largest = 100.0 if bound is None else bound
        assert not isinstance(largest, str)  # refused above
        weights += held_logits(attention, model, owner_of, largest, batch)
    handle = Constraint(model, weights, batched=batched)
    handle.check_decay(owners)
    return _begin(handle, to, model, is_default=is_default, is_empty=is_empty, dry_run=dry_run)


def _begin(
    handle: Constraint,
    to: Set,
    model: nn.Module,
    *,
    is_default: bool,
    is_empty: bool,
    dry_run: bool,
) -> Constraint:
    """Move the weights into their sets, install the hooks, return the handle: all, or nothing."""
    undos: list[Callable[[], None]] = []
    try:
        if not is_empty:
            rows = start_weights(handle.weights, dry_run=dry_run, undos=undos)
            handle.report = ConstraintReport(rows)
        summary = _summary(handle, to, model if is_default else None)
        if dry_run:
            _print_moves(summary, handle.report.moved)
            handle.plan = None if to == "logits" else planned(model, handle.weights, to).show()
        else:
            handle.attach()
            say_moves(logger, summary, handle.report.moved)
            warning = half_warning(handle.weights)
            if warning:
                logger.warning("%s", warning)
        return handle
    except BaseException:
        run_all(handle.detach, *undos)
        raise


def _summary(handle: Constraint, to: Set, model: nn.Module | None) -> str:
    """Return the line of the log; with the matrices of ``model`` that are not constrained."""
    summary = handle.report.summary(to) if handle.report.rows else ""
    if model is None:
        return summary
    slices = [part for weight in handle.weights for part in weight.slices]
    return f"{summary}: {_scope_of_default(model, slices)}"


def _scope_of_default(model: nn.Module, slices: Sequence[WeightSlice]) -> str:
    """Return which matrices are constrained by default, and the names of all others."""
    rows: dict[int, list[WeightSlice]] = {}
    for part in slices:
        rows.setdefault(id(part.parameter), []).append(part)
    layers = {split_path(part.module_path)[1] for part in slices}
    tables = {id(module.weight) for module in model.modules() if is_table(module)}

    inside: list[str] = []
    elsewhere: list[str] = []
    for name, parameter in model.named_parameters():
        free = (
            "" if parameter.ndim < 2 else _free_rows(name, parameter, rows.get(id(parameter), []))
        )
        if free:
            in_layer = any(f"{name}.".startswith(f"{path}.") for path in layers if path)
            in_root = "" in layers and id(parameter) not in tables
            (inside if in_layer or in_root else elsewhere).append(free)

    others = shortened(elsewhere) or "no others"
    if not inside:
        return f"every matrix of the layers; unconstrained: {others}"
    covered = "the matrices of the layers that play a role"
    return f"{covered}; unconstrained inside the layers: {shortened(inside)}; elsewhere: {others}"


def _free_rows(name: str, parameter: torch.Tensor, slices: Sequence[WeightSlice]) -> str:
    """Return the name of a parameter, with the rows that no place covers; empty if all are covered."""
    if not slices:
        return name
    if any(part.rows is None for part in slices):
        return ""
    count = parameter.shape[-1 if slices[0].transposed else -2]
    covered = {row for part in slices for row in part.rows or ()}
    left = spans_of(row for row in range(count) if row not in covered)
    return f"{name}[{', '.join(f'{a}:{b}' for a, b in left)}]" if left else ""


def _print_moves(summary: str, moved: Mapping[str, float]) -> None:
    lines = [f"{path}: would move by {part:.2g}\n" for path, part in moved.items()]
    sys.stdout.writelines([f"{summary}\n", *lines] if moved else [])


def _set_for(to: Set, options: SetOptions, others: Mapping[str, object]) -> type[MatrixSet]:
    """Return the kind of set; refuse unknown ones, and options of others."""
    matrix_set = SETS.get(to)
    foreign = [name for name in options.changed() if name not in matrix_set.options]
    foreign += [name for name, value in others.items() if value and to == "logits"]
    if foreign:
        raise ConfigError(
            f"constrain_: to={to!r} has no {', '.join(foreign)}; the size of the set is gain= for"
            " to='orthogonal', else bound="
        )
    if "bound" in matrix_set.options:
        matrix_set.check_bound(options.bound)
    return matrix_set


def _is_pretrained(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "_name_or_path", ""))


def _oriented(part: WeightSlice, tables: Mapping[int, nn.Embedding]) -> WeightSlice:
    """Orient a whole weight as (out, in), for sets that tell rows from columns."""
    if part.part:
        return part
    table = tables.get(id(part.parameter))
    padding = None if table is None else table.padding_idx
    flipped = table is not None or is_transposed(part.module)
    return replace(part, transposed=flipped, padding=padding)


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    entries = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [_unwrapped(entry) for entry in entries]


def _unwrapped(entry: Any) -> Optimizer:
    """Return the optimizer whose step is constrained, or refuse it and its wrappers."""
    wrappers: list[Any] = []
    while isinstance(getattr(entry, "optimizer", None), Optimizer):
        wrappers.append(entry)
        entry = entry.optimizer
    name = type(entry).__name__
    if not isinstance(entry, Optimizer) or not hasattr(entry, "_optimizer_step_pre_hooks"):
        raise ConfigError(
            f"constrain_: expected a torch.optim.Optimizer, with step hooks, received {name}"
        )
    if name in _NO_STEPS:
        problem = f"{name} does not take one step from one gradient"
        raise ConfigError(f"constrain_: {problem}; use AdamW, SGD, Adafactor or Muon")
    if behaviour_of(entry).swaps:
        raise ConfigError(
            f"constrain_: {name}.eval() puts another copy of the weights into the model, which would"
            " not be in the set; use AdamW, SGD, Adafactor or Muon"
        )
    for wrapper in wrappers:
        kind = type(wrapper).__name__
        writes = overwrites(wrapper, entry)
        if writes:
            raise ConfigError(
                f"constrain_: {kind} writes other weights after the step of {name}, which would not"
                f" be in the set; train with {name} itself"
            )
        if writes is None:
            logger.warning(
                "constrain_: %s could not be tried out; if it changes weights after the step of %s,"
                " they leave the set: compare handle.error() after its step",
                kind,
                name,
            )
    return entry


def _merge_tied(model: nn.Module, chosen: list[WeightSlice]) -> list[WeightSlice]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    merged: dict[object, WeightSlice] = {}
    for index, part in enumerate(chosen):
        rows = (id(part.parameter), part.expert, part.rows)
        key = index if part.parameter is None else rows
        name_here = part.parameter_name
        known = names.get(id(part.parameter), [])
        others = tuple(name for name in known if name != name_here)
        if others and key not in merged:
            logger.warning("%s is tied to %s; constrained once", name_here, ", ".join(others))
        merged.setdefault(key, replace(part, also=others))
    return list(merged.values())


def _check(
    slices: Sequence[WeightSlice],
    optimizers: list[Optimizer],
    to: Set,
    refusal: Callable[[WeightSlice], str | None],
) -> list[Optimizer]:
    """Return each weight's optimizer, or raise with every weight that cannot be constrained."""
    owners: dict[int, list[Optimizer]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), []).append(optimizer)
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    wrong: list[tuple[str, ConfigError | ShapeError]] = []
    for part in slices:
        holders = owners.get(id(part.parameter), [])
        problems = _problems(part, holders, kinds, refusal)
        wrong += [(part.label, problem) for problem in islice(problems, 1)]
    if wrong:
        wrong.sort(key=lambda pair: isinstance(pair[1], ConfigError))  # shapes first
        lines = listed([f"{name}: {problem}" for name, problem in wrong])
        raise type(wrong[-1][1])(f"constrain_ cannot keep these weights in the set {to}:\n{lines}")
    return [owners[id(part.parameter)][0] for part in slices]


def _problems(
    part: WeightSlice,
    holders: list[Optimizer],
    kinds: str,
    refusal: Callable[[WeightSlice], str | None],
) -> Iterator[ConfigError | ShapeError]:
    """Yield each reason why a weight cannot be constrained; a later one assumes the earlier."""
    parameter = part.parameter
    if parameter is None:
        why = "computes or packs its weight (a parametrisation, a hook, or quantised)"
        yield ConfigError(f"{type(part.module).__name__} {why}; a plain nn.Parameter is needed")
        return
    if part.deviation is not None:
        yield ConfigError(
            f"the layer computes something else, as {part.deviation}; remove that, merge the"
            " adapter into the weight, or name the adapter's factors in where="
        )
    if parameter.dtype not in TOLERANCES or parameter.is_quantized:
        kind = f"{type(parameter).__name__} of {parameter.dtype}, quantised or not floating"
        yield ConfigError(f"{kind}; expected float32, float64, bfloat16 or float16")
    if parameter.dtype == torch.float16 and parameter.device.type == "cpu":
        yield ConfigError("float16 on a CPU; load it in float32 or bfloat16, or move it to a GPU")
    yield from _problems_of_shape(part, tuple(parameter.shape), refusal)
    adapted = ", or name its adapter's factors, as in where='*.lora_A.*'"
    if not parameter.requires_grad:
        more = adapted if part.is_adapted else ""
        yield ConfigError(f"frozen (requires_grad is False); unfreeze it or leave it out{more}")
    if part.is_adapted:
        yield ConfigError(f"the layer adds an adapter to it; merge and unload that{adapted}")
    if is_sharded(parameter) and part.part and cut_of(parameter) is None:
        yield ConfigError(
            f"a part of a weight that is cut along several dimensions ({parameter.placements}); cut it"
            " by fully_shard or by tensor parallelism alone, or leave it out"
        )
    if len(holders) != 1:
        yield ConfigError(
            f"{'owned by more than one' if holders else 'not owned by the'} given optimizer ({kinds});"
            " build the optimizer from the parameters of this very model, after moving, sharding or"
            " tying it"
        )
    if any(handle.holds(part) for handle in handles_of(holders[0])):
        yield ConfigError("constrained already; call remove() on the first handle")


def _problems_of_shape(
    part: WeightSlice, shape: tuple[int, ...], refusal: Callable[[WeightSlice], str | None]
) -> Iterator[ShapeError]:
    if len(shape) != 2 + (part.expert is not None) or 0 in shape:
        stack = "; a pass over batch= shows experts in a stack" if len(shape) == 3 else ""
        flat = "; FSDP1 flattens parameters, use fully_shard (FSDP2)"
        yield ShapeError(
            f"shape {shape}, expected a matrix (rows, columns); narrow where=, or give module"
            f" types{flat if '_flat_param' in part.name else stack}"
        )
    why = refusal(part)
    if why is not None:
        yield ShapeError(why)


def _check_values(
    slices: Sequence[WeightSlice], refusal: Callable[[ZeroColumns], str | None]
) -> None:
    """Refuse values without a nearest matrix in the set: not finite, zero columns, or all zero."""
    empty: list[str] = []
    broken: list[str] = []
    stored = [(part.label, part.parameter) for part in slices]
    meta = [label for label, parameter in stored if parameter is not None and parameter.is_meta]
    if meta:
        problem = "constrain_: on the meta device, without values; load the weights first, or plan"
        raise ConfigError(f"{problem} with dry_run=True:\n{listed(meta)}")
    wholes = Wholes()
    for part in slices:
        assert part.parameter is not None  # _check raised for it
        value = wholes.of(part.parameter, part)
        zeros = value.eq(0).all(dim=0)
        if part.padding is not None:
            zeros[part.padding] = False
        counts = torch.stack((value.sum().float(), zeros.sum(), zeros.int().argmax()))
        total, lost, first = counts.tolist()
        # A finite sum proves all entries finite, at a tenth of the cost.
        if not math.isfinite(total) and (bad := int((~value.isfinite()).sum())):
            broken.append(f"{part.label}: {bad} of {value.numel()} entries")
        why = refusal(ZeroColumns(int(lost), first=int(first), columns=len(zeros)))
        if why is not None:
            empty.append(f"{part.label}: {why}")
    if broken:
        raise ConvergenceError(
            "constrain_: these weights contain NaN or infinity, so none in the set is nearest; load"
            f" an earlier checkpoint:\n{listed(broken)}"
        )
    if empty:
        raise ConfigError(
            "constrain_: these have no direction to keep; choose others (where='*.lora_A.*'), or use"
            f" to='spectral', which allows zero:\n{listed(empty)}"
        )
