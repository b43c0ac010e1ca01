"""The three attention calls of any model: their logits, weights, and which keys a mask closes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wellposed.functional import MASKED_ROW, mask_limit


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
        """Return the softmax inputs of all queries, or of ``at_most`` spread evenly. Keys that a mask
        leaves without weight have -inf, whatever number it adds: `wellposed.functional.mask_limit`.
        """
        ...


class OpenKeys(NamedTuple):
    """Softmax inputs, with masks as the numbers that they add, and which keys no mask closes."""

    raw: Tensor
    """(..., queries, keys)."""
    top: Tensor
    """The largest of each row, (..., queries, 1)."""
    is_open: Tensor
    """It broadcasts to ``raw``. In a row with NaN no key is open."""


class SeenCall(AttentionCall, Protocol):
    """A call whose softmax inputs are known."""

    @property
    def masked_row(self) -> float:
        """A row whose largest logit is at most this is masked as a whole."""
        ...

    def raw_logits(self) -> Tensor:
        """Return the softmax inputs, with masks as the numbers that they add."""
        ...

    def open_keys(self, at_most: int | None = None) -> OpenKeys:
        """Return what `logits` is made of; ``raw`` may be changed in place."""
        ...

    def logits(self, at_most: int | None = None) -> Tensor:
        raw, _, is_open = self.open_keys(at_most)
        return torch.where(is_open | raw.isnan(), raw, -math.inf)


@dataclass(frozen=True)
class ScaledDotProductCall(SeenCall):
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

    @property
    def adds_mask(self) -> bool:
        """Whether the mask is a number, which is added to the logits."""
        return self.attn_mask is not None and self.attn_mask.dtype != torch.bool

    @property
    def masked_row(self) -> float:
        return MASKED_ROW if self.adds_mask else -math.inf

    def raw_logits(self) -> Tensor:
        return self._raw(_spread(self.query, None)[:, None])

    def raw_logits_at(self, places: Tensor, chosen: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the raw logits at ``places`` (..., 1) of queries; ``chosen`` selects their rows."""
        return self._rows(chosen)._raw(places)

    def open_keys(self, at_most: int | None = None) -> OpenKeys:
        rows = _spread(self.query, at_most)
        count = self.query.shape[-2]
        some = self
        if at_most is not None:
            some = self._rows(lambda x: x.expand(*x.shape[:-2], count, -1)[..., rows, :])
        raw = some._raw(rows[:, None])
        return OpenKeys(raw, raw.amax(-1, keepdim=True), some._is_open(raw))

    def _rows(self, chosen: Callable[[Tensor], Tensor]) -> ScaledDotProductCall:
        mask = None if self.attn_mask is None else chosen(self.attn_mask)
        return replace(self, query=chosen(self.query.detach()), attn_mask=mask)

    def _raw(self, places: Tensor) -> Tensor:
        """Return the raw logits of these queries, which were at ``places`` (..., 1)."""
        key = _widened(self.key.detach()).contiguous()
        query = _widened(self.query.detach()) * self.factor
        grouped = query.reshape(*key.shape[:-2], -1, key.shape[-1])
        logits = (grouped @ key.mT).view(*query.shape[:-1], key.shape[-2])
        if self.is_causal:
            ahead = torch.arange(key.shape[-2], device=places.device) > places
            logits.masked_fill_(ahead, -math.inf)
        if self.attn_mask is not None:
            # On a CPU adding numbers takes an eighth of the time of `masked_fill_`.
            mask = self.attn_mask
            logits.add_(mask if self.adds_mask else torch.where(mask, 0.0, -math.inf))
        return logits

    def _is_open(self, raw: Tensor) -> Tensor:
        """Return which keys no mask closes, by the raw logits of the same queries."""
        mask = self.attn_mask
        if mask is None:  # the same keys in each sequence and head
            return raw[(slice(1),) * (raw.ndim - 2)].ne(-math.inf)
        if not self.adds_mask:
            return raw.ne(-math.inf)
        # Of the mask alone: attention may be as sharp, and is no mask.
        limit = mask_limit(mask, torch.promote_types(mask.dtype, torch.float32))
        is_open = (mask > limit).expand(*mask.shape[:-1], raw.shape[-1])
        return is_open & raw.ne(-math.inf) if self.is_causal else is_open


