"""What one step of training shows of a model's health, by hooks that leave the step as it is."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed import watch
from wellposed.measurement._measurement import row_names
from wellposed.measurement._stacks import in_stacks, norms, stacked
from wellposed.roles import AttentionRole, Roles, WeightView, distinct_paths, split_path

logger = logging.getLogger("wellposed.monitor")
QUERIES = 64
"""Queries of a sequence whose logits are computed."""
WAITING = 2**28
"""Bytes of queries, keys and outputs that wait for others of their shape; the graph of the step
holds most of them anyway."""
PIECE = 2**15
SMALL = 1e-30
"""The least that a number is divided by."""
HEAD_NUMBERS = ("logit_max", "entropy", "most", "query_norm", "key_norm")
_EAGER: list[Any] = []
"""The stances that keep all from running compiled; the first knows how things ran before."""


class _Seen(NamedTuple):
    """An attention call, or without one an output, that waits for others of its shape; the versions
    of its tensors tell whether they were changed since."""

    name: str
    call: watch.ScaledDotProductCall | watch.SoftmaxCall | None
    tensors: list[Tensor]
    versions: list[int]

    @property
    def key(self) -> Hashable:
        """What those have in common that are computed together."""
        shapes = tuple((each.shape, each.dtype, each.device) for each in self.tensors)
        if not isinstance(self.call, watch.ScaledDotProductCall):
            return shapes, type(self.call)
        return shapes, id(self.call.attn_mask), self.call.is_causal, self.call.factor

    @property
    def entries(self) -> int:
        """The entries of the largest tensor that is computed."""
        largest = max(each.numel() for each in self.tensors)
        if not isinstance(self.call, watch.ScaledDotProductCall):
            return largest
        query, key = self.tensors
        rows = min(QUERIES, query.shape[-2])
        return max(largest, query[..., 0, 0].numel() * rows * key.shape[-2])


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
        self._waiting: deque[_Seen] = deque()  # the threads of DataParallel add to it at once
        self._size = 0
        self._found: list[tuple[str, Sequence[Any], Sequence[Tensor]]] = []
        self._before: list[Tensor] = []
        self._step: dict[tuple[str, str], Tensor] = {}
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

    def pending(self) -> list[Tensor]:
        """Return the tensors that `take` is to receive, as the device computes them."""
        if self._handles:
            self._handles[0].forget()
        self._compute()
        return [each for _, _, tensors in self._found for each in tensors]

    def take(self, tables: Sequence[Tensor]) -> tuple[dict[str, float], str | None]:
        """Return the numbers of all passes and steps since the last call, and the first module whose
        output was not finite; start anew."""
        rows: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        broken: list[str] = []
        coming = iter([table.tolist() for table in tables])
        for kind, names, tensors in self._found:
            values: list[Any] = list(islice(coming, len(tensors)))
            if kind == "outputs":
                pairs = zip(names, values, strict=True)
                broken += [name for name, value in pairs if not math.isfinite(value)]
            elif kind == "step":
                for name, value in _of_step(dict(zip(names, values, strict=True))):
                    rows[kind][name].append(value)
            else:
                for (name, count), *row in zip(names, *values, strict=True):
                    rows[kind][name].append((count, *row))
        numbers: dict[str, float] = {}
        for name, passes in rows["heads"].items():
            for head, found in enumerate(_of_heads(passes)):
                numbers |= {f"vital/{name}.head{head}/{key}": found[key] for key in found}
        for name, passes in rows["layers"].items():
            numbers |= {f"vital/{name}/{key}": x for key, x in _of_layer(passes).items()}
        numbers |= {name: _largest(values) for name, values in rows["step"].items()}
        if new := sorted(self._unseen - self._told):
            self._told |= self._unseen
            logger.warning(
                "passes whose attention logits were not seen, or whose tensors were changed in"
                " place: %s",
                ", ".join(new),
            )
        self._begin()
        return numbers, next(iter(broken), None)

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
        """Note the calls of which logits can be read."""
        name, seen = self._attention[id(role)], 0
        for call, _ in calls:
            if isinstance(call, watch.MultiheadCall) and call.readable:
                call = call.scaled()
            if isinstance(call, watch.ScaledDotProductCall):
                self._wait(name, call, [call.query.detach(), call.key.detach()])
            elif isinstance(call, watch.SoftmaxCall):
                self._wait(name, call, [call.given.detach()])
            seen += not isinstance(call, watch.MultiheadCall)
        if not seen:
            self._unseen.add(name)

    def _returned(self, path: str, _module: nn.Module, _given: Any, output: Any) -> None:
        tokens = watch.first_tensor(output) if self._counts() else None
        if tokens is not None and tokens.numel():
            self._wait(path, None, [tokens.detach()])
        if not path:
            self._compute()

    def _wait(self, name: str, call: Any, tensors: list[Tensor]) -> None:
        self._waiting.append(_Seen(name, call, tensors, [_version(each) for each in tensors]))
        self._size += sum(each.numel() * each.element_size() for each in tensors)
        if self._size > WAITING:
            self._compute()

    @torch.no_grad()
    def _compute(self) -> None:
        """Compute the numbers of all that waits, in stacks."""
        waiting: list[_Seen] = []
        self._size = 0
        with suppress(IndexError):
            while True:
                waiting.append(self._waiting.popleft())
        outputs = [each for each in waiting if each.call is None]
        pieces = [(each.name, part) for each in outputs for part in _pieces(each.tensors[0])]
        lengths = norms([part for _, part in pieces], torch.float64)
        self._found.append(("outputs", [name for name, _ in pieces], lengths))
        fit: list[_Seen] = []
        for each in waiting:
            name = each.name if each.call else self._layers.get(each.name)
            if name is not None and [_version(tensor) for tensor in each.tensors] != each.versions:
                self._unseen.add(name)
            elif name is not None:
                fit.append(each._replace(name=name))
        with watch.observing_paused():
            for part in in_stacks(fit, lambda each: each.key, lambda each: each.entries):
                compute = _head_numbers if part[0].call else _moments
                names = [(each.name, each.tensors[0].numel()) for each in part]
                self._found.append(("heads" if part[0].call else "layers", names, compute(part)))

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, given: tuple[Any, ...], named: Any) -> None:
        if not self._due():
            return
        self._compute()
        views = self._weights.values()
        self._before = list(torch._foreach_mul([view.tensor().detach() for view in views], 1.0))
        if not _closure(given, named):  # which computes gradients later
            self._note_gradients(optimizer)

    def _note_gradients(self, optimizer: Optimizer) -> None:
        views = self._mine(optimizer).items()
        grads = ((name, view, view.parameter) for name, view in views)
        seen = {
            name: view.seen(weight.grad.to_dense() if weight.grad.is_sparse else weight.grad)
            for name, view, weight in grads
            if weight.is_leaf and weight.grad is not None
        }
        pairs = zip(seen, norms([*seen.values()]), strict=True)
        self._step |= {("grad_norm", name): length for name, length in pairs}

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, given: tuple[Any, ...], named: Any) -> None:
        if not self._before:
            return
        if _closure(given, named):
            self._note_gradients(optimizer)
        mine = self._mine(optimizer)
        after = [view.tensor().detach() for view in self._weights.values()]
        moved = norms(torch._foreach_sub(after, self._before))
        for name, size, way in zip(self._weights, norms(self._before), moved, strict=True):
            self._step["size", name] = size
            self._step["update" if name in mine else "moved", name] = way
        for name in (
            "found_inf",
            "grad_scale",
        ):  # of a fused optimizer; a scaler changes them later
            if (value := getattr(optimizer, name, None)) is not None:
                self._step[name, ""] = value.clone()
        self._found.append(("step", [*self._step], [*self._step.values()]))
        self._before, self._step = [], {}

    def _mine(self, optimizer: Optimizer) -> dict[str, WeightView]:
        """Return the weights that an optimizer steps; all, if it steps copies of them."""
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        mine = {name: view for name, view in self._weights.items() if id(view.parameter) in held}
        return mine or self._weights


def _closure(given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the closure of a step that was called so; the first argument is the optimizer."""
    return given[1] if len(given) > 1 else named.get("closure")


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Return what a CPU, which copies to compute in float64, has in its cache."""
    return tensor.reshape(-1).split(PIECE) if tensor.device.type == "cpu" else [tensor]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _head_numbers(part: Sequence[_Seen]) -> list[Tensor]:
    """Return by call and head the largest logit, the entropy of all queries and the most it can be,
    the logarithm of the open keys, and the longest query and key."""
    call = part[0].call
    stacks = [stacked(each) for each in zip(*(seen.tensors for seen in part), strict=True)]
    vectors = []
    if isinstance(call, watch.ScaledDotProductCall):
        call, vectors = replace(call, query=stacks[0], key=stacks[1]), stacks
    else:
        call = watch.SoftmaxCall(stacks[0])
    with torch.autocast(stacks[0].device.type, enabled=False):
        logits = call.logits(QUERIES)
        closed = logits == -math.inf
        logarithms = logits.log_softmax(-1)
        entropy = -logarithms.exp().mul_(logarithms).masked_fill_(closed, 0.0).sum(-1)
        most = (logits.shape[-1] - closed.sum(-1)).clamp_min(1).log()
        lengths = [torch.linalg.vector_norm(each.float(), dim=-1).amax((1, 3)) for each in vectors]
    return [logits.amax(-1).amax((1, 3)), entropy.sum((1, 3)), most.sum((1, 3)), *lengths]


def _moments(part: Sequence[_Seen]) -> list[Tensor]:
    """Return of each output the largest entry and, in units of it, the mean and the second, third
    and fourth central moment."""
    values = stacked([seen.tensors[0] for seen in part]).float().flatten(1)
    largest = values.amax(1).maximum(-values.amin(1))
    values = values / largest.clamp_min(SMALL)[:, None]  # so that no fourth power overflows
    mean = values.mean(1)
    around = values - mean[:, None]
    square = around.square()
    powers = (square, square * around, square.square())
    return [largest, mean, *(each.mean(1) for each in powers)]


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _of_step(found: Mapping[tuple[str, str], float]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a step of an optimizer; none if it was skipped."""
    if found.get(("found_inf", "")):
        return
    for (kind, name), value in found.items():
        kind = "update" if kind == "moved" and value > 0 else kind
        if kind == "grad_norm":
            yield f"vital/{name}/grad_norm", value / found.get(("grad_scale", ""), 1.0)
        elif kind == "update" and (size := found["size", name]) > 0:
            yield f"vital/{name}/update", value / size


