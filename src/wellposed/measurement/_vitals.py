"""What one step of training shows of a model's health, by hooks that leave the step as it is."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed import watch
from wellposed.measurement._measurement import row_names
from wellposed.roles import AttentionRole, Roles, WeightView, distinct_paths, split_path

logger = logging.getLogger("wellposed.monitor")
QUERIES = 64
"""Queries of a sequence whose logits are computed."""


_EAGER: list[Any] = []
"""The stances that keep all from running compiled; the first knows how things ran before."""


class VitalSigns:
    """Hooks that note, in steps that are ``due``, attention logits, activations, gradients and
    updates.

    Only passes with gradients count. `take` hands over the numbers of all passes since the last
    call, and starts anew.
    """

    def __init__(
        self, model: nn.Module, roles: Roles, optimizer: Optimizer | None, due: Callable[[], bool]
    ) -> None:
        self._due = due
        weights = list(roles.weights())
        rows = [{**vars(each), "parameter": each.view.label, "path": each.path} for each in weights]
        self._weights = dict(zip(row_names(rows), (each.view for each in weights), strict=True))
        parts = (*roles.attention, *roles.feedforward)
        layers = {split_path(part.path)[1]: f"{part.stack}.{part.layer}" for part in parts}
        self._layers = _distinct(layers)
        crosses = {"self": "", "cross": ".cross"}
        attention = distinct_paths(roles.attention)
        heads = {path: f"{a.stack}.{a.layer}{crosses[a.kind]}" for path, a in attention.items()}
        names = _distinct(heads)
        self._attention = {id(role): names[path] for path, role in attention.items()}
        self._model, self._roles, self._optimizer = model, roles, optimizer
        self._handles: list[Any] = []
        self._told: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        # Lists and a flag for each device: the threads of DataParallel add to them at once.
        self._heads: dict[str, list[dict[str, Tensor]]] = defaultdict(list)
        self._moments: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        self._steps: dict[str, list[Tensor]] = defaultdict(list)
        self._finite: dict[str, dict[torch.device, Tensor]] = defaultdict(dict)
        self._before: dict[str, Tensor] = {}
        self._unseen: set[str] = set()

    def attach(self) -> None:
        """Put the hooks on; what is compiled runs as written until `remove`, or no hook would
        see it."""
        if self._handles:
            return
        _EAGER.append(torch.compiler.set_stance("force_eager"))
        given = (self._model, self._roles.attention, self._attended)
        self._handles = [watch.AttentionWatcher(*given, wanted=lambda _: self._counts())]
        for path, module in self._model.named_modules():
            hook = watch.ObservingHook(self._returned, path)
            self._handles.append(module.register_forward_hook(hook))
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(self._optimizer.register_step_post_hook(self._after_step))

    def take(self) -> tuple[dict[str, float], str | None]:
        """Return the numbers of all passes and steps since the last call, and the first module whose
        output was not finite."""
        if self._handles:
            self._handles[0].forget()
        numbers: dict[str, float] = {}
        for name, passes in self._heads.items():
            for head, found in enumerate(_of_heads(passes)):
                numbers |= {f"vital/{name}.head{head}/{key}": found[key] for key in found}
        for name, moments in self._moments.items():
            numbers |= {f"vital/{name}/{key}": x for key, x in _of_layer(moments).items()}
        for name, values in self._steps.items():
            numbers[name] = _gathered(values).amax().item()
        flags = ((path, fine) for path, each in self._finite.items() for fine in each.values())
        broken = next((path for path, fine in flags if not fine), None)
        if new := sorted(self._unseen - self._told):
            self._told |= self._unseen
            logger.warning("passes whose attention logits were not seen: %s", ", ".join(new))
        self._begin()
        return numbers, broken

    def remove(self) -> None:
        """Take every hook off the model and the optimizer."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            _EAGER.pop().__exit__(None, None, None)
        self._handles.clear()

    def _counts(self) -> bool:
        return self._due() and torch.is_grad_enabled()

    @torch.no_grad()
    def _attended(
        self, role: AttentionRole, calls: Sequence[tuple[watch.AttentionCall, Tensor]]
    ) -> None:
        """Note by head the largest logit, the entropy of all queries and the most it can be, the
        logarithm of the open keys, and the longest query and key."""
        name, seen = self._attention[id(role)], 0
        for call, _ in calls:
            if isinstance(call, watch.MultiheadCall) and not call.readable:
                continue
            call = call.scaled() if isinstance(call, watch.MultiheadCall) else call
            logits = call.logits(QUERIES)
            is_open = logits != -math.inf
            entropy = torch.special.entr(logits.softmax(-1))
            found = {
                "logit_max": logits.amax((0, 2, 3)),
                "entropy": entropy.where(is_open, 0.0).sum((0, 2, 3)),
                "most": is_open.sum(-1).clamp_min(1).log().sum((0, 2)),
            }
            if isinstance(call, watch.ScaledDotProductCall):
                for number, vectors in (("query_norm", call.query), ("key_norm", call.key)):
                    lengths = torch.linalg.vector_norm(vectors.detach().float(), dim=-1)
                    found[number] = lengths.amax((0, 2))
            self._heads[name].append(found)
            seen += 1
        if not seen:
            self._unseen.add(name)

    def _returned(self, path: str, _module: nn.Module, _given: Any, output: Any) -> None:
        tokens = watch.first_tensor(output) if self._counts() else None
        if tokens is None:
            return
        values = tokens.detach().float()
        largest = values.abs().max()
        fine, flags = values.isfinite().all(), self._finite[path]
        flags[fine.device] = flags.get(fine.device, fine) & fine
        name = self._layers.get(path)
        if name is not None:
            values = values / largest.clamp_min(1e-30)  # so that no fourth power overflows
            mean = values.mean()
            around = values - mean
            square = around.square()
            moments = (square, square * around, square.square())
            found = torch.stack([largest, mean, *(each.mean() for each in moments)])
            self._moments[name].append((values.numel(), found))

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, given: tuple[Any, ...], named: Any) -> None:
        """Note weights and gradients, unless a fused optimizer skips a step whose gradients are not
        finite."""
        skips = getattr(optimizer, "found_inf", None)
        if not self._due() or (skips is not None and skips.item()):
            return
        views = self._weights.items()
        self._before = {name: view.tensor().detach().clone() for name, view in views}
        if not _closure(given, named):  # which computes them later
            self._note_gradients(optimizer)

    def _note_gradients(self, optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # what a fused optimizer divides by itself
        for name, view in self._mine(optimizer).items():
            if view.parameter.is_leaf and view.parameter.grad is not None:
                norm = view.seen(view.parameter.grad).float().norm()
                norm = norm if scale is None else norm / scale.to(norm.device)
                self._steps[f"vital/{name}/grad_norm"].append(norm)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, given: tuple[Any, ...], named: Any) -> None:
        mine = self._mine(optimizer)
        if self._before and _closure(given, named):
            self._note_gradients(optimizer)
        for name, before in self._before.items():
            size = before.float().norm()
            moved = (self._weights[name].tensor().detach() - before).float().norm()
            if size > 0 and (name in mine or moved > 0):
                self._steps[f"vital/{name}/update"].append(moved / size)
        self._before = {}

    def _mine(self, optimizer: Optimizer) -> dict[str, WeightView]:
        """Return the weights that an optimizer steps; all, if it steps copies of them."""
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        mine = {name: view for name, view in self._weights.items() if id(view.parameter) in held}
        return mine or self._weights


