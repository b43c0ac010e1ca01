"""The three calls by which attention modules attend, seen in any model without editing it, and the attention
weights that follow from each."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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


class Attends(Protocol):
    """What `AttentionWatcher` has to know of an attention module."""

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
        """Whether there are as many keys as queries, as where a sequence attends to its own
        tokens."""
        ...

    def weights(self) -> Tensor:
        """Return the weights without dropout, in float32 at least; rows without a key are NaN."""
        ...

    def logits(self, at_most: int | None = None) -> Tensor:
        """Return what the softmax reads, of all queries or of so many that are spread evenly; keys
        that are masked, by True, by -inf or by a number of -5,000 or less, have -inf."""
        ...


_CLOSED = -5e3
"""Masks of this and less close a key: models add -1e4, -1e9 or the least number of a dtype."""


@dataclass(frozen=True)
class ScaledDotProductCall:
    """Query and key (batch, heads, tokens, width) as `scaled_dot_product_attention` received
    them."""

    query: Tensor
    key: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None

    @classmethod
    def read(  # noqa: PLR0917 (torch's own order)
        cls,
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
        """Read the arguments of a call; None where they cannot be divided into the heads of
        ``role``."""
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
        """What products of query and key are multiplied by."""
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    @property
    def attends_to_itself(self) -> bool:
        return self.query.shape[-2] == self.key.shape[-2]

    def weights(self) -> Tensor:
        return self.logits().softmax(-1)

    def logits(self, at_most: int | None = None) -> Tensor:
        query, key = _widened(self.query.detach()), _widened(self.key.detach())
        count = query.shape[-2]
        rows = _spread(query, at_most)
        query = query[..., rows, :]
        if key.shape[-3] != query.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        logits = (query * self.factor) @ key.mT
        if self.is_causal:
            ahead = torch.arange(key.shape[-2], device=rows.device) > rows[:, None]
            logits = logits.masked_fill(ahead, -math.inf)
        if self.attn_mask is not None:
            mask = self.attn_mask.expand(*self.attn_mask.shape[:-2], count, -1)[..., rows, :]
            if mask.dtype == torch.bool:
                logits = logits.masked_fill(~mask, -math.inf)
            else:
                logits = logits + mask.masked_fill(mask <= _CLOSED, -math.inf)
        return logits


@dataclass(frozen=True)
class SoftmaxCall:
    """Logits (batch, heads, queries, keys) on their way into a softmax: attention written out by
    hand, or eager."""

    given: Tensor

    @classmethod
    def read(
        cls, role: Attends, logits: Tensor, dim: int | None = None, *_: Any, **named: Any
    ) -> SoftmaxCall | None:
        """Read the arguments of a softmax; None where it cannot be one over keys."""
        if logits.ndim not in (3, 4) or named.get("dim", dim) not in (-1, logits.ndim - 1):
            return None
        square = logits.shape[-1] == logits.shape[-2]
        divisible = math.prod(logits.shape[:-2]) % role.num_heads == 0
        if not divisible or (logits.ndim == 3 and role.kind == "self" and not square):
            return None
        return cls(_by_head(logits, role.num_heads))

    @property
    def attends_to_itself(self) -> bool:
        return self.given.shape[-1] == self.given.shape[-2]

    def weights(self) -> Tensor:
        return self.logits().softmax(-1)

    def logits(self, at_most: int | None = None) -> Tensor:
        given = self.given.detach()
        given = _widened(given[..., _spread(given, at_most), :])
        return given.masked_fill(given <= _CLOSED, -math.inf)


@dataclass(frozen=True)
class MultiheadCall:
    """The arguments of `multi_head_attention_forward`.

    Nothing is computed during the model's own forward pass, so gradient checkpointing sees the same
    graph twice.
    """

    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    autocast_dtype: torch.dtype | None

    @classmethod
    def read(cls, module: nn.Module, *arguments: Any, **named: Any) -> MultiheadCall:
        """Read the arguments of a call that ``module`` makes."""
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
        """Whether query and key are what the module's projections make of its inputs."""
        module = self.module
        is_known = isinstance(module, nn.MultiheadAttention)
        return is_known and module.bias_k is None and not module.add_zero_attn

    def projected(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return query and key (batch, heads, tokens, width), the mask, in which True means "may
        attend", and which keys are padding; they carry gradients."""
        module = self.module
        assert isinstance(module, nn.MultiheadAttention)
        given = [each if each.ndim == 3 else each[:, None] for each in self.arguments[:2]]
        weights = [module.q_proj_weight, module.k_proj_weight]
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)[:2]
        biases = [None] * 2 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
        lowered = self.autocast_dtype
        kind = given[0].device.type
        with nullcontext() if lowered is None else torch.autocast(kind, dtype=lowered):
            query, key = map(F.linear, given, weights, biases)
        heads = (module.num_heads, -1)
        query, key = (each.unflatten(-1, heads).permute(1, 2, 0, 3) for each in (query, key))
        mask = self.named.get("attn_mask")
        if mask is not None:
            # here True means "may attend", there it means "may not"
            mask = ~mask if mask.dtype == torch.bool else mask
            mask = mask if mask.ndim == 2 else mask.view(*query.shape[:3], key.shape[-2])
        padding = self.named.get("key_padding_mask")
        if padding is not None and padding.dtype != torch.bool:
            padding = padding < torch.finfo(padding.dtype).min / 2
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