def _of_heads(passes: Sequence[Sequence[Any]]) -> Iterator[dict[str, float]]:
    """Yield by head the largest number of all passes, and their entropy as a share of what it can
    be; a number that no pass has is left out."""
    for head in range(max(len(row) for row in passes[0][1:])):
        columns: dict[str, list[float]] = defaultdict(list)
        for _, *row in passes:
            for number, heads in zip(HEAD_NUMBERS, row, strict=False):
                columns[number].append(heads[head * len(heads) // len(row[0])])  # keys may be fewer
        entropy, most = (sum(columns.pop(number)) for number in ("entropy", "most"))
        numbers = {number: _largest(values) for number, values in columns.items()}
        numbers["entropy"] = entropy / most if most > 0 else -math.inf
        yield {number: value for number, value in numbers.items() if value != -math.inf}


def _of_layer(passes: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the numbers of all entries of all passes, of each the count and what `_moments` gives."""
    top = _largest([largest for _, largest, *_ in passes])
    total = sum(count for count, *_ in passes)
    unit = top if not top <= SMALL else SMALL
    parts = []
    for count, largest, *moments in passes:
        scale = largest / unit
        parts.append((count / total, *(x * scale**p for p, x in enumerate(moments, 1))))
    centre = sum(share * mean for share, mean, *_ in parts)
    variance = fourth = 0.0
    for share, mean, second, third, power in parts:
        off = mean - centre
        variance += share * (second + off**2)
        fourth += share * (power + 4 * third * off + 6 * second * off**2 + off**4)
    square = variance**2
    return {
        "activation_max": top,
        "activation_rms": top * math.sqrt(variance + centre**2),
        "kurtosis": fourth / (square if not square <= SMALL else SMALL),
    }


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Return a unique name for each path: names that several share get ``@path`` appended."""
    count = Counter(names.values())
    return {path: name if count[name] == 1 else f"{name}@{path}" for path, name in names.items()}
