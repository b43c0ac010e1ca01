"""See the attention weights of any model while it runs, without editing it.

Attention is recognised where it happens: `scaled_dot_product_attention` (its weights are recomputed from query and
key), `multi_head_attention_forward`, and a softmax over four-dimensional scores ("eager" attention), each only while
a module that `find_roles` calls attention is running.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from wellposed.functional import attention_entropy, softmax_sensitivity

_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax})


class AttentionStatistics:
    """Sums per head, for one attention module: of entropy and sensitivity over queries, of err_orth over examples."""

    def __init__(self) -> None:
        self.entropy: Tensor | None = None
        self.sensitivity: Tensor | None = None
        self.error: Tensor | None = None
        self.queries = 0
        self.examples = 0
        self.masked = 0

    def add(self, probabilities: Tensor, real: Tensor | None) -> None:
        """Add weights ``(batch, heads, queries, keys)``; ``real`` (batch, queries) leaves out padded queries."""
        entropy = attention_entropy(probabilities).double()
        sensitivity = softmax_sensitivity(probabilities).double()
        batch, _, queries = entropy.shape
        keep = torch.ones(batch, queries, dtype=torch.bool, device=entropy.device)
        if real is not None and real.shape == keep.shape:
            keep = real
        attends = probabilities.isfinite().all(-1).all(1)
        self.masked += int((keep & ~attends).sum())
        keep = keep & attends
        self.error = _added(self.error, _orthogonality_error(probabilities, keep))
        self.examples += int(keep.any(-1).sum())
        keep = keep[:, None, :]
        zero = entropy.new_zeros(())
        totals = [torch.where(keep, values, zero).sum((0, 2)).cpu() for values in (entropy, sensitivity)]
        self.entropy = _added(self.entropy, totals[0])
        self.sensitivity = _added(self.sensitivity, totals[1])
        self.queries += int(keep.sum())

    def per_head(self) -> dict[str, list[float]] | None:
        """Return the means per head by the names of a row, or None where no attention was seen."""
        if self.entropy is None or self.sensitivity is None or self.error is None or self.queries == 0:
            return None
        return {
            "attention_entropy": (self.entropy / self.queries).tolist(),
            "attention_sensitivity": (self.sensitivity / self.queries).tolist(),
            "affinity_orthogonality_error": (self.error / self.examples).tolist(),
        }


class AttentionCapture(TorchFunctionMode):
    """While active, collects `AttentionStatistics` for the modules at ``paths``; results of the model do not change."""

    def __init__(self, model: nn.Module, paths: Iterable[str], real: Callable[[str], Tensor | None]) -> None:
        super().__init__()
        self.statistics = {path: AttentionStatistics() for path in paths}
        self._real = real
        self._running: list[str] = []
        self._handles: list[Any] = []
        for path in self.statistics:
            module = model.get_submodule(path)
            self._handles.append(module.register_forward_pre_hook(self._entering(path)))
            self._handles.append(module.register_forward_hook(self._leaving, always_call=True))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` unchanged and record the attention weights it makes."""
        kwargs = kwargs or {}
        if not self._running:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._record(attention_weights(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            return self._fused(func, args, kwargs)
        elif func in _SOFTMAX:
            result = func(*args, **kwargs)
            if result.ndim == 4:
                self._record(result)
            return result
        return func(*args, **kwargs)

    def _fused(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ask `nn.MultiheadAttention` for its weights, and give the caller what it asked for."""
        asked, average = kwargs.get("need_weights", True), kwargs.get("average_attn_weights", True)
        output, weights = func(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})
        self._record(weights if weights.ndim == 4 else weights[None])
        if not asked:
            return output, None
        return output, weights.mean(-3) if average else weights

    def _record(self, probabilities: Tensor) -> None:
        path = self._running[-1]
        while probabilities.ndim < 4:
            probabilities = probabilities[None]
        self.statistics[path].add(probabilities.flatten(0, -4), self._real(path))

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(_module: nn.Module, _args: Any) -> None:
            self._running.append(path)

        return enter

    def _leaving(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._running.pop()


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def _orthogonality_error(probabilities: Tensor, keep: Tensor) -> Tensor:
    """Return ``max |(A A^T)_ij|`` over queries i != j marked in ``keep`` (batch, queries): per head, batch summed.

    McGrath (2024, eq. 3). One example at a time, so that one more N x N matrix per head is held, not a batch of them.
    """
    total = torch.zeros(probabilities.shape[1], dtype=torch.float64)
    with torch.autocast(probabilities.device.type, enabled=False):
        for matrices, real in zip(probabilities, keep, strict=True):
            if not real.any():
                continue
            rows = matrices[:, real].to(torch.promote_types(matrices.dtype, torch.float32))
            gram = rows @ rows.mT
            gram.diagonal(dim1=-2, dim2=-1).zero_()
            total += gram.abs().amax((-2, -1)).cpu()
    return total


def attention_weights(  # noqa: PLR0917 - the signature of scaled_dot_product_attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the weights ``(..., queries, keys)`` that `scaled_dot_product_attention` uses, without dropout.

    Same arguments; exact to rounding in at least float32. Rows without a key are NaN. Cost: the N x N matrix.
    """
    del value, dropout_p
    query, key = (t.detach().to(torch.promote_types(t.dtype, torch.float32)) for t in (query, key))
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    return scores.softmax(-1)
