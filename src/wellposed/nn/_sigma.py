"""A weight divided by its spectral norm, times a learnt gain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wellposed.linalg import compute_dtype


class SigmaReparam(nn.Module):
    """``W -> g W / sigma(W)``, a learnt gain g for each block of rows and each entry of a stack.

    Status: sigma is exact at the start (SVD), then followed by one power step a training pass, so it
    approaches the norm from below: ``|W|_2 <= g`` is empirical, never a certificate.
    Source: Zhai et al. 2023 (arXiv 2303.06296), eq. 1. `torch.nn.utils.parametrizations.spectral_norm`
    divides alike; it has no gain, and takes a stack or a fused weight for one matrix.

    Made by `wellposed.constrain.sigma_reparam_`; registered by `torch.nn.utils.parametrize`.

    Args:
        weight: (out, in), or a stack of them, (entries, out, in); with ``transposed`` (..., in, out).
        blocks: Rows of each block, which part the rows; one of all rows by default.
        transposed: Whether the weight is stored (in, out).
        gain: Of every block, or None for the norms that the blocks have.

    Cost: two matrix-vector products a block and pass, and one pass over the weight; gain and vectors
    are kept. `torch.nn.utils.parametrize.cached` computes it once for several reads.

    >>> reparam = SigmaReparam(torch.diag(torch.tensor([3.0, 1.0])))
    >>> reparam(torch.diag(torch.tensor([3.0, 1.0]))).diagonal().tolist()
    [1.0, 0.3333333432674408]
    """

    block_of_row: Tensor

    def __init__(
        self,
        weight: Tensor,
        blocks: Sequence[range] = (),
        *,
        transposed: bool = False,
        gain: float | None = 1.0,
    ) -> None:
        super().__init__()
        self.transposed = transposed
        stack = self._as_stack(weight.detach())
        self.blocks = [*blocks] or [range(stack.shape[-2])]
        block_of_row = torch.empty(stack.shape[-2], dtype=torch.long)
        norms: list[Tensor] = []
        for index, rows in enumerate(self.blocks):
            block_of_row[list(rows)] = index
            wide = self._rows(stack, rows).to(compute_dtype(stack))
            left, values, right = torch.linalg.svd(wide, full_matrices=False)
            self.register_buffer(f"left{index}", left[..., 0].contiguous())
            self.register_buffer(f"right{index}", right[..., 0, :].contiguous())
            norms.append(values[..., 0])

        measured = torch.stack(norms, -1).to(weight.dtype)
        self.register_buffer("block_of_row", block_of_row.to(weight.device), persistent=False)
        self.gain = nn.Parameter(measured if gain is None else torch.full_like(measured, gain))

    def _as_stack(self, weight: Tensor) -> Tensor:
        oriented = weight.mT if self.transposed else weight
        return oriented if oriented.ndim == 3 else oriented[None]

    @staticmethod
    def _rows(stack: Tensor, rows: range) -> Tensor:
        return stack[:, rows.start : rows.stop : rows.step]

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with the norms ``gain``, in its shape and dtype."""
        stack = self._as_stack(weight)
        with torch.autocast(weight.device.type, enabled=False):
            norms = [self._norm(index, stack) for index in range(len(self.blocks))]
            factor = self.gain.to(norms[0].dtype) / torch.stack(norms, -1)
            scaled = stack * factor[:, self.block_of_row, None].to(weight.dtype)
        oriented = scaled if weight.ndim == 3 else scaled[0]
        return oriented.mT if self.transposed else oriented

    def _norm(self, index: int, stack: Tensor) -> Tensor:
        """Return ``u^T W v`` of each entry, after a power step in training."""
        block = self._rows(stack, self.blocks[index]).to(compute_dtype(stack))
        stored_left: Tensor = getattr(self, f"left{index}")
        stored_right: Tensor = getattr(self, f"right{index}")
        # New tensors, as a later pass changes the stored ones before this one's backward.
        left = stored_left.to(block.dtype, copy=True)
        right = stored_right.to(block.dtype, copy=True)
        if self.training:
            with torch.no_grad():
                fixed = block.detach()
                left = nn.functional.normalize((fixed @ right[..., None])[..., 0], dim=-1)
                right = nn.functional.normalize((left[..., None, :] @ fixed)[..., 0, :], dim=-1)
                stored_left.copy_(left)
                stored_right.copy_(right)
        elif stored_left.dtype != block.dtype:
            # Rounded with the model, as after `model.bfloat16()`: their lengths are not 1.
            left = nn.functional.normalize(left, dim=-1)
            right = nn.functional.normalize(right, dim=-1)

        return ((left[..., None, :] @ block)[..., 0, :] * right).sum(-1)