# Entries of logits that are held at once, steps in a graph from an output to the kernel before, and
# the queries of a head that are looked at first.
_ENTRIES, _HOPS, _FIRST = 2**24, 6, 3


@torch.no_grad()
def largest_logits(call: AttentionCall, output: Tensor, above: float = -math.inf) -> Tensor:
    """Return the largest logit of each head over all open pairs of tokens, shape (heads,).

    Exact, but for heads in which no logit can be above ``above``: a bound on theirs is returned. It
    is the logarithm of the sum of exponentials of a query's logits, which a fused kernel keeps for
    its backward pass, or ``s max |q_i| max |k_j|``. Keys that are masked do not count; without an
    open key it is -inf.

    Args:
        call, output: as `AttentionWatcher` found them.
        above: what is of interest.

    Cost: a pass over one number a query, and for heads that may be above one product of the queries
    whose sums are largest with the keys; a pass over queries and keys and one product of all, some
    sequences at a time, where these do not decide or no kernel keeps the sums. Of
    `torch.nn.MultiheadAttention` that returns its weights, two projections more.
    """
    kept = _kept_in_graph(output)
    if kept is not None:
        call, sums = kept
        with torch.autocast(call.query.device.type, enabled=False):
            return _by_sums(call, sums.detach(), above)
    if not isinstance(call, ScaledDotProductCall):
        return _largest(call.logits())
    with torch.autocast(call.query.device.type, enabled=False):
        both = [_widened(each.detach()) for each in (call.query, call.key)]
        query, key = (torch.linalg.vector_norm(each, dim=-1).amax(-1) for each in both)
        group = call.query.shape[-3] // call.key.shape[-3]
        largest = (query * key.repeat_interleave(group, -1)).amax(0) * abs(call.factor)
        if call.attn_mask is not None and call.attn_mask.dtype != torch.bool:
            largest = largest + call.attn_mask.amax().clamp_min(0)
        return _with_products(call, largest, ~(largest <= above))


