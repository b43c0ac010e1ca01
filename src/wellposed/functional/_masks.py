"""Which keys a mask closes: one rule for the affinity penalty, for `Monitor` and for QK-clip."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

MASKED_ROW = -5e3
"""A row whose largest entry is at most this is masked as a whole: models add -1e4, -1e9 or less."""


def mask_limit(logits: Tensor, dtype: torch.dtype, *, top: Tensor | None = None) -> Tensor:
    """Return the largest logit of each row whose key gets weight zero in a softmax, (..., rows, 1).

    Status: exact for softmax in ``dtype``, except that it is infinity for a row whose largest entry
    is -5,000 or less: softmax, which sees differences alone, spreads a row that is masked as a whole
    evenly. NaN for a row with NaN, so that comparisons close none of its keys.

    Args:
        logits: (..., queries, keys), masked; or a mask that is added to logits.
        dtype: of the softmax: decides which weights are zero (below exp(-104) in float32).
        top: the largest entry of each row, if it is known.

    Cost: one pass over the logits, none with ``top``; the host reads nothing. When not to use: on
    logits without a mask, in which no key is masked, however sharp they are.

    >>> logits = torch.tensor([[0.0, -50.0, -1e3], [-1e4, -1e4, -2e4]])
    >>> (logits <= mask_limit(logits, torch.float32)).tolist()
    [[False, False, True], [True, True, True]]
    """
    logits = logits.detach()
    top = logits.amax(dim=-1, keepdim=True) if top is None else top
    info = torch.finfo(dtype)
    lowest = math.log(info.smallest_normal) + math.log(info.eps / 2)
    return F.threshold(top, MASKED_ROW, math.inf) + lowest


def unattended(logits: Tensor, dtype: torch.dtype, *, top: Tensor | None = None) -> Tensor:
    """Return which keys get weight zero from every query in a softmax, bool (..., keys).

    Status, Args and Cost: `mask_limit`; one comparison more.

    >>> unattended(torch.tensor([[0.0, -1e4], [-1e9, -1e9]]), torch.float32).tolist()
    [False, True]
    """
    return (logits.detach() <= mask_limit(logits, dtype, top=top)).all(dim=-2)