def _closure(given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the closure of a step that was called so; the first argument is the optimizer."""
    return given[1] if len(given) > 1 else named.get("closure")


def _gathered(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.to(values[0].device) for each in values]).cpu().double()


def _of_heads(passes: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Return by head the largest number of all passes, and their entropy as a share of what it can
    be; a number that no pass has is left out."""
    names = list(dict.fromkeys(name for each in passes for name in each))
    tables = {name: _gathered([each[name] for each in passes if name in each]) for name in names}
    most, entropy = tables.pop("most").sum(0), tables["entropy"].sum(0)
    largest = {name: table.amax(0) for name, table in tables.items()}
    columns = {**largest, "entropy": (entropy / most).where(most > 0, -math.inf)}
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    numbers = [dict(zip(columns, row, strict=True)) for row in rows]
    return [{name: x for name, x in row.items() if x != -math.inf} for row in numbers]


def _of_layer(moments: Sequence[tuple[int, Tensor]]) -> dict[str, float]:
    """Return the numbers of all entries of all passes, of each the count, the largest entry and, in
    units of it, the mean and the central moments."""
    table = _gathered([each for _, each in moments])
    top = table[:, 0].amax()
    powers = (table[:, :1] / top.clamp_min(1e-30)) ** torch.arange(1, 5)
    mean, second, third, fourth = (table[:, 1:] * powers).unbind(-1)
    count = torch.tensor([float(number) for number, _ in moments], dtype=torch.float64)
    share = count / count.sum()
    centre = (share * mean).sum()
    off = mean - centre
    variance = (share * (second + off**2)).sum()
    top4 = (share * (fourth + 4 * third * off + 6 * second * off**2 + off**4)).sum()
    rms = top * (variance + centre**2).sqrt()
    kurtosis = top4 / variance.square().clamp_min(1e-30)
    found = {"activation_max": top, "activation_rms": rms, "kurtosis": kurtosis}
    return {name: value.item() for name, value in found.items()}


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Return a unique name for each path: names that several share get ``@path`` appended."""
    count = Counter(names.values())
    return {path: name if count[name] == 1 else f"{name}@{path}" for path, name in names.items()}