def _by_sums(call: ScaledDotProductCall, sums: Tensor, above: float) -> Tensor:
    """Return the largest logits, or bounds not above ``above``: those of the queries of largest sums
    decide where they are above all other sums."""
    largest = _widened(sums).amax((0, 2))
    heads = (~(largest <= above)).nonzero()
    if not len(heads):
        return largest
    count, keys = call.query.shape[-2], call.key.shape[-2]
    by_head = sums[:, heads[:, 0]].transpose(0, 1).flatten(1)
    first = min(_FIRST, by_head.shape[1] - 1)
    bounds, places = by_head.topk(first + 1)
    sequences, rows = places // count, places % count
    group = call.query.shape[-3] // call.key.shape[-3]
    query, key = call.query.detach(), call.key.detach()
    chosen, against = query[sequences, heads, rows], key[sequences, heads // group]
    logits = (_widened(against) @ _widened(chosen)[..., None]).squeeze(-1) * call.factor
    if call.is_causal:
        logits.masked_fill_(torch.arange(keys, device=rows.device) > rows[..., None], -math.inf)
    if call.attn_mask is not None:
        mask = call.attn_mask.expand(*query.shape[:-1], keys)[sequences, heads, rows]
        is_bool = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -math.inf) if is_bool else logits + mask
    found = logits.flatten(1).amax(1)
    largest[heads[:, 0]] = found
    undecided = torch.zeros_like(largest, dtype=torch.bool)
    undecided[heads[:, 0]] = ~(found >= bounds[:, first])
    return _with_products(call, largest, undecided)


