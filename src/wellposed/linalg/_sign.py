"""Matrices with the same singular vectors and singular values just below 1, by products alone."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.linalg._tensors import compute_dtype, full_precision

# x -> a x + b x^3 + c x^5 of Jordan et al. 2024 lifts small singular values fast and ends in
# [0.68, 1.21]. Its fixed interval reaches above 1, so it alone holds no ball.
_LIFT = (3.4445, -4.7750, 2.0315)
_LIFTS = 5
# x -> (3 x - x^3) / 2 maps [0, sqrt(3)] into [0, 1], and [0.68, 1.21] to [0.97, 1] in two steps.
_SETTLES = 2


def near_polar_factors(stack: Tensor) -> Tensor:
    """Return ``U f(S) V^T`` of each matrix ``U S V^T``, with ``f`` in [0, 1].

    Status: ``|result|_2 <= 1`` up to rounding (1e-6 in float32), for every input. Singular values of
    at least 1 % of the Frobenius norm end in [0.97, 1]; smaller ones end lower, and 0 stays 0.
    Source: five steps of Jordan et al. 2024 (Muon), whose results reach 1.2, then two of Newton and
    Schulz, which cannot exceed 1.

    Args:
        stack: (..., rows, columns), floating, real, finite.

    Returns:
        The same shape, in float32, or float64 if the input is.

    Cost: 19 products with the smaller Gram matrix, 15 of them in bfloat16 on accelerators; no read.
    When not to use: for a polar factor to tolerance, see `polar_factors`.

    >>> factor = near_polar_factors(torch.diag(torch.tensor([5.0, -2.0])))
    >>> [round(value, 1) for value in factor.diagonal().tolist()]
    [1.0, -1.0]
    """
    dtype = compute_dtype(stack)
    is_wide = stack.shape[-2] < stack.shape[-1]
    point = (stack.mT if is_wide else stack).to(dtype)
    shape = point.shape
    point = point.reshape(-1, *shape[-2:])
    tiny = torch.finfo(dtype).tiny
    # By the largest entry first, as squares of small ones are 0.
    point = point / point.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    point = point / torch.linalg.matrix_norm(point, keepdim=True).clamp_min(tiny)

    a, b, c = _LIFT
    is_fast = dtype == torch.float32 and point.device.type not in ("cpu", "meta")
    lifted = point.bfloat16() if is_fast else point
    for _ in range(_LIFTS):
        gram = lifted.mT @ lifted
        lifted = torch.baddbmm(lifted, lifted, gram.baddbmm(gram, gram, beta=b, alpha=c), beta=a)

    point = lifted.to(dtype)
    with full_precision(point.device.type):
        for _ in range(_SETTLES):
            point = torch.baddbmm(point, point, point.mT @ point, beta=1.5, alpha=-0.5)
    point = point.reshape(shape)
    return point.mT if is_wide else point
