"""What one step of training shows of a model's health, by hooks that leave the step as it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed import watch
from wellposed.measurement._measurement import row_names
from wellposed.roles import AttentionRole, Roles
from wellposed.roles.layer_paths import split_path

QUERIES = 64
"""Queries of a sequence whose logits are computed."""


class VitalSigns:
    """Hooks that note, in steps that are ``due``, attention logits, activations, gradients and
    updates.

    Only passes with gradients count. `take` hands the numbers over and starts anew.
    """

    def __init__(
        self, model: nn.Module, roles: Roles, optimizer: Optimizer | None, due: Callable[[], bool]
    ) -> None:
        self._due = due
        self._numbers: dict[str, Tensor] = {}
        self._finite: dict[str, Tensor] = {}
        self._before: list[Tensor] = []
        weights = list(roles.weights())
        rows = [{**vars(each), "parameter": each.view.label, "path": each.path} for each in weights]
        self._weights = dict(zip(row_names(rows), (each.view for each in weights), strict=True))
        parts = (*roles.attention, *roles.feedforward)
        layers = {split_path(part.path)[1]: f"{part.stack}.{part.layer}" for part in parts}
        crosses = {"self": "", "cross": ".cross"}
        heads = {a.path: f"{a.stack}.{a.layer}{crosses[a.kind]}" for a in roles.attention}
        self._layers, self._attention = _distinct(layers), _distinct(heads)
        self._model, self._roles, self._optimizer = model, roles, optimizer
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Put the hooks on; what is compiled runs as written until `remove`, or no hook would
        see it."""
        if self._handles:
            return
        eager: Any = torch.compiler.set_stance("force_eager")
        given = (self._model, self._roles.attention, self._attended)
        self._handles = [watch.AttentionWatcher(*given, wanted=lambda _: self._counts())]
        for path, module in self._model.named_modules():
            hook = watch.ObservingHook(self._returned, path)
            self._handles.append(module.register_forward_hook(hook))
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(self._optimizer.register_step_post_hook(self._after_step))
        self._undo = partial(eager.__exit__, None, None, None)

    def take(self) -> tuple[dict[str, float], str | None]:
        """Return the numbers of the steps since the last call, and the first module whose output was
        not finite."""
        numbers = {name: value.item() for name, value in self._numbers.items()}
        broken = next((path for path, fine in self._finite.items() if not fine), None)
        self._numbers, self._finite, self._before = {}, {}, []
        return numbers, broken

    def remove(self) -> None:
        """Take every hook off the model and the optimizer."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._undo()
        self._handles.clear()

    def _counts(self) -> bool:
        return self._due() and torch.is_grad_enabled()

    @torch.no_grad()
    def _attended(
        self, role: AttentionRole, calls: Sequence[tuple[watch.AttentionCall, Tensor]]
    ) -> None:
        """Note the largest logit, the entropy as a share of the logarithm of the keys that are
        open, and the longest query and key, by head."""
        for call, _ in calls:
            if isinstance(call, watch.MultiheadCall) and not call.readable:
                continue
            call = call.scaled() if isinstance(call, watch.MultiheadCall) else call
            logits = call.logits(QUERIES)
            is_open = logits > torch.finfo(torch.float32).min / 4
            weights = logits.softmax(-1)
            entropy = torch.special.entr(weights).nan_to_num().sum((0, 2, 3))
            most = is_open.sum(-1).clamp_min(1).log().sum((0, 2))
            found = {
                "logit_max": logits.where(is_open, -math.inf).amax((0, 2, 3)),
                "entropy": entropy / most.clamp_min(1e-6) if most.any() else torch.ones_like(most),
            }
            if isinstance(call, watch.ScaledDotProductCall):
                for name, vectors in (("query_norm", call.query), ("key_norm", call.key)):
                    lengths = torch.linalg.vector_norm(vectors.detach().float(), dim=-1)
                    found[name] = lengths.amax((0, 2))
            for name, values in found.items():
                for head, value in enumerate(values):
                    self._numbers[f"vital/{self._attention[role.path]}.head{head}/{name}"] = value

    def _returned(self, path: str, _module: nn.Module, _given: Any, output: Any) -> None:
        tokens = watch.first_tensor(output) if self._counts() else None
        if tokens is None:
            return
        values = tokens.detach().float()
        largest = values.abs().max()
        fine = values.isfinite().all()
        self._finite[path] = self._finite.get(path, fine) & fine
        name = self._layers.get(path)
        if name is not None:
            scale = largest.clamp_min(1e-30)  # so that no square overflows
            rms = largest * (values / scale).square().mean().sqrt()
            self._numbers[f"vital/{name}/activation_max"] = largest
            self._numbers[f"vital/{name}/activation_rms"] = rms
            self._numbers[f"vital/{name}/kurtosis"] = watch.kurtosis(values)

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if self._due():
            self._before = [view.tensor().detach().clone() for view in self._weights.values()]
            for name, view in self._weights.items():
                if view.parameter.is_leaf and view.parameter.grad is not None:
                    gradient = view.seen(view.parameter.grad).float()
                    self._numbers[f"vital/{name}/grad_norm"] = gradient.norm()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for (name, view), before in zip(self._weights.items(), self._before, strict=False):
            size = before.float().norm()
            moved = (view.tensor().detach() - before).float().norm()
            if size > 0:
                self._numbers[f"vital/{name}/update"] = moved / size
        self._before = []


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Return a unique name for each path: names that several share get ``@path`` appended."""
    count = Counter(names.values())
    return {path: name if count[name] == 1 else f"{name}@{path}" for path, name in names.items()}