def _with_products(call: ScaledDotProductCall, largest: Tensor, wanted: Tensor) -> Tensor:
    """Put the largest logits of the heads that are ``wanted`` in, from all products."""
    heads = wanted.nonzero().flatten()
    if not len(heads):
        return largest
    query, key, mask = call.query.detach(), call.key.detach(), call.attn_mask
    group = query.shape[-3] // key.shape[-3]
    if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        mask = mask[:, heads]
    if len(heads) < len(largest) or group > 1:
        query, key = query[:, heads], key[:, heads // group]
    size = max(1, _ENTRIES // (len(heads) * query.shape[-2] * key.shape[-2]))
    found = []
    for start in range(0, len(query), size):
        part = slice(start, start + size)
        own = mask if mask is None or mask.ndim < 4 or len(mask) == 1 else mask[part]
        some = replace(call, query=query[part], key=key[part], attn_mask=own)
        found.append(_largest(some.logits()))
    largest[heads] = torch.stack(found).amax(0)
    return largest


def _largest(logits: Tensor) -> Tensor:
    largest = logits.flatten(2).amax(-1).amax(0)
    return largest.where(~(largest < torch.finfo(torch.float32).min / 4), -math.inf)


def _kept_in_graph(output: Tensor) -> tuple[ScaledDotProductCall, Tensor] | None:
    """Return query and key as a fused kernel keeps them for the backward pass, and the logarithms of
    its sums; None without one, and where a hook (recomputation, offloading) keeps something else."""
    node: Any = output.grad_fn
    for _ in range(_HOPS):
        if node is None or hasattr(node, "_raw_saved_query"):
            break
        above = (each for each, _ in node.next_functions)
        node = next((each for each in above if each and not hasattr(each, "variable")), None)
    kept, sums = (getattr(node, f"_raw_saved_{name}", None) for name in ("query", "logsumexp"))
    hook = getattr(kept, "unpack_hook", kept)
    if node is None or kept is None or sums is None or hook is not None:
        return None
    mask = getattr(node, "_saved_attn_mask", getattr(node, "_saved_attn_bias", None))
    given = (node._saved_query, node._saved_key, mask, node._saved_is_causal)
    call = ScaledDotProductCall(*given, node._saved_scale)
    sums = node._saved_logsumexp
    return (call, sums) if sums.shape == call.query.shape[:-1] else None


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _spread(tokens: Tensor, at_most: int | None) -> Tensor:
    """Return the places of some tokens, the first and the last among them; of all where no number
    is given."""
    count = tokens.shape[-2]
    some = count if at_most is None else min(count, at_most)
    return torch.linspace(0, count - 1, some, device=tokens.device, dtype=torch.float64).long()


def _by_head(matrices: Tensor, num_heads: int) -> Tensor:
    """Return (..., rows, columns) as (batch, heads, rows, columns)."""
    return matrices.reshape(-1, num_heads, *matrices.shape[-2:])


Found = Callable[[Any, Sequence[tuple[AttentionCall, Tensor]]], None]
"""Receives a role and, for each call its module made, the call and what it returned."""


class AttentionWatcher:
    """Hooks that call ``found`` whenever one of the attention modules returns, with the attention calls
    that it made.

    Recognised are `scaled_dot_product_attention`, `multi_head_attention_forward` and a softmax over
    matrices, which counts only if a module made none of the other two. A call belongs to the
    innermost module that is watched. If a module holds several roles, each has one call, in the
    order of the roles; with more or fewer calls, nobody knows whose they are, and ``found`` receives
    none. A `TorchFunctionMode` is active only while a module runs, and the results of the model do
    not change. Inside ``found`` the mode is off. Nested tensors are not looked at, nor is a pass that
    raised.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Sequence[Attends],
        found: Found,
        *,
        wanted: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._found = found
        self._wanted = wanted
        self._handles: list[Any] = []
        by_module: dict[nn.Module, list[Attends]] = {}
        for role in attention:
            by_module.setdefault(model.get_submodule(role.path), []).append(role)
        for module, roles in by_module.items():
            enter, leave = ObservingHook(self._enter, roles), ObservingHook(self._leave)
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks off the model, and what they left running in this thread off torch's
        stack."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        observer = _observer()
        for run in [run for run in observer.runs if run.watcher is self]:
            observer.end(run)

    def forget(self) -> None:
        """End what an interrupt inside an attention module left running."""
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
                    self._found(role, run.calls_of(index))


@dataclass(eq=False)
class _Run:
    """A module that runs, the frame it runs in, and by call what it is to each role, and its
    result."""

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
            whole = (each for each in (known, self.calls) if len(each) == len(self.roles))
            known = next(whole, [])[index : index + 1]
        chosen = known if known or len(self.roles) > 1 else self.calls
        return [(call, output) for calls, output in chosen if (call := calls[index]) is not None]


class _Observer(TorchFunctionMode):
    """Notes the attention calls of the modules that run in one thread, whoever watches them.

    It is on torch's stack once for each of them, whatever else is pushed or popped meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[_Run] = []
        self.is_paused = False
        self._attends = False

    def begin(self, run: _Run) -> None:
        """Add a run, and go on torch's stack."""
        self.sweep()
        self.runs.append(run)
        if any(run.wanted):
            _push_mode(self)

    def end(self, run: _Run) -> None:
        """Drop a run, and leave torch's stack."""
        self.runs.remove(run)
        if any(run.wanted) and self in _get_current_function_mode_stack():
            above: list[TorchFunctionMode] = []
            while (top := _pop_mode()) is not self:
                above.append(top)
            for mode in reversed(above):
                _push_mode(mode)

    def sweep(self) -> None:
        """End the runs that an interrupt left, in which no hook ran after the module."""
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
        self._attends = True  # it is on the stack once more below, for a module around
        try:
            output = func(*args, **kwargs)
        finally:
            self._attends = False
        for run in {run.watcher: run for run in self.alive()}.values():
            calls = [_READERS[func](run, role, *args, **kwargs) for role in run.roles]
            if any(run.wanted) and any(call is not None for call in calls):
                run.calls.append((calls, output[0] if isinstance(output, tuple) else output))
        return output


_READERS: dict[Any, Callable[..., AttentionCall | None]] = {
    F.scaled_dot_product_attention: lambda _, *given, **named: ScaledDotProductCall.read(
        *given, **named
    ),
    F.multi_head_attention_forward: lambda run, _, *given, **named: MultiheadCall.read(
        run.module, *given, **named
    ),
}
for _softmax in (F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax):
    _READERS[_softmax] = lambda _, *given, **named: SoftmaxCall.read(*given, **named)
_THREAD = threading.local()


def _observer() -> _Observer:
    """Return the observer of this thread, as torch's stack is the thread's."""
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
    """A hook that only observes; a copy or pickle of its model has a hook that does nothing."""

    observes_only = True
    """It returns nothing and changes nothing, so that a certificate need not refuse the module."""

    def __init__(self, call: Callable[..., None], *bound: Any) -> None:
        self._call = call
        self._bound = bound

    def __call__(self, *args: Any) -> None:
        if not _observer().is_paused:
            self._call(*self._bound, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservingHook:
        return ObservingHook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObservingHook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Do nothing: what a copy's hook calls."""
