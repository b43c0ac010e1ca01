"""Vital signs of one step of training, read by hooks that do not change the step."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import threshold
from torch.optim import Optimizer

from wellposed import hooks
from wellposed.interrupts import all_or_nothing, run_all
from wellposed.linalg import in_stacks, is_sharded
from wellposed.measurement._measurement import row_names
from wellposed.measurement._shards import cut_of_view, has_local_part, local_part, whole_norms
from wellposed.measurement._stacks import ENTRIES, joined, norms, stacked
from wellposed.roles import AttentionRole, Roles, WeightView, distinct_paths, split_path
from wellposed.zero_weights import is_copied

logger = logging.getLogger("wellposed.monitor")
QUERIES = 64
"""Number of queries of a sequence whose logits are computed."""
WAITING = 2**28
"""Bytes of queries, keys and outputs that may wait; the graph of the step keeps most anyway."""
SMALL = 1e-30
"""Smallest divisor."""
HEAD_NUMBERS = ("logit_max", "query_norm", "key_norm")
HEAD_MEANS = ("entropy", "softmax_sensitivity")
FORGOTTEN = 64
"""Steps of the optimizer without `take` after which nobody seems to read the numbers."""
_PASSES_A_STEP = 64
"""Passes that count as one such step."""


class _Seen(NamedTuple):
    """A call, or an output, that waits for others of its shape; versions show changes in place."""

    name: str
    call: hooks.ScaledDotProductCall | hooks.SoftmaxCall | None
    tensors: list[Tensor]
    versions: list[int]

    @property
    def mask(self) -> Tensor | None:
        """The mask of the call, if it takes one."""
        return self.call.attn_mask if isinstance(self.call, hooks.ScaledDotProductCall) else None

    def key(self, shared_masks: Container[int]) -> Hashable:
        """Return a value that is equal for calls that may be computed together."""
        shapes = tuple(map(_kind, self.tensors))
        if not isinstance(self.call, hooks.ScaledDotProductCall):
            return shapes, type(self.call)
        mask = self.mask
        masks = mask if mask is None else _kind(mask)
        if id(mask) in shared_masks:
            masks = id(mask)
        return shapes, masks, self.call.is_causal, self.call.factor

    def entries(self, shared_masks: Container[int]) -> int:
        """Return the number of entries of the largest tensor that is stacked or computed."""
        largest = max(tensor.numel() for tensor in self.tensors)
        if not isinstance(self.call, hooks.ScaledDotProductCall):
            return largest
        query, key = self.tensors
        rows = min(QUERIES, query.shape[-2])
        if self.mask is not None and id(self.mask) not in shared_masks:
            largest = max(largest, self.mask.numel())
        return max(largest, query[..., 0, 0].numel() * rows * key.shape[-2])


class VitalSigns:
    """Hooks that read logits, activations, gradients and updates in steps that are ``due``."""

    def __init__(
        self,
        model: nn.Module,
        roles: Roles,
        optimizer: Optimizer | None,
        due: Callable[[], bool],
        *,
        sensitivity: bool,
    ) -> None:
        self._due = due
        self._head_numbers = partial(_head_numbers, sensitivity=sensitivity)
        weights = list(roles.weights())
        rows = [{**vars(w), "parameter": w.view.label, "path": w.path} for w in weights]
        views = dict(zip(row_names(rows), (weight.view for weight in weights), strict=True))
        self._weights = {name: view for name, view in views.items() if has_local_part(view)}
        left = [name for name in views if name not in self._weights]
        if left:
            cut = "weights computed from shards, or cut along two dimensions of a mesh"
            logger.warning("no grad_norm and update of %s: %s", cut, ", ".join(left))

        parts = (*roles.attention, *roles.feedforward)
        layers = {split_path(part.path)[1]: f"{part.stack}.{part.layer}" for part in parts}
        self._layers = _distinct(layers)
        crosses = {"self": "", "cross": ".cross"}
        attention = distinct_paths(roles.attention)
        heads = {path: f"{a.stack}.{a.layer}{crosses[a.kind]}" for path, a in attention.items()}
        names = _distinct(heads)
        self._attention_paths = [role.path for role in attention.values()]
        self._attention = {id(role): names[path] for path, role in attention.items()}
        self._model = model
        self._roles = roles
        self._optimizer = optimizer
        self._handles: list[Any] = []
        self._warned: set[str] = set()
        self._says_copies = False
        self._begin()

    def _begin(self) -> None:
        self._waiting: deque[_Seen] = deque()  # the threads of DataParallel add to it at once
        self._size = 0
        self._tables: list[tuple[str, Sequence[Any], Tensor]] = []
        self._before: list[Tensor] = []
        self._step: dict[tuple[str, str], Tensor] = {}
        self._unseen: set[str] = set()
        self._called: set[str] = set()
        self._passes = 0
        self._is_forgotten = False

    def attach(self) -> None:
        """Add the hooks. Until `remove`, compiled models run eager, or no hook would see them."""
        if self._handles and not self._is_forgotten:
            return
        self.remove()
        with all_or_nothing() as undo:
            undo.later(self.remove)
            hooks.begin_eager(self)
            watcher = hooks.AttentionWatcher(
                self._model,
                self._roles.attention,
                self._attended,
                wanted=lambda _: self._counts(),
            )
            self._handles.append(watcher)
            for path, module in self._model.named_modules():
                hook = hooks.ObservingHook(self._returned, path)
                self._handles.append(hooks.register(module.register_forward_hook, hook))
            if self._optimizer is not None:
                self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
                self._handles.append(self._optimizer.register_step_post_hook(self._after_step))

    def pending(self) -> list[Tensor]:
        """Return the tensors that `take` receives, without waiting for the device."""
        if self._handles:
            self._handles[0].forget()
        self._compute()
        return [table for _, _, table in self._tables]

    def take(self, tables: Sequence[Tensor]) -> tuple[dict[str, float], str | None]:
        """Return all numbers since the last call and the first module with a non-finite output."""
        rows: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        broken: list[str] = []
        for (kind, names, _), table in zip(self._tables, tables, strict=True):
            values = zip(names, table.tolist(), strict=True)
            if kind == "outputs":
                broken += [name for name, value in values if not math.isfinite(value)]
            for name, value in _of_step(dict(values)) if kind == "step" else values:
                rows[kind][name].append(value)

        numbers = {name: _largest(values) for name, values in rows["step"].items()}
        for name, passes in rows["heads"].items():
            for head, calls in enumerate(zip(*passes, strict=True)):
                values = _of_head(calls)
                numbers |= {f"vital/{name}.head{head}/{key}": values[key] for key in values}

        for name, passes in rows["layers"].items():
            values = _of_layer(passes)
            numbers |= {f"vital/{name}/{key}": values[key] for key in values}

        new = sorted(self._unseen - self._warned)
        if new:
            self._warned |= self._unseen
            logger.warning(
                "passes whose attention logits were not seen, or whose tensors were changed in"
                " place: %s",
                ", ".join(new),
            )

        self._warn_past_hooks()
        self._begin()
        return numbers, next(iter(broken), None)

    def _warn_past_hooks(self) -> None:
        past = hooks.run_past_hooks(self._attention_paths, self._called)
        new = [path for path in dict.fromkeys(past) if path not in self._warned]
        if new:
            self._warned.update(new)
            logger.warning("Monitor: no logits of %s: %s", ", ".join(new), hooks.PAST_HOOKS)

    def remove(self) -> None:
        """Remove every hook from the model and the optimizer, and forget what was not taken."""
        removals = [handle.remove for handle in self._handles]
        run_all(*removals, partial(hooks.end_eager, self), self._handles.clear, self._begin)

    def _counts(self) -> bool:
        return not self._is_forgotten and torch.is_grad_enabled() and self._due()

    def _count_unread(self, passes: int) -> None:
        """Stop and forget everything if nobody takes the numbers, so that memory does not grow."""
        self._passes += passes
        if self._passes < FORGOTTEN * _PASSES_A_STEP:
            return
        self._begin()
        self._is_forgotten = True
        hooks.end_eager(self)
        logger.warning(
            "Monitor: nobody called step() for many steps of the optimizer, so it stopped measuring;"
            " call step() once a step, or remove()"
        )

    @torch.no_grad()
    def _attended(
        self, role: AttentionRole, calls: Sequence[tuple[hooks.AttentionCall, Tensor]]
    ) -> None:
        """Queue the calls whose logits can be read."""
        name = self._attention[id(role)]
        readable = 0
        for call, _ in calls:
            if isinstance(call, hooks.MultiheadCall) and call.readable and not _is_cut(call.module):
                call = call.scaled()
            if isinstance(call, hooks.ScaledDotProductCall):
                self._wait(name, call, [call.query.detach(), call.key.detach()])
            elif isinstance(call, hooks.SoftmaxCall):
                self._wait(name, call, [call.scores.detach()])
            readable += not isinstance(call, hooks.MultiheadCall)
        if not readable:
            self._unseen.add(name)

    def _returned(self, path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        counts = self._counts()
        if counts:
            self._called.add(path)
        tokens = hooks.first_tensor(output) if counts else None
        if tokens is not None and tokens.numel():
            self._wait(path, None, [tokens.detach()])
        if not path and not self._is_forgotten:
            self._compute()
            self._count_unread(1)

    def _wait(self, name: str, call: Any, tensors: list[Tensor]) -> None:
        self._waiting.append(_Seen(name, call, tensors, [_version(tensor) for tensor in tensors]))
        self._size += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self._size > WAITING:
            self._compute()

    @torch.no_grad()
    def _compute(self) -> None:
        """Compute everything that waits, in stacks."""
        waiting: list[_Seen] = []
        self._size = 0
        with suppress(IndexError):
            while True:
                waiting.append(self._waiting.popleft())

        outputs = [entry for entry in waiting if entry.call is None]
        sizes = norms([entry.tensors[0] for entry in outputs])
        self._tables.append(("outputs", [entry.name for entry in outputs], joined(sizes)))
        fit: list[_Seen] = []
        for entry in waiting:
            name = entry.name if entry.call else self._layers.get(entry.name)
            if name is not None and [*map(_version, entry.tensors)] != entry.versions:
                self._unseen.add(name)
            elif name is not None:
                fit.append(entry._replace(name=name))

        # Layers often share one mask; T5's, with a bias in it, is made anew by each.
        uses = Counter(id(entry.mask) for entry in fit if entry.mask is not None)
        shared_masks = {mask for mask, count in uses.items() if count > 1}
        with hooks.observing_paused():
            for part in in_stacks(
                fit,
                lambda entry: entry.key(shared_masks),
                lambda entry: ENTRIES // max(1, entry.entries(shared_masks)),
            ):
                names = [entry.name for entry in part]
                if part[0].call:
                    self._tables.append(("heads", names, self._head_numbers(part)))
                else:
                    self._tables.append(("layers", names, _moments(part)))

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: Any) -> None:
        if self._is_forgotten or not self._due() or self._steps_copies():
            return
        self._compute()
        parts = [local_part(view).detach() for view in self._weights.values()]
        self._before = list(torch._foreach_mul(parts, 1.0))
        if not _closure(arguments, named):  # a closure computes gradients later
            self._note_gradients(optimizer)

    def _steps_copies(self) -> bool:
        """Whether ZeRO-1 or 2 replaces the weights after this step, and has taken their gradients."""
        copied = any(is_copied(view.parameter) for view in self._weights.values())
        if copied and not self._says_copies:
            self._says_copies = True
            logger.warning(
                "Monitor: no grad_norm and update: DeepSpeed ZeRO steps copies of the weights, in parts"
            )
        return copied

    def _note_gradients(self, optimizer: Optimizer) -> None:
        views = self._mine(optimizer).items()
        grads = ((name, view, view.parameter) for name, view in views)
        local_grads = {
            name: local_part(view, weight.grad.to_dense() if weight.grad.is_sparse else weight.grad)
            for name, view, weight in grads
            if weight.is_leaf and weight.grad is not None
        }
        pairs = zip(local_grads, norms([*local_grads.values()]), strict=True)
        self._step |= {("grad_norm", name): length for name, length in pairs}

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: Any) -> None:
        if not self._before:
            return
        if _closure(arguments, named):
            self._note_gradients(optimizer)

        mine = self._mine(optimizer)
        after = [local_part(view).detach() for view in self._weights.values()]
        sizes = norms(self._before)
        torch._foreach_sub_(self._before, after)

        for name, size, way in zip(self._weights, sizes, norms(self._before), strict=True):
            self._step["size", name] = size
            if name in mine:
                self._step["update", name] = way

        cuts = {name: cut_of_view(view) for name, view in self._weights.items()}
        lengths = whole_norms([*self._step.values()], [cuts[name] for _, name in self._step])
        self._step = dict(zip(self._step, lengths, strict=True))
        for name in ("found_inf", "grad_scale"):  # of a fused optimizer; a scaler changes them
            value = getattr(optimizer, name, None)
            if value is not None:
                self._step[name, ""] = value.squeeze()

        self._tables.append(("step", [*self._step], joined([*self._step.values()])))
        self._before = []
        self._step = {}
        self._count_unread(_PASSES_A_STEP)

    def _mine(self, optimizer: Optimizer) -> dict[str, WeightView]:
        """Return the weights that an optimizer steps; all, if it steps copies of them."""
        stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        mine = {name: view for name, view in self._weights.items() if id(view.parameter) in stepped}
        return mine or self._weights


def _closure(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the closure given to a step; the first argument is the optimizer."""
    return arguments[1] if len(arguments) > 1 else named.get("closure")