@dataclass(frozen=True)
class SoftmaxCall(SeenCall):
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

    @property
    def masked_row(self) -> float:
        return MASKED_ROW

    def raw_logits(self) -> Tensor:
        return _widened(self.scores.detach())

    def open_keys(self, at_most: int | None = None) -> OpenKeys:
        raw = _widened(self.scores.detach()[..., _spread(self.scores, at_most), :])
        top = raw.amax(-1, keepdim=True)
        # In float64, so that sharp attention of a narrower dtype is not taken for a mask.
        return OpenKeys(raw, top, raw > mask_limit(raw, torch.float64, top=top))


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
        True means "may attend"; and the padding (batch, keys): True, or numbers that are added."""
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
        padding = padding if padding is None else padding.view(len(query), -1)
        return query, key, mask, padding

    def logits(self, at_most: int | None = None) -> Tensor:
        return self.scaled().logits(at_most)

    @torch.no_grad()
    def scaled(self) -> ScaledDotProductCall:
        """Return the call of the projected query and key, with the padding in its mask."""
        query, key, mask, padding = self.projected()
        if padding is not None:
            mask = _with_padding(mask, padding[:, None, None])
        return ScaledDotProductCall(query, key, mask, False, None)


def _with_padding(mask: Tensor | None, padding: Tensor) -> Tensor:
    """Return one mask for both; in the mask True means "may attend", in the padding "may not"."""
    if padding.dtype == torch.bool:
        if mask is None:
            return ~padding
        return mask & ~padding if mask.dtype == torch.bool else mask.masked_fill(padding, -math.inf)
    if mask is None:
        return padding
    return torch.where(mask, padding, -math.inf) if mask.dtype == torch.bool else mask + padding


# Largest number of logits in memory at once; steps in a graph from an output back to its kernel.
# With log-sum-exps, one query in _SHARE decides, at least _LEAST of a sequence.
_ENTRIES = 2**24
_HOPS = 6
_SHARE = 64
_LEAST = 2


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
        assert isinstance(call, SoftmaxCall)
        return _largest_open(call, call.raw_logits())
    with torch.autocast(call.query.device.type, enabled=False):
        count = call.query.shape[-2]
        keys = call.key.shape[-2]
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
        places = places[..., :some, None]
        shape = call.query.shape[:-1]

        def chosen(x: Tensor) -> Tensor:
            return x.expand(*shape, -1).gather(-2, places.expand(-1, -1, -1, x.shape[-1]))

        largest = _largest_open(call, call.raw_logits_at(places, chosen))
        return torch.maximum(largest, _widened(bounds[..., some].amax(0)))


def _of_sequences(call: ScaledDotProductCall, some: slice) -> Tensor:
    """Return the largest logit of each head over some sequences."""
    mask = call.attn_mask
    mask = mask if mask is None or mask.ndim < 4 or len(mask) == 1 else mask[some]
    part = replace(call, query=call.query[some], key=call.key[some], attn_mask=mask)
    return _largest_open(part, part.raw_logits())


def _largest_open(call: SeenCall, raw: Tensor) -> Tensor:
    """Return the largest logit of each head, for any rows of its raw logits.

    A key that a mask closes has no weight, so it is the largest of its row only if all are closed.
    """
    if call.masked_row == -math.inf:
        return raw.amax((0, 2, 3))
    return F.threshold(raw.amax(-1), call.masked_row, -math.inf).amax((0, 2))


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
    call = ScaledDotProductCall(
        node._saved_query, node._saved_key, mask, node._saved_is_causal, node._saved_scale
    )
    sums = node._saved_logsumexp
    return (call, sums) if sums.shape == call.query.shape[:-1] else None


def _widened(values: Tensor) -> Tensor:
    return values.float() if values.dtype.itemsize < 4 else values


def _spread(tokens: Tensor, at_most: int | None) -> Tensor:
    """Return the places of some tokens, first and last included; of all if ``at_most`` is None."""
    count = tokens.shape[-2]
    if at_most is None or at_most >= count:
        return torch.arange(count, device=tokens.device)
    return torch.linspace(0, count - 1, at_most, device=tokens.device, dtype=torch.float64).long()


def _by_head(matrices: Tensor, num_heads: int) -> Tensor:
    """Return (..., rows, columns) as (batch, heads, rows, columns)."""
    return matrices.reshape(-1, num_heads, *matrices.shape[-2:])
