"""`constrain_`: check everything first, project to the nearest orthogonal weights, put the hooks on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from wellposed.constrain._handle import Constraint, decay_error, handles_of, owns, reads_weight_size
from wellposed.constrain._report import ConstrainedWeight, ConstraintReport
from wellposed.constrain._select import Candidate, Where, select_weights, unwrap_model
from wellposed.constrain._weight import TOLERANCES, Weight
from wellposed.errors import ConfigError, ShapeError, listed
from wellposed.linalg import isometry_error, nearest_orthogonal
from wellposed.linalg.sharded import read, write_

logger = logging.getLogger(__name__)

_NO_STEPS = frozenset({"LBFGS", "SparseAdam"})


def constrain_(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    where: Where,
    *,
    gain: float | Literal["fit"] = 1.0,
    weight_decay: Literal["refuse", "ignore"] = "refuse",
    embeddings: Literal["refuse", "fit"] = "refuse",
    batched: bool | None = None,
    dry_run: bool = False,
) -> Constraint:
    """Keep ``W^T W = gain^2 I`` (``W W^T`` for wide W) for the chosen weights through every ``optimizer.step()``.

    Status: to tolerance: max |W^T W / gain^2 - I| <= 1e-5 in float32 and 1e-11 in float64; half weights are kept in
    float32 by the handle, and as stored are off by their own rounding, at most 2 u + u^2: 8e-3 in bfloat16 and 1e-3
    in float16 (u = 2^-8, 2^-11), reached where all entries of a column round the same way. A weight that is edited
    between steps (``load_state_dict``, ``copy_``, ``.data``) is back within the tolerance after the next step.

    The weights stay plain parameters. Hooks on the optimizer replace their gradients before the step and retract them
    after it. A square weight steps in Lie coordinates: the optimizer sees ``skew(W^T G)`` and its step A is taken as
    ``W (I + A + A^2/2 - (W^T W - I)/2)``, with a cubic term, a polish or the exponential when A is large; it stays on
    the component of its start. A tall or wide weight steps in the ambient space (projected gradient, polar
    retraction). This works with any optimizer that changes parameters by a step: AdamW, SGD, Adafactor, Muon. Gradient
    accumulation needs nothing; clipping sees the full gradient, before projection. Source: Absil, Mahony and Sepulchre
    2008 (retractions); Edelman, Arias and Smith 1998 (tangent spaces).

    Attaching moves each weight to the nearest such matrix (polar factor) and reports how far; weights already within
    tolerance are not touched, so a resumed run goes on from the same weights.

    Args:
        model: any module; DistributedDataParallel and ``torch.compile`` wrappers are looked through. With FSDP2, call
            after ``fully_shard``: each matrix is gathered (two all-gathers before the step, two after it), worked on by
            every rank and cut again, one matrix at a time.
        optimizer: the optimizer that owns the weights, or several (Muon beside AdamW). Wrappers with an ``.optimizer``
            attribute (Accelerate) are looked through.
        where: a dotted name, an fnmatch pattern (``"*.q_proj"``) or ``"re:"`` and a regular expression, matched against
            module paths (meaning their ``.weight``) and, if none fits, full parameter names; a module type; a function
            (dotted name, module) -> bool; or a list of names and types, each of which must match.
        gain: the common singular value, above 0, or ``"fit"`` for each weight's mean singular value, which moves it
            least.
        weight_decay: ``"refuse"`` raises when a chosen weight has decay; ``"ignore"`` leaves the decay out of its steps
            exactly (the weight is zero while the optimizer steps, so the optimizer may not depend on its size).
        embeddings: ``"refuse"`` raises where an embedding has more vectors than dimensions, which cannot be
            orthonormal; ``"fit"`` keeps every chosen embedding orthogonal on its smaller side, so that a tall one has
            orthogonal columns, ``E^T E = g^2 I``, and no vector longer than g. In place of ``gain``, g is the
            embedding's mean singular value at the start, to three digits. It steps by its own gradient, not the
            projected one, so that tokens outside the batch move by the retraction alone.
        batched: work on all weights of one shape in one batched product; None does so on every device but the CPU,
            where a loop over reused buffers is faster.
        dry_run: print the plan, change nothing, and return an inactive handle.

    Returns:
        `Constraint` with ``.report`` (how far each weight moved), ``.error()``, ``.remove()``.

    Raises:
        RoleNotFoundError: ``where`` matches nothing; near names are listed.
        ShapeError: a chosen parameter is no matrix, or is an embedding with more vectors than dimensions.
        ConfigError: a parameter that no (or more than one) given optimizer owns, that is frozen, quantised,
            parametrised, constrained already, float16 on a CPU, or decayed; an optimizer without steps.
        ConvergenceError: a weight is not finite; later, from ``optimizer.step()``, a step that is not finite.

    Cost: a step adds 3 products of a square weight's size while its steps are small (up to about 0.1 radians), 4 up to
    0.4, 6 beyond; from 256 columns on a CPU saves a quarter of each but two. One d^3 matmul, forward and backward, is
    3. A tall weight adds 4 and two small ones. Memory: one copy of each square weight, a float32 copy of each half
    weight. Attaching takes one SVD for each weight that moves.

    When not to use: a weight that must shrink or grow freely (use `wellposed.OrthogonalityPenalty`), or an optimizer
    that keeps its own copy of the weights (DeepSpeed ZeRO, schedule-free): the copy would undo the retraction.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    >>> handle = constrain_(model, optimizer, where="0")
    >>> model(torch.randn(4, 8)).square().sum().backward()
    >>> optimizer.step()
    >>> handle.error().worst < 1e-5
    True
    """
    if gain != "fit" and not float(gain) > 0.0:
        raise ConfigError(f"constrain_: gain must be above 0 or 'fit', received {gain!r}")
    if weight_decay not in ("refuse", "ignore"):
        raise ConfigError(f"constrain_: weight_decay must be 'refuse' or 'ignore', received {weight_decay!r}")
    if embeddings not in ("refuse", "fit"):
        raise ConfigError(f"constrain_: embeddings must be 'refuse' or 'fit', received {embeddings!r}")
    model = unwrap_model(model)
    optimizers = _optimizers(optimizer)
    chosen = _merge_tied(model, select_weights(model, where))
    tables = frozenset(id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding))
    owners = _check(chosen, optimizers, refused=tables if embeddings == "refuse" else frozenset())
    _check_decay(chosen, owners, weight_decay)

    weights: list[Weight] = []
    rows: list[ConstrainedWeight] = []
    for (found, also), owner in zip(chosen, owners, strict=True):
        is_frame = embeddings == "fit" and id(found.parameter) in tables
        own_gain = _frame_gain(found) if is_frame else gain
        weight, row = _project(found, also, owner, own_gain, is_frame=is_frame, dry_run=dry_run)
        weights.append(weight)
        rows.append(row)
    report = ConstraintReport(tuple(rows), dry_run=dry_run)
    handle = Constraint(weights, report, ignore_decay=weight_decay == "ignore", batched=batched)
    if dry_run:
        sys.stdout.write(report.table() + "\n")
    else:
        handle.attach()
        logger.info("constrain_: %d weights\n%s", len(rows), report.table())
    return handle


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner: list[Optimizer] = []
    for entry in given:
        while isinstance(getattr(entry, "optimizer", None), Optimizer):
            entry = entry.optimizer  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(entry, Optimizer) or not hasattr(entry, "_optimizer_step_pre_hooks"):
            raise ConfigError(
                f"constrain_: expected a torch.optim.Optimizer, received {type(entry).__name__}; its step has no hooks "
                "to project the gradient and retract the weight"
            )
        if type(entry).__name__ in _NO_STEPS:
            raise ConfigError(
                f"constrain_: {type(entry).__name__} does not take one step from one gradient, so there is no step to "
                "retract; use AdamW, SGD, Adafactor or Muon"
            )
        inner.append(entry)
    return inner


def _merge_tied(model: nn.Module, found: list[Candidate]) -> list[tuple[Candidate, tuple[str, ...]]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    merged: dict[int, tuple[Candidate, tuple[str, ...]]] = {}
    for index, candidate in enumerate(found):
        key = id(candidate.parameter) if candidate.parameter is not None else -1 - index
        if key not in merged:
            others = tuple(name for name in names.get(key, []) if name != candidate.parameter_name)
            merged[key] = (candidate, others)
            if others:
                logger.warning("%s is tied to %s; constrained once", candidate.parameter_name, ", ".join(others))
    return list(merged.values())


def _frame_gain(found: Candidate) -> float:
    """Return the mean singular value, rounded, so that a resumed run finds the very number it began with."""
    assert found.parameter is not None  # _check raised for it
    return float(f"{float(torch.linalg.svdvals(read(found.parameter).float()).mean()):.3g}")


def _check(
    chosen: list[tuple[Candidate, tuple[str, ...]]], optimizers: list[Optimizer], *, refused: frozenset[int]
) -> list[Optimizer]:
    owners: dict[int, list[Optimizer]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), []).append(optimizer)
    shapes: list[str] = []
    others: list[str] = []
    for candidate, _ in chosen:
        path = candidate.parameter_name
        if shape := _shape_problem(candidate, refused):
            shapes.append(f"{path}: {shape}")
        elif problem := _problem(candidate, owners, optimizers):
            others.append(f"{path}: {problem}")
    if shapes or others:
        family = ShapeError if shapes and not others else ConfigError
        raise family(f"constrain_ cannot keep these weights orthogonal:\n{listed([*shapes, *others])}")
    return [owners[id(candidate.parameter)][0] for candidate, _ in chosen]


def _shape_problem(candidate: Candidate, refused: frozenset[int]) -> str | None:
    parameter = candidate.parameter
    if parameter is None:
        return None
    shape = tuple(parameter.shape)
    if len(shape) != 2 or 0 in shape:
        hint = "; FSDP1 flattens parameters, use fully_shard (FSDP2)" if "_flat_param" in candidate.name else ""
        return f"shape {shape}, expected a matrix (rows, columns); narrow where=, or give module types{hint}"
    if id(parameter) in refused and shape[0] > shape[1]:
        return (
            f"an embedding of {shape[0]} vectors in {shape[1]} dimensions, and at most {shape[1]} vectors can be "
            "orthonormal there; give embeddings='fit' to keep its columns orthogonal, or use "
            "wellposed.OrthogonalityPenalty(model, embedding=...) to push its Gram matrix"
        )
    return None


def _problem(candidate: Candidate, owners: dict[int, list[Optimizer]], optimizers: list[Optimizer]) -> str | None:
    parameter = candidate.parameter
    if parameter is None:
        kind = type(candidate.module).__name__
        return f"{kind} computes or packs its weight (a parametrisation, or quantised); a plain nn.Parameter is needed"
    return _storage_problem(parameter) or _owner_problem(parameter, owners.get(id(parameter), []), optimizers)


def _storage_problem(parameter: nn.Parameter) -> str | None:
    if parameter.dtype not in TOLERANCES or parameter.is_quantized:
        kind = f"{type(parameter).__name__} of {parameter.dtype}"
        return f"{kind}, quantised or not floating; expected float32, float64, bfloat16 or float16"
    if parameter.dtype == torch.float16 and parameter.device.type == "cpu":
        return "float16 on a CPU; load the model in float32 or bfloat16, or move it to a GPU first"
    if parameter.is_meta:
        return "on the meta device, without values; load the weights first"
    return None


def _owner_problem(parameter: nn.Parameter, held: list[Optimizer], optimizers: list[Optimizer]) -> str | None:
    if not parameter.requires_grad:
        return "frozen (requires_grad is False), so no step would ever be taken; unfreeze it or leave it out"
    if len(held) != 1:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        many = "more than one given optimizer" if held else f"not owned by the given optimizer ({names})"
        return f"{many}; build the optimizer from the parameters of this very model, after moving, sharding or tying it"
    if any(owns(handle, parameter) for handle in handles_of(held[0])):
        return "constrained already; call remove() on the first handle"
    return None


def _check_decay(chosen: list[tuple[Candidate, tuple[str, ...]]], owners: list[Optimizer], weight_decay: str) -> None:
    decayed: list[str] = []
    sized: list[str] = []
    for (candidate, _), owner in zip(chosen, owners, strict=True):
        group = next(g for g in owner.param_groups if any(p is candidate.parameter for p in g["params"]))
        if group.get("weight_decay", 0) != 0:
            decayed.append(f"{candidate.parameter_name}: weight_decay={group['weight_decay']}")
            if reads_weight_size(owner):
                sized.append(f"{candidate.parameter_name}: {type(owner).__name__}")
    if decayed and weight_decay == "refuse":
        raise decay_error(decayed)
    if sized:
        raise ConfigError(
            "constrain_: weight_decay='ignore' needs an optimizer whose step does not depend on the weight's size; "
            f"put these weights in a group with weight_decay=0:\n{listed(sized)}"
        )


def _project(
    found: Candidate,
    also: tuple[str, ...],
    owner: Optimizer,
    gain: float | Literal["fit"],
    *,
    is_frame: bool,
    dry_run: bool,
) -> tuple[Weight, ConstrainedWeight]:
    parameter = found.parameter
    assert parameter is not None  # _check raised for it
    whole = read(parameter)
    wide = whole.to(torch.float64) if whole.device.type != "mps" else whole.to(torch.float32)
    tolerance = TOLERANCES[parameter.dtype]
    before = float(isometry_error(whole, gain=gain)) if gain != "fit" else float("inf")
    nearest = None
    if before > tolerance or whole.dtype in (torch.bfloat16, torch.float16):
        nearest = nearest_orthogonal(wide, gain=gain)
        before = float(isometry_error(whole, gain=nearest.gain))
    moves = nearest is not None and before > tolerance
    reached = float(gain) if nearest is None else nearest.gain
    weight = Weight(found.parameter_name, parameter, owner, reached, also, is_frame=is_frame)
    stored = nearest.weight.to(parameter.dtype) if nearest is not None and moves else whole
    if is_frame and whole.shape[0] > whole.shape[1]:
        # The vector of padding is zero and stays so; the SVD leaves rounding in its place.
        stored = stored.where(whole.ne(0).any(dim=1, keepdim=True), 0.0)
    if not dry_run:
        with torch.no_grad():
            if moves:
                write_(parameter, stored)
            if nearest is not None:
                weight.adopt_master(nearest.weight.to(weight.dtype))
    row = ConstrainedWeight(
        path=weight.path,
        shape=(parameter.shape[0], parameter.shape[1]),
        gain=weight.gain,
        moved_frobenius=nearest.moved_frobenius if nearest is not None and moves else 0.0,
        moved_spectral=nearest.moved_spectral if nearest is not None and moves else 0.0,
        error_before=before,
        error_after=float(isometry_error(stored, gain=weight.gain)),
        also=also,
    )
    return weight, row
