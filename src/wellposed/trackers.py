"""Numbers for the tracker that a script has already: one argument, `log_to`, for any of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wellposed.errors import ConfigError

Numbers = Mapping[str, float]
Write = Callable[[Any, Numbers, int, str], None]
"""Writes (tracker, numbers, step, name of the step)."""

ACCEPTED = (
    "a wandb run, the module wandb, mlflow or trackio, a SummaryWriter, a logger, Trainer or module of"
    " Lightning, a Trainer of transformers, an Accelerator, an object with log(numbers, step=), or a"
    " function (numbers, step)"
)
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. /]")


class TrackerLog:
    """Writes numbers of a measured step to trackers; a copy or a pickle of it writes nowhere.

    Args:
        log_to: what `ACCEPTED` lists, or a list of these.
        call: the public call, for errors.
        step_name: name of the step, in rows that have a step of their own.
    """

    def __init__(self, log_to: Any, call: str, step_name: str) -> None:
        self._step_name = step_name
        targets = [] if log_to is None else [log_to]
        if isinstance(log_to, (list, tuple)):
            targets = [*log_to]
        self._targets = [(target, _writer(target, call)) for target in targets]

    def __bool__(self) -> bool:
        return bool(self._targets)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_targets": []}

    def write(self, numbers: Numbers, step: int) -> None:
        """Write numbers that were measured at ``step``; an error of a tracker is raised."""
        for target, write in self._targets:
            write(target, numbers, step, self._step_name)


def _writer(target: Any, call: str) -> Write:
    """Return how a tracker is written to, by what it can do."""
    kinds = () if isinstance(target, type) else _KINDS  # a class is no tracker yet
    for can, write in kinds:
        if can(target):
            return write
    received = repr(target) if isinstance(target, (str, int, float)) else type(target).__name__
    raise ConfigError(f"{call}: log_to = {received}; expected {ACCEPTED}")


def _has(*names: str) -> Callable[[Any], bool]:
    """Return a test for methods; Lightning's properties raise before training, so look at classes."""

    def has(target: Any) -> bool:
        return all(hasattr(type(target), name) or name in _names(target) for name in names)

    return has


def _names(target: Any) -> Iterable[str]:
    return getattr(target, "__dict__", ())


def _to_trainer(trainer: Any, numbers: Numbers, step: int, step_name: str) -> None:
    """Add a row; its own ``step`` is the last one that the Trainer has finished."""
    trainer.log({**numbers, step_name: step})


def _to_loggers(owner: Any, numbers: Numbers, step: int, _: str) -> None:
    for logger in owner.loggers:
        logger.log_metrics(dict(numbers), step=step)


def _to_summary(writer: Any, numbers: Numbers, step: int, _: str) -> None:
    for name, value in numbers.items():
        writer.add_scalar(name, value, step)


def _to_metrics(logger: Any, numbers: Numbers, step: int, _: str) -> None:
    logger.log_metrics(dict(numbers), step=step)


def _to_mlflow(mlflow: Any, numbers: Numbers, step: int, _: str) -> None:
    """Names in mlflow have no ``@`` and no brackets, so these become underscores."""
    plain = {_NOT_IN_MLFLOW.sub("_", name): value for name, value in numbers.items()}
    mlflow.log_metrics(plain, step=step)


def _to_wandb(run: Any, numbers: Numbers, step: int, step_name: str) -> None:
    """Join the next row of the run, whose counter may be another than ours: wandb drops a step that
    is behind it. The number of our step is a metric, and the axis of our numbers."""
    for prefix in sorted({name.partition("/")[0] for name in numbers}):
        run.define_metric(f"{prefix}/*", step_metric=step_name)
    run.log({**numbers, step_name: step}, commit=False)


def _to_log(tracker: Any, numbers: Numbers, step: int, _: str) -> None:
    tracker.log(dict(numbers), step=step)


def _to_call(function: Any, numbers: Numbers, step: int, _: str) -> None:
    function(dict(numbers), step)


def _is_mlflow(target: Any) -> bool:
    return getattr(target, "__name__", "").startswith("mlflow") and hasattr(target, "log_metrics")


def _takes_numbers(target: Any) -> bool:
    """Whether this is a function (numbers, step); a model is a mistake."""
    if not callable(target) or hasattr(target, "named_modules"):
        return False
    try:
        inspect.signature(target).bind({}, 0)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


# The first that fits: a Trainer has `log_metrics` and `log`, a Lightning module both and `loggers`.
_KINDS: tuple[tuple[Callable[[Any], bool], Write], ...] = (
    (_has("log", "callback_handler"), _to_trainer),
    (_has("loggers"), _to_loggers),
    (_has("add_scalar"), _to_summary),
    (_is_mlflow, _to_mlflow),
    (_has("log_metrics"), _to_metrics),
    (_has("log", "define_metric"), _to_wandb),
    (_has("log"), _to_log),
    (_takes_numbers, _to_call),
)
