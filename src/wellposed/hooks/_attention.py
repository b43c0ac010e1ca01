"""The three attention calls of any model, observed without editing it."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from wellposed.functional import unattended
from wellposed.hooks._recomputation import is_repeated, unseen_by_checkpoints
from wellposed.interrupts import all_or_nothing, run_all


class Attends(Protocol):
    """The attributes of an attention module that `AttentionWatcher` reads."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def num_heads(self) -> int: ...


class AttentionCall(Protocol):
    """One call of attention: (batch, heads, queries, keys) weights, one row for each query."""

    @property
    def attends_to_itself(self) -> bool:
        """Whether there are as many keys as queries, as in self-attention."""
        ...

    def weights(self) -> Tensor:
        """Return the weights without dropout, in float32 at least; rows without a key are NaN."""
        return self.logits().softmax(-1)

    def logits(self, at_most: int | None = None) -> Tensor:
        """Return the softmax inputs of all queries, or of ``at_most`` spread evenly. Keys masked by
        True, by -inf or by a number of -5,000 or less have -inf."""
        ...


_CLOSED = -5e3
"""Mask values up to this close a key: models add -1e4, -1e9 or the smallest number of a dtype."""


@dataclass(frozen=True)
class ScaledDotProductCall(AttentionCall):
    """Query and key (batch, heads, tokens, width) of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None

    @classmethod
    def read(  # noqa: PLR0917 (torch's own order)
        cls,
        _module: nn.Module,
        role: Attends,
        query: Tensor,
        key: Tensor,
        value: Any,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> ScaledDotProductCall | None:
        """Read the arguments; None if they cannot be divided into the heads of ``role``."""
        del value, dropout_p
        if query.ndim != 4:
            if any(math.prod(item.shape[:-2]) % role.num_heads for item in (query, key)):
                return None
            if attn_mask is not None:
                by_query = attn_mask.expand(*query.shape[:-2], *attn_mask.shape[-2:])
                attn_mask = _by_head(by_query, role.num_heads)
            query, key = (_by_head(item, role.num_heads) for item in (query, key))
        return cls(query, key, attn_mask, is_causal, scale)

    @property
    def factor(self) -> float:
        """Factor on the products of query and key."""
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    @property
    def attends_to_itself(self) -> bool:
        return self.query.shape[-2] == self.key.shape[-2]

    def logits(self, at_most: int | None = None) -> Tensor:
        rows, count = _spread(self.query, at_most), self.query.shape[-2]
        if at_most is None:
            return self.logits_at(rows[:, None], lambda x: x)
        return self.logits_at(
            rows[:, None], lambda tensor: tensor.expand(*tensor.shape[:-2], count, -1)[..., rows, :]
        )

    def logits_at(self, places: Tensor, chosen: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits at ``places`` (..., 1) of queries; ``chosen`` selects their rows."""
        key = _widened(self.key.detach()).contiguous()
        query = _widened(chosen(self.query.detach())) * self.factor
        grouped = query.reshape(*key.shape[:-2], -1, key.shape[-1])
        logits = (grouped @ key.mT).view(*query.shape[:-1], key.shape[-2])
        if self.is_causal:
            ahead = torch.arange(key.shape[-2], device=places.device) > places
            logits.masked_fill_(ahead, -math.inf)
        if self.attn_mask is not None:
            # On a CPU adding numbers takes an eighth of the time of `masked_fill_`.
            mask = chosen(self.attn_mask)
            is_bool = mask.dtype == torch.bool
            logits.add_(torch.where(mask, 0.0, -math.inf) if is_bool else _closed(mask))
        return logits


