"""What every adapter logs: the numbers of a `Monitor` and the parts of a penalty, under the same names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from wellposed.measurement import Monitor, worst_vitals
from wellposed.penalize import OrthogonalityPenalty
from wellposed.roles import structure

WORST_IS_LEAST = ("sigma_min", "stable_rank")


class ConditionMetrics:
    """Return the worst of each number over all weights, ``cond/<number>/max``, and ``penalty/<strength>``.

    Status: as `wellposed.Monitor` and `OrthogonalityPenalty.terms`. Where small is bad
    (``sigma_min``, ``stable_rank``) ``/min`` is in the place of ``/max``. A penalty is summed over
    the layers; ``penalty/total`` is the sum of all, and its numbers are left out until it has been
    called once. A step is measured once, however often it is logged.

    Args:
        penalty: the penalty in use, or None.
        every: measure at every ``every``-th step that is logged.
        spectra: also ``sigma_min`` and ``condition_number``, by SVD.
        vitals: steps of the optimizer between vital signs, see `wellposed.Monitor`; 0: none. The
            worst of each goes by its last name, such as ``vital/logit_max``, as ``train --monitor``
            has it. They are logged with the engine's next row, the worst of the steps since its
            last. Alarms are logged as
            warnings, in each process for its own batches, and kept in ``monitor.alarms``. The
            callbacks of the engines watch by themselves, elsewhere `watch` begins.

    Cost: that of `wellposed.Monitor.step` at each step that is measured.

    >>> from torch import nn
    >>> sorted(ConditionMetrics()(nn.TransformerEncoderLayer(16, 4, 32), step=1))[:2]
    ['cond/orthogonality_error/max', 'cond/scale_free_orthogonality_error/max']
    """

    def __init__(
        self,
        penalty: OrthogonalityPenalty | None = None,
        *,
        every: int = 1,
        spectra: bool = False,
        vitals: int = 0,
    ) -> None:
        self.penalty = penalty
        self.every = every
        self.spectra = spectra
        self.vitals = vitals
        self.monitor: Monitor | None = None
        self._weights: Monitor | None = None
        self._structure: tuple[int, ...] = ()
        self._seen: dict[str, float] = {}
        self._step: int | None = None
        self._metrics: dict[str, float] = {}

    def __call__(self, model: nn.Module, *, step: int) -> dict[str, float]:
        """Return the metrics of ``model`` at ``step``; empty where this step is not due."""
        parts, weights = structure(model), self._weights
        if weights is None or parts != self._structure:  # another model, or another part in it
            steps = 0 if weights is None else weights.steps
            weights = Monitor(model, every=self.every, spectra=self.spectra, vitals=False)
            weights.steps, self._weights, self._structure = steps, weights, parts
        if step != self._step:
            self._step = step
            self._metrics = self._summary(weights.step())
        return dict(self._metrics)

    def watch(self, model: nn.Module, optimizer: Optimizer | None, steps: int = 0) -> None:
        """Put the hooks of ``vitals`` on ``model`` and ``optimizer``, which took so many steps, and
        take earlier hooks off."""
        self.unwatch()
        if self.vitals:
            self.monitor = Monitor(model, optimizer, self.vitals, weights=False)
            self.monitor.steps = steps

    def unwatch(self) -> None:
        """Take the hooks off; ``monitor.alarms`` stays."""
        if self.monitor is not None:
            self.monitor.remove()

    def count_step(self) -> None:
        """Count one step of the optimizer; keep what is worst of its vital signs that are finite,
        if it has any."""
        measured = self.monitor.step() if self.monitor is not None else {}
        finite = {name: value for name, value in measured.items() if math.isfinite(value)}
        for name, value in worst_vitals(finite).items():
            worst = min if name.endswith("/entropy") else max
            self._seen[name] = worst(value, self._seen.get(name, value))

    def vital_signs(self) -> dict[str, float]:
        """Hand over the worst vital signs of the steps since the last call."""
        seen, self._seen = self._seen, {}
        return seen

    def _summary(self, measured: Mapping[str, float]) -> dict[str, float]:
        groups: dict[str, list[float]] = defaultdict(list)
        for name, value in measured.items():
            groups[f"cond/{name.rpartition('/')[2]}"].append(value)
        found = {}
        for name, values in groups.items():
            worst = min if name.endswith(WORST_IS_LEAST) else max
            found[f"{name}/{worst.__name__}"] = worst(values)
        parts = self._penalty_parts() if measured else {}
        if parts:
            found["penalty/total"] = sum(parts.values())
        for name, value in parts.items():
            strength = f"penalty/{name.partition('.')[0]}"
            found[strength] = found.get(strength, 0.0) + value
        return found

    def _penalty_parts(self) -> dict[str, float]:
        penalty = self.penalty
        return penalty.terms() if penalty and penalty.step and not penalty.removed else {}
