"""What every adapter logs: the numbers of a `Monitor` and the parts of a penalty, under the same names."""

from __future__ import annotations

from torch import nn

from wellposed.measurement import Monitor
from wellposed.penalize import OrthogonalityPenalty


class ConditionMetrics:
    """Return ``cond/<stack>.<layer>.<role>/<number>`` of every weight and ``penalty/<part>`` of a penalty.

    Status: as `wellposed.Monitor` and `OrthogonalityPenalty.terms`. ``penalty/total`` is the sum of the parts; the
    penalty's numbers are left out until it has been called once. A step is measured once, however often it is logged.

    Args:
        penalty: the penalty in use, or None.
        every: measure at every ``every``-th step that is logged.
        spectra: also ``sigma_min`` and ``condition_number``, by SVD.

    Cost: that of `wellposed.Monitor.step` at each step that is measured.

    >>> from torch import nn
    >>> sorted(ConditionMetrics()(nn.TransformerEncoderLayer(16, 4, 32), step=1))[0]
    'cond/encoder.0.feedforward_in/orthogonality_error'
    """

    def __init__(self, penalty: OrthogonalityPenalty | None = None, *, every: int = 1, spectra: bool = False) -> None:
        self.penalty = penalty
        self.every = every
        self.spectra = spectra
        self._monitor: Monitor | None = None
        self._step: int | None = None
        self._metrics: dict[str, float] = {}

    def __call__(self, model: nn.Module, *, step: int) -> dict[str, float]:
        """Return the metrics of ``model`` at ``step``; empty where this step is not due."""
        if self._monitor is None:
            self._monitor = Monitor(model, self.every, spectra=self.spectra)
        if step != self._step:
            self._step = step
            self._metrics = self._monitor.step()
            if self._metrics and self.penalty is not None:
                self._metrics |= _penalty_parts(self.penalty)
        return dict(self._metrics)


def _penalty_parts(penalty: OrthogonalityPenalty) -> dict[str, float]:
    if penalty.step == 0 or penalty.removed:
        return {}
    parts = penalty.terms()
    return {**{f"penalty/{name}": value for name, value in parts.items()}, "penalty/total": sum(parts.values())}
