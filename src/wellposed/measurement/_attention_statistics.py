"""Entropy, sensitivity and orthogonality error of attention weights, per head."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.functional import attention_entropy, softmax_sensitivity


class AttentionStatistics:
    """Sums per head, for one attention module: of entropy and sensitivity over queries, of err_orth
    over examples."""

    def __init__(self) -> None:
        self.entropy: Tensor | None = None
        self.sensitivity: Tensor | None = None
        self.error: Tensor | None = None
        self.queries = 0
        self.examples = 0
        self.masked = 0

    def add(self, probabilities: Tensor, real: Tensor | None) -> None:
        """Add weights ``(batch, heads, queries, keys)``; ``real`` (batch, queries) leaves out
        padded queries."""
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
        totals = [
            torch.where(keep, values, zero).sum((0, 2)).cpu() for values in (entropy, sensitivity)
        ]
        self.entropy = _added(self.entropy, totals[0])
        self.sensitivity = _added(self.sensitivity, totals[1])
        self.queries += int(keep.sum())

    def per_head(self) -> dict[str, list[float]] | None:
        """Return the means per head by the names of a row, or None where no attention was seen."""
        if (
            self.entropy is None
            or self.sensitivity is None
            or self.error is None
            or self.queries == 0
        ):
            return None
        return {
            "attention_entropy": (self.entropy / self.queries).tolist(),
            "attention_sensitivity": (self.sensitivity / self.queries).tolist(),
            "affinity_orthogonality_error": (self.error / self.examples).tolist(),
        }


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def _orthogonality_error(probabilities: Tensor, keep: Tensor) -> Tensor:
    """Return ``max |(A A^T)_ij|`` over queries i != j marked in ``keep`` (batch, queries): per
    head, batch summed.

    McGrath (2024, eq. 3). One example at a time, so that one more N x N matrix per head is held,
    not a batch of them.
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
