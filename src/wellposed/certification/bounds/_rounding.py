"""Allowances for float64 rounding in proofs with multipliers, and the check of given multipliers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.errors import ConfigError

UNIT = torch.finfo(torch.float64).eps / 2
MORE_TERMS = 8
"""Roundings of a sum beyond one for each term."""
UNDERFLOW = 1e-250
"""More than the sum of products too small for float64."""


def check_positive(caller: str, multipliers: Sequence[Tensor]) -> None:
    """Raise unless all multipliers are positive finite numbers."""
    total = sum(part.numel() for part in multipliers)
    wrong = sum(int((~(part.isfinite() & (part > 0))).sum()) for part in multipliers)
    if wrong:
        raise ConfigError(
            f"{caller}: {wrong} of {total} multipliers are not positive finite numbers, and a proof"
            " needs T > 0; leave multipliers out to search for them"
        )
