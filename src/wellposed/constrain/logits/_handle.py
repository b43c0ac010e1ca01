"""The handle of QK-clip: after a step, heads whose logits are too large are scaled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from wellposed.constrain._copies import copy_for_undo
from wellposed.constrain._handle import Constraint
from wellposed.constrain.logits._capped import NEAR, CappedAttention, LateNumbers
from wellposed.constrain.logits._rows import heads_and_powers, scale_
from wellposed.errors import ConvergenceError, listed
from wellposed.linalg import in_stacks

# The largest growth in one step of a logit near the bound is remembered. It decays with each step;
# a power above 1 leaves room for a larger one.
_MOST = 2.0
_MEMORY = 0.995
_POWER = 1.5


class LogitConstraint(Constraint):
    """Scales query and key rows of heads for which a logit of the passes seen was above the bound."""

    @torch.no_grad()
    def _prepare(self, optimizer: Optimizer) -> None:
        ready: list[CappedAttention] = self._weights_of_step(optimizer)
        self._check_weights(ready)
        restarted = self._claim(optimizer, ready)
        _check_finite(ready)
        for module in ready:
            module.is_in_step = True
        copy_for_undo(ready)
        self._say_before_step(optimizer, restarted)

    def _finish(self, optimizer: Optimizer) -> None:
        late: list[CappedAttention] = self._late_weights(optimizer)
        for module in late:
            module.forget()
        modules: list[CappedAttention] = self._pending + late

        unseen: list[CappedAttention] = []
        for group in in_stacks(modules, _key, lambda _: len(modules)):
            if group[0].largest is None and not _in_ranks():
                unseen += group  # all of it, by its key
            else:
                _rescale_(group)
            for module in group:
                module.forget()
        self._end_step()

        if unseen:
            self._warn_once(
                "unseen",
                f"{unseen[0].path}: no forward pass with gradients was seen in this module since the"
                " optimizer's last step, so its logits are not constrained. Run the model that was"
                " given to constrain_, not a copy or a compiled one",
            )
        self._say_late(late)


def _key(module: CappedAttention) -> tuple[object, ...]:
    """Return the key of modules that are scaled together: equal number of heads, of any width."""
    # Other processes may have seen a pass.
    is_unseen = module.largest is None and not _in_ranks()
    mesh = getattr(module.parameter, "device_mesh", None)
    return module.bound, module.num_heads, module.parameter.device, mesh, is_unseen


def _check_finite(modules: Sequence[CappedAttention]) -> None:
    """Raise if the logits or the weights of the last step were not finite."""
    broken: list[str] = []
    for module in modules:
        late = module.late
        module.late = None
        if late is not None and late[0].values[late[1]] == torch.inf:
            broken.append(module.path)
    if broken:
        raise ConvergenceError(
            "constrain_: the largest logit of these modules, or the optimizer's last step, was not"
            " finite, so none of their heads was scaled. Check the loss and the gradients, clip"
            f" them, or lower the learning rate:\n{listed(broken)}"
        )


def _rescale_(modules: Sequence[CappedAttention]) -> None:
    """Scale heads whose largest logit would be above the bound after another such step."""
    first = modules[0]
    bound = first.bound
    none = torch.full((first.num_heads,), -torch.inf, device=first.parameter.device)
    largest_MH = torch.stack(  # M modules, H heads
        [none if module.largest is None else module.largest.to(none) for module in modules]
    )

    # A kernel's sums may hide a query that is not finite; the weights after the step show it.
    norms = torch._foreach_norm([module.scaled[0].local for module in modules])
    is_finite_MH = (largest_MH < torch.inf) & (torch.stack(norms) < torch.inf)[:, None]
    largest_MH = largest_MH.where(is_finite_MH, torch.inf)
    _maximum_over_ranks_(largest_MH, first.parameter)

    notes_M1H = torch.stack([module.note() for module in modules])
    growth_M1, was_MH = notes_M1H.tensor_split([1], 1)
    peaks_M1 = largest_MH.amax(1, keepdim=True)
    is_finite_M1 = peaks_M1 < torch.inf
    is_near_MH = (largest_MH >= NEAR * bound) & is_finite_M1 & (was_MH > 0.0)
    growths_MH = (largest_MH / was_MH).clamp_max(_MOST).where(is_near_MH, 1.0)
    growth = torch.maximum(growth_M1.amax() * _MEMORY + (1.0 - _MEMORY), growths_MH.amax())

    goal = bound * growth**-_POWER
    factors_MH = (goal / torch.maximum(largest_MH, goal)).where(is_finite_M1, 1.0)
    left_MH = (largest_MH * factors_MH).where(is_finite_M1, was_MH)
    notes = torch.cat((growth.expand(len(left_MH), 1), left_MH), 1).unbind()
    peaks_M = peaks_M1[:, 0]
    late = LateNumbers(peaks_M)
    for row, module in enumerate(modules):
        module.largest = None
        module.peak = peaks_M[row]
        module.late = (late, row)
        module.keep(notes[row])

    scaled = [module.scaled for module in modules]
    if first.scaled_with is None or first.scaled_with[0] != (scaled, none.device):
        first.scaled_with = (scaled, none.device), heads_and_powers(scaled, first.num_heads)
    scale_(scaled, first.scaled_with[1], factors_MH)


def _in_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _maximum_over_ranks_(largest: Tensor, parameter: Tensor) -> None:
    """Take the maxima over the processes of a sharded parameter, or over all."""
    mesh = getattr(parameter, "device_mesh", None)
    groups = [None] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    for group in groups if _in_ranks() else ():
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