@dataclass(frozen=True)
class SoftmaxCall(AttentionCall):
    """Logits (batch, heads, queries, keys) that enter a softmax, as in eager attention."""

    scores: Tensor

    @classmethod
    def read(
        cls, _: nn.Module, role: Attends, logits: Tensor, *dim: Any, **named: Any
    ) -> SoftmaxCall | None:
        """Read the arguments of a softmax; None if it cannot be one over keys."""
        if logits.ndim not in (3, 4) or named.get("dim", *dim[:1]) not in (-1, logits.ndim - 1):
            return None
        square = logits.shape[-1] == logits.shape[-2]
        divisible = math.prod(logits.shape[:-2]) % role.num_heads == 0
        if not divisible or (logits.ndim == 3 and role.kind == "self" and not square):
            return None
        return cls(_by_head(logits, role.num_heads))

    @property
    def attends_to_itself(self) -> bool:
        return self.scores.shape[-1] == self.scores.shape[-2]

    def logits(self, at_most: int | None = None) -> Tensor:
        logits = self.scores.detach()
        return _closed(_widened(logits[..., _spread(logits, at_most), :]))


@dataclass(frozen=True)
class MultiheadCall:
    """Arguments of `multi_head_attention_forward`; read later, to suit gradient checkpointing."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    autocast_dtype: torch.dtype | None

    @classmethod
    def read(cls, module: nn.Module, _: Attends, *arguments: Any, **named: Any) -> MultiheadCall:
        """Read the arguments of a call by ``module``."""
        kind = arguments[0].device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(module, arguments, named, dtype)

    @property
    def attends_to_itself(self) -> bool:
        return self.arguments[0] is self.arguments[1]

    def weights(self) -> Tensor:
        asked = {"training": False, "need_weights": True, "average_attn_weights": False}
        with torch.no_grad():
            weights = F.multi_head_attention_forward(*self.arguments, **{**self.named, **asked})[1]
        assert weights is not None
        return _widened(weights if weights.ndim == 4 else weights[None])

    @property
    def readable(self) -> bool:
        """Whether query and key are plain projections of the module's inputs."""
        module = self.module
        is_known = isinstance(module, nn.MultiheadAttention)
        return is_known and module.bias_k is None and not module.add_zero_attn

    def projected(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return query and key (batch, heads, tokens, width), with gradients; the mask, in which
        True means "may attend"; and which keys are padding."""
        module = self.module
        assert isinstance(module, nn.MultiheadAttention)
        inputs = [x if x.ndim == 3 else x[:, None] for x in self.arguments[:2]]
        weights = [module.q_proj_weight, module.k_proj_weight]
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)[:2]
        biases = [None] * 2 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
        lowered = self.autocast_dtype
        kind = inputs[0].device.type
        with nullcontext() if lowered is None else torch.autocast(kind, dtype=lowered):
            query, key = map(F.linear, inputs, weights, biases)
        heads = (module.num_heads, -1)
        query, key = (x.unflatten(-1, heads).permute(1, 2, 0, 3) for x in (query, key))
        mask = self.named.get("attn_mask")
        if mask is not None:
            # In the result True means "may attend", in the argument "may not".
            mask = ~mask if mask.dtype == torch.bool else mask
            mask = mask if mask.ndim == 2 else mask.view(*query.shape[:3], key.shape[-2])
        padding = self.named.get("key_padding_mask")
        if padding is not None and padding.dtype != torch.bool:
            dtype = torch.promote_types(padding.dtype, torch.float32)
            padding = unattended(padding[..., None, :], dtype)
        return query, key, mask, padding

    def logits(self, at_most: int | None = None) -> Tensor:
        return self.scaled().logits(at_most)

    @torch.no_grad()
    def scaled(self) -> ScaledDotProductCall:
        """Return the call of the projected query and key, with padded keys in its mask."""
        query, key, mask, padding = self.projected()
        if padding is not None:
            padding = padding[:, None, None]
            if mask is None or mask.dtype == torch.bool:
                mask = ~padding if mask is None else mask & ~padding
            else:
                mask = mask.masked_fill(padding, -math.inf)
        return ScaledDotProductCall(query, key, mask, False, None)


# Largest number of logits in memory at once; steps in a graph from an output back to its kernel.
# With log-sum-exps, one query in _SHARE decides, at least _LEAST of a sequence.
_ENTRIES, _HOPS, _SHARE, _LEAST = 2**24, 6, 64, 2


@torch.no_grad()
def largest_logits(call: AttentionCall, output: Tensor, above: float = -math.inf) -> Tensor:
    """Return the largest logit of each head over all open pairs of tokens, shape (heads,).

    Status: exact. But certified, from above, if a fused kernel keeps its log-sum-exps for the
    backward pass and ``above`` is at least ``2 log(keys)``. Then the queries of the largest sums
    decide. A head in which another query might have a larger logit gets that query's log-sum-exp,
    at most ``log(keys)`` more. Masked keys do not count; without an open key it is -inf.

    Args:
        call: from `AttentionWatcher`.
        output: from `AttentionWatcher`.
        above: smaller logits need not be exact.

    Cost: one product of a 64th of the queries, at least 2 of each sequence, with the keys. Without
    such sums, or with a lower ``above``, of all queries, some sequences at a time. Two projections
    more for a `torch.nn.MultiheadAttention` that returns its weights. The host reads nothing.
    """
    saved = _kept_in_graph(output)
    call, sums = saved or (call, None)
    if isinstance(call, MultiheadCall):
        call = call.scaled()
    if not isinstance(call, ScaledDotProductCall):
        return call.logits().flatten(2).amax(-1).amax(0)
    with torch.autocast(call.query.device.type, enabled=False):
        count, keys = call.query.shape[-2], call.key.shape[-2]
        some = max(_LEAST, count // _SHARE)
        if sums is None or count <= some or above < 2.0 * math.log(keys):
            size = max(1, _ENTRIES // (call.query.shape[-3] * count * keys))
            starts = range(0, len(call.query), size)
            parts = [_of_sequences(call, slice(start, start + size)) for start in starts]
            return parts[0] if len(parts) == 1 else torch.stack(parts).amax(0)
        sums = sums.detach()
        if call.attn_mask is not None:  # a query without a key
            sums = sums.where(sums < math.inf, -math.inf)
        bounds, places = sums.topk(some + 1)
        places, shape = places[..., :some, None], call.query.shape[:-1]

        def chosen(x: Tensor) -> Tensor:
            return x.expand(*shape, -1).gather(-2, places.expand(-1, -1, -1, x.shape[-1]))

        largest = call.logits_at(places, chosen).amax((0, 2, 3))
        return torch.maximum(largest, _widened(bounds[..., some].amax(0)))


def _of_sequences(call: ScaledDotProductCall, some: slice) -> Tensor:
    """Return the largest logit of each head over some sequences."""
    mask = call.attn_mask
    mask = mask if mask is None or mask.ndim < 4 or len(mask) == 1 else mask[some]
    part = replace(call, query=call.query[some], key=call.key[some], attn_mask=mask)
    return part.logits().amax((0, 2, 3))


def _kept_in_graph(output: Tensor) -> tuple[ScaledDotProductCall, Tensor] | None:
    """Return query and key as a fused kernel saved them, and its log-sum-exps. None if there are
    none, or if a hook (recomputation, offloading) saves something else."""
    node: Any = output.grad_fn
    for _ in range(_HOPS):
        if node is None or hasattr(node, "_raw_saved_query"):
            break
        above = (function for function, _ in node.next_functions)
        node = next((n for n in above if n and not hasattr(n, "variable")), None)
    query, sums = (getattr(node, f"_raw_saved_{name}", None) for name in ("query", "logsumexp"))
    hook = getattr(query, "unpack_hook", query)
    if node is None or query is None or sums is None or hook is not None:
        return None
    mask = getattr(node, "_saved_attn_mask", getattr(node, "_saved_attn_bias", None))
    arguments = (node._saved_query, node._saved_key, mask, node._saved_is_causal)
    call = ScaledDotProductCall(*arguments, node._saved_scale)
    sums = node._saved_logsumexp
    return (call, sums) if sums.shape == call.query.shape[:-1] else None


def _widened(values: Tensor) -> Tensor:
    return values.float() if values.dtype.itemsize < 4 else values


def _closed(mask: Tensor) -> Tensor:
    return mask.masked_fill(mask <= _CLOSED, -math.inf)


def _spread(tokens: Tensor, at_most: int | None) -> Tensor:
    """Return the places of some tokens, first and last included; of all if ``at_most`` is None."""
    count = tokens.shape[-2]
    if at_most is None or at_most >= count:
        return torch.arange(count, device=tokens.device)
    return torch.linspace(0, count - 1, at_most, device=tokens.device, dtype=torch.float64).long()


def _by_head(matrices: Tensor, num_heads: int) -> Tensor:
    """Return (..., rows, columns) as (batch, heads, rows, columns)."""
    return matrices.reshape(-1, num_heads, *matrices.shape[-2:])


Receiver = Callable[[Any, Sequence[tuple[AttentionCall, Tensor]]], None]
"""Receives a role and the calls of its module, each with its result."""


class AttentionWatcher:
    """Hooks that call ``receive`` with the attention calls of a module, whenever it returns.

    Calls are `scaled_dot_product_attention`, `multi_head_attention_forward`, and, if a module makes
    neither, a softmax over matrices. A call belongs to the innermost watched module. A module with
    several roles must make one call for each, in their order; otherwise ``receive`` gets none.
    Nested tensors and passes that raise are ignored. Results do not change.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Sequence[Attends],
        receive: Receiver,
        *,
        wanted: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._receive = receive
        self._wanted = wanted
        self._handles: list[Any] = []
        by_module: dict[nn.Module, list[Attends]] = {}
        for role in attention:
            by_module.setdefault(model.get_submodule(role.path), []).append(role)
        with all_or_nothing() as undo:
            undo.later(self.remove)
            for module, roles in by_module.items():
                enter, leave = ObservingHook(self._enter, roles), ObservingHook(self._leave)
                self._handles.append(module.register_forward_pre_hook(enter))
                # Before fully_shard frees the weights that this module projects with.
                first = {"prepend": True, "always_call": True}
                self._handles.append(module.register_forward_hook(leave, **first))

    def remove(self) -> None:
        """Remove the hooks, and this thread's unfinished runs from torch's stack."""
        observer = _observer()
        runs = [partial(observer.end, run) for run in observer.runs if run.watcher is self]
        run_all(
            *[handle.remove for handle in self._handles],
            self._handles.clear,
            *runs,
            observer.settle,
        )

    def forget(self) -> None:
        """End the runs that an interrupt inside an attention module left."""
        _observer().sweep()

    def _enter(self, roles: Sequence[Attends], module: nn.Module, inputs: tuple[Any, ...]) -> None:
        # torch's fast path of evaluation nests
        if any(isinstance(item, Tensor) and item.is_nested for item in inputs):
            return
        wanted = [self._wanted(role) for role in roles]
        frame = None if torch.compiler.is_compiling() else sys._getframe(2)
        _observer().begin(_Run(self, module, roles, wanted, frame))

    def _leave(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        observer = _observer()
        place = (self, module)
        run = next((r for r in reversed(observer.runs) if (r.watcher, r.module) == place), None)
        if run is None:
            return
        observer.end(run)
        if output is None and sys.exc_info()[0] is not None:
            return
        with observing_paused():
            for index, role in enumerate(run.roles):
                if run.wanted[index]:
                    self._receive(role, run.calls_of(index))


@dataclass(eq=False)
class _Run:
    """A running module, its frame, and its calls: one reading for each role, and the result."""

    watcher: AttentionWatcher
    module: nn.Module
    roles: Sequence[Attends]
    wanted: Sequence[bool]
    frame: FrameType | None
    calls: list[tuple[list[AttentionCall | None], Tensor]] = field(default_factory=list)

    def calls_of(self, index: int) -> list[tuple[AttentionCall, Tensor]]:
        """Return the calls of one role."""
        known = [call for call in self.calls if not isinstance(call[0][index], SoftmaxCall)]
        if len(self.roles) > 1:
            complete = (calls for calls in (known, self.calls) if len(calls) == len(self.roles))
            known = next(complete, [])[index : index + 1]
        chosen = known if known or len(self.roles) > 1 else self.calls
        pairs = ((calls[index], output) for calls, output in chosen)
        return [(call, output) for call, output in pairs if call is not None]


class _Observer(TorchFunctionMode):
    """Records the attention calls of one thread; on torch's stack once for each running module."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[_Run] = []
        self.is_paused = False
        self._attends = False

    def begin(self, run: _Run) -> None:
        """Add a run and push the observer on torch's stack."""
        self.sweep()
        self.runs.append(run)
        if any(run.wanted):
            _push_mode(self)

    def end(self, run: _Run) -> None:
        """Drop a run and take the observer off torch's stack."""
        if run in self.runs:
            self.runs.remove(run)
        self.settle()

    def settle(self) -> None:
        """Take the observer off torch's stack until it is there once for each run that needs it.

        An interrupt may have come between the two lists.
        """
        stack = _get_current_function_mode_stack()
        needed = len([run for run in self.runs if any(run.wanted)])
        for _ in range(len([mode for mode in stack if mode is self]) - needed):
            self._pop()

    def _pop(self) -> None:
        above: list[TorchFunctionMode] = []
        try:
            while (top := _pop_mode()) is not self:
                above.append(top)
        finally:
            for mode in reversed(above):
                _push_mode(mode)

    def sweep(self) -> None:
        """End the runs whose module was interrupted, so that no hook ran after it."""
        for run in self.runs and set(self.runs).difference(self.alive()):
            self.end(run)

    def alive(self) -> list[_Run]:
        """Return the runs whose frame is on Python's stack, the innermost last."""
        if torch.compiler.is_compiling():
            return self.runs
        frames, frame = set[FrameType](), sys._getframe(1)
        while frame is not None:
            frames.add(frame)
            frame = frame.f_back
        return [run for run in self.runs if run.frame is None or run.frame in frames]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func not in _READERS or self._attends or self.is_paused:
            return func(*args, **kwargs)
        self._attends = True  # the stack has it once more, for an outer module
        try:
            output = func(*args, **kwargs)
        finally:
            self._attends = False
        for run in {run.watcher: run for run in self.alive()}.values():
            with unseen_by_checkpoints():
                read = _READERS[func].read
                calls = [read(run.module, role, *args, **kwargs) for role in run.roles]
            if any(run.wanted) and any(call is not None for call in calls):
                run.calls.append((calls, output[0] if isinstance(output, tuple) else output))
        return output


_READERS: dict[Any, Any] = {
    F.scaled_dot_product_attention: ScaledDotProductCall,
    F.multi_head_attention_forward: MultiheadCall,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax), SoftmaxCall),
}
_THREAD = threading.local()


def _observer() -> _Observer:
    """Return the observer of this thread; torch's stack belongs to a thread, too."""
    if not hasattr(_THREAD, "observer"):
        _THREAD.observer = _Observer()
    return _THREAD.observer


@contextmanager
def observing_paused() -> Iterator[None]:
    """Silence every `ObservingHook` inside the context."""
    observer = _observer()
    before, observer.is_paused = observer.is_paused, True
    try:
        yield
    finally:
        observer.is_paused = before


class ObservingHook:
    """A hook that only observes, each pass once; in a copy or pickle of its model it does nothing."""

    observes_only = True
    """Tells certificates that the hook changes nothing, so they need not refuse the module."""

    def __init__(self, call: Callable[..., None], *bound: Any) -> None:
        self._call = call
        self._bound = bound

    def __call__(self, *args: Any) -> None:
        if _observer().is_paused or is_repeated():
            return
        with unseen_by_checkpoints():
            self._call(*self._bound, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObservingHook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Do nothing, in place of a copied hook."""
