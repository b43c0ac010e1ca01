"""Certify a case, attack it, and compare."""

import math
from dataclasses import dataclass

import torch

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.errors import ConvergenceError, NotContractiveError, NotLipschitzError

from .compositions import Case

ALLOWANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far above 1 rounding may lift a ratio, beside the 8 eps of the outputs that the attack takes
off."""
RESTARTS = 4


@dataclass(frozen=True)
class Outcome:
    """The certificate and the attacked slopes of a case."""

    case: Case
    total: float
    """Infinite where `certify` refuses."""
    jacobian: float
    """Of a float64 copy."""
    slope: float
    """Between two inputs, in the module's own dtype."""
    slope_dtype: torch.dtype = torch.float32

    @property
    def bounded(self):
        """Whether there is something to attack."""
        return math.isfinite(self.total)

    @property
    def by_slope(self):
        """Whether the worse of the two was measured in the module's own dtype."""
        return self.slope > self.jacobian

    @property
    def ratio(self):
        """Attacked over certified."""
        worst = max(self.jacobian, self.slope)
        if worst == 0 or not self.bounded:
            return 0.0
        return worst / self.total if self.total else math.inf

    @property
    def violates(self):
        """Whether the certificate is below what was found, by more than rounding."""
        found = ((self.jacobian, torch.float64), (self.slope, self.slope_dtype))
        return any(value > self.total * (1 + ALLOWANCE[dtype]) for value, dtype in found)

    @property
    def dtype(self):
        """In which the worse of the two was found."""
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
        found = lipschitz_lower_bound(
            case.attacked,
            (case.tokens, case.width),
            norm=case.norm,
            restarts=RESTARTS,
            steps=12 if case.tokens > 16 else 30,
            scales=case.scales,
            radius=case.radius,
            forward_kwargs=case.how,
            dtype=None,
            seed=case.number,
        )
    # Overflow; a contractive layer refuses such weights when it is called, a stack to invert others.
    except (ConvergenceError, NotContractiveError, NotLipschitzError):
        return none
    return Outcome(case, total, found.jacobian, found.slope, found.dtype)


def certified(case):
    """Return the certified bound; infinite where there is none, or where somebody has vouched for a
    part of it."""
    # The check that `certify` makes of itself would speak first.
    asked = {"norm": case.norm, "radius": case.radius, **case.asked, "cross_check": False}
    try:
        certificate = certify(case.module, seq_len=case.tokens, **asked)
    except NotLipschitzError:
        return math.inf
    return math.inf if certificate.label == "empirical" else certificate.total
