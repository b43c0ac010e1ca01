"""Numbers to log while a model trains, without an engine: one call per step, one flat
dictionary."""

from __future__ import annotations

from torch import nn

from wellposed.call_checks import checked_arguments
from wellposed.measurement._measure import check_measurable, weight_row
from wellposed.measurement._measurement import row_names
from wellposed.options import Size
from wellposed.roles import find_roles

QUICK = ("scale_free_orthogonality_error", "orthogonality_error", "sigma_max", "stable_rank")
EXACT = (*QUICK, "sigma_min", "condition_number")


class Monitor:
    """Every k-th `step` gives ``{"cond/<stack>.<layer>.<role>/<number>": value}`` of every weight
    with a role.

    Status: as `measure`: with ``spectra`` exact, without (the default) empirical and an order of
    magnitude cheaper. The
    names are public: ``cond/encoder.3.query/sigma_max``,
    ``cond/decoder.0.cross_key/orthogonality_error``, ``cond/token_embedding/stable_rank``; a number
    that does not exist (the stable rank of a zero weight) is left out of that step. Weights are
    read where they are; nothing is attached to the model.

    Args:
        model: any model in which `find_roles` finds weights.
        every: measure on the first step and on every ``every``-th after it.
        spectra: also ``sigma_min`` and ``condition_number``, by SVD.

    Raises:
        RoleNotFoundError: no weight is recognised.
        ConfigError: ``every`` is not a positive whole number.
        ConvergenceError: from `step`, where weights hold NaN or infinity.

    Cost: nothing on other steps. When not to use: under sharding, where a weight must be gathered
    first.

    >>> monitor = Monitor(nn.TransformerEncoderLayer(16, 4, 32), every=2)
    >>> [len(monitor.step()) for _ in range(3)]
    [24, 0, 24]
    """

    @checked_arguments
    def __init__(self, model: nn.Module, every: Size = 100, *, spectra: bool = False) -> None:
        self.every = every
        self.spectra = spectra
        self._weights = list(find_roles(getattr(model, "_orig_mod", model)).weights())
        self._steps = 0

    def step(self) -> dict[str, float]:
        """Count one step; return the numbers when they are due, else an empty dictionary."""
        due = self._steps % self.every == 0
        self._steps += 1
        if not due:
            return {}
        check_measurable(self._weights)
        rows = [weight_row(weight, spectra=self.spectra) for weight in self._weights]
        return {
            f"cond/{name}/{number}": row[number]
            for name, row in zip(row_names(rows), rows, strict=True)
            for number in (EXACT if self.spectra else QUICK)
            if row[number] is not None
        }