def _is_cut(module: nn.Module) -> bool:
    return any(map(is_sharded, module.parameters(recurse=False)))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _head_numbers(part: Sequence[_Seen], *, sensitivity: bool) -> Tensor:
    """Return (calls, heads, 5): largest logit, query and key norm; entropy and its maximum.

    With ``sensitivity`` seven: `_sensitivities` and their number follow.
    """
    call: Any = part[0].call
    stacks = [stacked(tensors) for tensors in zip(*(e.tensors for e in part), strict=True)]
    is_product = isinstance(call, hooks.ScaledDotProductCall)
    names = ("query", "key") if is_product else ("scores",)
    call = replace(call, **dict(zip(names, stacks, strict=True)))
    masks = {id(entry.mask): entry.mask for entry in part if entry.mask is not None}
    if len(masks) > 1:
        call = replace(call, attn_mask=stacked([_of_batch(mask) for mask in masks.values()]))

    with torch.autocast(stacks[0].device.type, enabled=False):
        logits, top, is_open = call.open_keys(QUERIES)
        # Booleans take a CPU seven times as long to sum.
        most = is_open.to(logits.dtype).sum(-1).clamp_min_(1.0).log_().expand(top.shape[:-1])
        # Below e^-80 a share is 0 in float32. A closed key gets e^-80.
        logits.sub_(threshold(top, call.masked_row, math.inf)).clamp_min_(-80.0)
        top = top[..., 0]
        if call.masked_row > -math.inf:
            top = threshold(top, call.masked_row, -math.inf)
        shares = logits.exp()
        total = shares.sum(-1)
        entropy = total.log().addcdiv_(logits.mul_(shares).sum(-1), total, value=-1.0)
        summed = [entropy.minimum(most), most]
        if sensitivity:
            sees_two = most > 0.0
            summed += [_sensitivities(shares, total, sees_two), sees_two]
        sums = [values.sum((1, 3)) for values in summed]
        vectors = stacks if is_product else []
        lengths = [torch.linalg.vector_norm(x.float(), dim=-1).amax((1, 3)) for x in vectors]
        largest = [top.amax((1, 3)), *(lengths or [torch.full_like(sums[0], -math.inf)] * 2)]
        numbers = [_by_group(values, stacks[-1].shape[2]) for values in (*largest, *sums)]

    return torch.stack(torch.broadcast_tensors(*numbers), -1).flatten(1, 2)


