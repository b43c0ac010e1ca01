"""Checks of chosen weights: one error names every weight that cannot be constrained."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import nn
from torch.optim import Optimizer

from wellposed.constrain._handle import handles_of
from wellposed.constrain._options import Set
from wellposed.constrain._set import TOLERANCES, ZeroColumns
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.constrain._wholes import Wholes
from wellposed.errors import ConfigError, ConvergenceError, ShapeError, listed
from wellposed.linalg import cut_of, is_sharded

logger = logging.getLogger(__name__)


def merge_tied(model: nn.Module, chosen: Sequence[WeightSlice]) -> list[WeightSlice]:
    """Return each matrix once, with the other names of its parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)

    merged: dict[object, WeightSlice] = {}
    announced: set[str] = set()
    for index, part in enumerate(chosen):
        rows = (id(part.parameter), part.expert, part.rows)
        key = index if part.parameter is None else rows
        name_here = part.parameter_name
        paths = names.get(id(part.parameter), [])
        others = tuple(name for name in paths if name != name_here)
        # One line for a parameter, which may be a stack of many experts.
        if others and key not in merged and name_here not in announced:
            announced.add(name_here)
            logger.warning("%s is tied to %s; constrained once", name_here, ", ".join(others))
        merged.setdefault(key, replace(part, also=others))

    return list(merged.values())


def check_weights(
    slices: Sequence[WeightSlice],
    optimizers: list[Optimizer],
    to: Set,
    refusal: Callable[[WeightSlice], str | None] = lambda _: None,
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


def check_values(
    slices: Sequence[WeightSlice], refusal: Callable[[ZeroColumns], str | None] = lambda _: None
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
        value = wholes.matrix(part.parameter, part)
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
