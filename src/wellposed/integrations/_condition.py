"""What every adapter logs: the numbers of a `Monitor` and the parts of a penalty, by role, under
the same names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from torch import nn

from wellposed.measurement import Monitor
from wellposed.penalize import OrthogonalityPenalty

WORST_IS_LEAST = ("sigma_min", "stable_rank")


class ConditionMetrics:
    """Return ``cond/<role>/<number>/max`` and ``/mean`` over the weights of each role, and
    ``penalty/<strength>``.

    Status: as `wellposed.Monitor` and `OrthogonalityPenalty.terms`. Where small is bad
    (``sigma_min``, ``stable_rank``) ``/min`` is in the place of ``/max``. A penalty is summed over
    the layers; ``penalty/total`` is the sum of all, and its numbers are left out until it has been
    called once. A step is measured once, however often it is logged.

    Args:
        penalty: the penalty in use, or None.
        every: measure at every ``every``-th step that is logged.
        spectra: also ``sigma_min`` and ``condition_number``, by SVD.
        details: also ``cond/<stack>.<layer>.<role>/<number>`` of every weight and
        ``penalty/<term>`` of every layer.

    Cost: that of `wellposed.Monitor.step` at each step that is measured.

    >>> from torch import nn
    >>> sorted(ConditionMetrics()(nn.TransformerEncoderLayer(16, 4, 32), step=1))[:2]
    ['cond/feedforward_in/orthogonality_error/max', 'cond/feedforward_in/orthogonality_error/mean']
    """

    def __init__(
        self,
        penalty: OrthogonalityPenalty | None = None,
        *,
        every: int = 1,
        spectra: bool = False,
        details: bool = False,
    ) -> None:
        self.penalty = penalty
        self.every = every
        self.spectra = spectra
        self.details = details
        self._monitor: Monitor | None = None
        self._step: int | None = None
        self._metrics: dict[str, float] = {}

    def __call__(self, model: nn.Module, *, step: int) -> dict[str, float]:
        """Return the metrics of ``model`` at ``step``; empty where this step is not due."""
        if self._monitor is None:
            self._monitor = Monitor(model, self.every, spectra=self.spectra)
        if step != self._step:
            self._step = step
            measured = self._monitor.step()
            parts = _penalty_parts(self.penalty) if measured and self.penalty is not None else {}
            self._metrics = {**_conditions_by_role(measured), **_penalty_by_role(parts)}
            if self.details:
                self._metrics |= {
                    **measured,
                    **{f"penalty/{name}": value for name, value in parts.items()},
                }
        return dict(self._metrics)


def _conditions_by_role(measured: Mapping[str, float]) -> dict[str, float]:
    by_role: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, value in measured.items():
        weight, _, number = name.removeprefix("cond/").rpartition("/")
        role = weight.partition("@")[0].rpartition(".")[2]
        by_role[role, number].append(value)
    found = {}
    for (role, number), values in by_role.items():
        worst, named = (min(values), "min") if number in WORST_IS_LEAST else (max(values), "max")
        found |= {
            f"cond/{role}/{number}/{named}": worst,
            f"cond/{role}/{number}/mean": fmean(values),
        }
    return found


def _penalty_by_role(parts: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, value in parts.items():
        found[f"penalty/{name.partition('.')[0]}"] += value
    return {**found, "penalty/total": sum(parts.values())} if parts else {}


def _penalty_parts(penalty: OrthogonalityPenalty) -> dict[str, float]:
    return {} if penalty.step == 0 or penalty.removed else penalty.terms()
