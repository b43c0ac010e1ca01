"""Certify a case, attack it, and compare."""

import math
from dataclasses import dataclass

import torch

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.errors import ConvergenceError, NotContractiveError, NotLipschitzError

from .compositions import Case

ALLOWANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest excess of a ratio over 1 by rounding, besides the 8 eps of outputs that the attack
subtracts."""
RESTARTS = 4


@dataclass(frozen=True)
class Outcome:
    """The certificate and the attacked slopes of a case."""

    case: Case
    total: float
    """Infinite if `certify` refuses."""
    jacobian: float
    """Jacobian norm of a float64 copy."""
    slope: float
    """Slope between two inputs, in the module's own dtype."""
    slope_dtype: torch.dtype = torch.float32

    @property
    def bounded(self):
        """Whether there is anything to attack."""
        return math.isfinite(self.total)

    @property
    def by_slope(self):
        """Whether the larger of the two was measured in the module's own dtype."""
        return self.slope > self.jacobian

    @property
    def ratio(self):
        """Attacked / certified."""
        worst = max(self.jacobian, self.slope)
        if worst == 0 or not self.bounded:
            return 0.0
        return worst / self.total if self.total else math.inf

    @property
    def violates(self):
        """Whether an attacked slope exceeds the certificate by more than rounding."""
        measured = ((self.jacobian, torch.float64), (self.slope, self.slope_dtype))
        return any(value > self.total * (1 + ALLOWANCE[dtype]) for value, dtype in measured)

    @property
    def dtype(self):
        """Dtype of the larger of the two."""
        return (str(self.slope_dtype) if self.by_slope else "torch.float64").removeprefix("torch.")

    def __str__(self):
        slopes = f"Jacobian {self.jacobian:.6g}, slope in {self.slope_dtype} {self.slope:.6g}"
        numbers = f"certified {self.total:.6g}, {slopes}, ratio {self.ratio:.6f}"
        return f"case {self.case.number}, {self.case}: {numbers}"


def attacked(case):
    """Certify the module and attack it."""
    torch.manual_seed(case.number)
    none = Outcome(case, math.inf, 0.0, 0.0)
    try:
        total = certified(case)
        if not math.isfinite(total):
            return none
        attack = lipschitz_lower_bound(
            case.attacked,
            (case.tokens, case.width),
            norm=case.norm,
            restarts=RESTARTS,
            steps=12 if case.tokens > 16 else 30,
            scales=case.scales,
            radius=case.radius,
            forward_kwargs=case.forward_kwargs,
            dtype=None,
            seed=case.number,
        )
    # Overflow: contractive layers refuse such weights when called, stacks refuse to invert others.
    except (ConvergenceError, NotContractiveError, NotLipschitzError):
        return none
    return Outcome(case, total, attack.jacobian, attack.slope, attack.dtype)


def certified(case):
    """Return the certified bound; infinite if there is none, or if a part of it is only vouched
    for."""
    # The cross-check of `certify` would fail first.
    asked = {"norm": case.norm, "radius": case.radius, **case.asked, "cross_check": False}
    try:
        certificate = certify(case.module, seq_len=case.tokens, **asked)
    except NotLipschitzError:
        return math.inf
    return math.inf if certificate.label == "empirical" else certificate.total
