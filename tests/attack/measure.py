"""Certify a case, attack it, and compare."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.certification import certify, lipschitz_lower_bound
from wellposed.errors import ConvergenceError, NotLipschitzError
from wellposed.linalg import certified_spectral_norm

from ..support.samples import output_of
from .compositions import Case, unrolled

ALLOWANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far above 1 rounding may lift a ratio, beside the 8 eps of the outputs that the attack takes off."""
# The check that `certify` makes of itself would speak first.
_WITHOUT_CROSS_CHECK: dict[str, Any] = {"cross_check": False} if "cross_check" in signature(certify).parameters else {}


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
    def bounded(self) -> bool:
        """Whether there is something to attack."""
        return math.isfinite(self.total)

    @property
    def by_slope(self) -> bool:
        """Whether the worse of the two was measured in the module's own dtype."""
        return self.slope > self.jacobian

    @property
    def ratio(self) -> float:
        """Attacked over certified."""
        worst = max(self.jacobian, self.slope)
        return 0.0 if worst == 0 or not self.bounded else worst / self.total if self.total else math.inf

    @property
    def violates(self) -> bool:
        """Whether the certificate is below what was found, by more than rounding."""
        allowances = (ALLOWANCE[torch.float64], ALLOWANCE[self.slope_dtype])
        found = (self.jacobian, self.slope)
        return any(value > self.total * (1 + allowed) for value, allowed in zip(found, allowances, strict=True))

    @property
    def dtype(self) -> str:
        """In which the worse of the two was found."""
        return (str(self.slope_dtype) if self.by_slope else "torch.float64").removeprefix("torch.")

    def __str__(self) -> str:
        return (
            f"case {self.case.number}, {self.case}: certified {self.total:.6g}, Jacobian {self.jacobian:.6g}, "
            f"slope in {self.slope_dtype} {self.slope:.6g}, ratio {self.ratio:.6f}"
        )


def attacked(case: Case) -> Outcome:
    """Certify the module, or the one that the ascent of its weights ends with, and attack it."""
    if not case.ascends_weights and not math.isfinite(certified(case, case.module)):
        return Outcome(case, math.inf, 0.0, 0.0)
    torch.manual_seed(case.number)
    long = case.tokens > 16
    try:
        found = lipschitz_lower_bound(
            unrolled(case.module),
            (case.tokens, case.width),
            norm=case.norm,
            restarts=4,
            steps=12 if long else 30,
            scales=case.scales,
            radius=case.radius,
            forward_kwargs=case.how,
            perturbed=case.perturbed,
            ascend_weights=_size_of_weights if case.ascends_weights and _matrices(case.module) else None,
            dtype=None,
            seed=case.number,
        )
    except (
        ConvergenceError,
        NotLipschitzError,
    ):  # a contractive layer refuses weights that overflow, when it is called
        return Outcome(case, math.inf, 0.0, 0.0)
    final = case.module
    if found.module is not None:
        final = copy.deepcopy(case.module)
        final.load_state_dict(found.module.state_dict())
    assert found.pair is not None
    # The pair was found on a copy: what counts is what the module itself does with it.
    slope = min(found.slope, _slope(final, case, *found.pair)) if found.slope > 0 else 0.0
    return Outcome(case, certified(case, final), found.jacobian, slope, found.dtype)


def certified(case: Case, module: nn.Module) -> float:
    """Return the certified bound; infinite where there is none."""
    try:
        return certify(
            module, seq_len=case.tokens, norm=case.norm, radius=case.radius, **case.asked, **_WITHOUT_CROSS_CHECK
        ).total
    except NotLipschitzError:
        return math.inf


def _slope(module: nn.Module, case: Case, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        outputs = [output_of(module, value[None], **case.how)[0].double() for value in (x, y)]
    return _size(outputs[0] - outputs[1], case) / _size(x.double() - y.double(), case)


def _size(difference: Tensor, case: Case) -> float:
    if case.norm == "tok":
        difference = difference.norm(dim=-1)
    return float(difference.norm() if case.norm == 2 else difference.abs().max())


def _matrices(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.ndim == 2]


def _size_of_weights(module: nn.Module) -> Tensor:
    """What stands for the certificate while weights are ascended: it grows like the product of their norms.

    It steers the search only; the module that comes out is certified anew.
    """
    sizes = [certified_spectral_norm(weight, method="gram") for weight in _matrices(module)]
    return torch.stack(sizes).clamp_min(1e-30).log().sum().exp()