def _sensitivities(shares: Tensor, total: Tensor, sees_two: Tensor) -> Tensor:
    """Return ``p1 (1 - p1 + p2)`` of each query, of ``shares`` relative to p1; 0 with one key."""
    if shares.shape[-1] == 1:
        return torch.zeros_like(total)
    second = shares.topk(2, dim=-1).values[..., 1]
    return torch.where(sees_two, (total - 1.0 + second) / total.square(), 0.0)


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.dtype, tensor.device


def _of_batch(mask: Tensor) -> Tensor:
    """Return a mask with its missing dimensions: (batch, heads, queries, keys)."""
    return mask[(None,) * (4 - mask.ndim)]


def _by_group(numbers: Tensor, groups: int) -> Tensor:
    """Return the numbers (calls, heads) as (calls, groups, heads of the group): a view."""
    return numbers.unflatten(1, (groups, -1))


def _moments(part: Sequence[_Seen]) -> Tensor:
    """Return (outputs, 6): count, largest entry, and in its units mean and central moments 2-4."""
    values = stacked([entry.tensors[0] for entry in part]).float().flatten(1)
    largest = values.abs().amax(1)
    values = values / largest.clamp_min(SMALL)[:, None]  # so that no fourth power overflows
    mean = values.mean(1)
    square = values.sub_(mean[:, None]).square()
    powers = [square.mean(1), values.mul_(square).mean(1), square.square_().mean(1)]
    return torch.stack([torch.full_like(largest, values.shape[1]), largest, mean, *powers], 1)


def _of_step(numbers: Mapping[tuple[str, str], float]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a step of an optimizer; none if it was skipped."""
    if numbers.get(("found_inf", "")):
        return
    for (kind, name), value in numbers.items():
        if kind == "grad_norm":
            yield f"vital/{name}/grad_norm", value / numbers.get(("grad_scale", ""), 1.0)
        elif kind == "update" and numbers["size", name] > 0:
            yield f"vital/{name}/update", value / numbers["size", name]


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _of_head(calls: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the largest numbers of all calls, and their entropy as a share of its maximum."""
    columns = [*zip(*calls, strict=True)]
    count = len(HEAD_NUMBERS)
    largest = map(_largest, columns[:count])
    numbers: dict[str, float] = dict(zip(HEAD_NUMBERS, largest, strict=True))
    means = zip(HEAD_MEANS, columns[count::2], columns[count + 1 :: 2], strict=False)
    for name, parts, most in means:
        if sum(most) > 0:
            numbers[name] = sum(parts) / sum(most)
    return {number: value for number, value in numbers.items() if value != -math.inf}


def _of_layer(passes: Sequence[Sequence[float]]) -> dict[str, float]:
    """Merge the moments of all passes, of each what `_moments` returns."""
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
