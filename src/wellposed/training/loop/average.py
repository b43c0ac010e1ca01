"""The mean of the weights of the last evaluations, and the choice between it and the best single
weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wellposed.errors import CheckpointError, ConfigError
from wellposed.training.config import RunConfig
from wellposed.training.folder import durable_files
from wellposed.training.folder.tensors import decode, encode, load_model_tensors, model_tensors

if TYPE_CHECKING:
    from wellposed.training.loop.evaluate import Evaluation

FOLDER = "averaging"
_NAME = re.compile(r"^step-(\d+)\.safetensors$")


def weight_history(config: RunConfig, run_folder: Path) -> WeightHistory | None:
    """Return the history that ``average_checkpoints`` asks for, or None where nothing is averaged.

    Raises:
        ConfigError: weights are held in a set in which their mean would not be.
    """
    count = config.train.average_checkpoints
    if count and config.constrain.where and config.constrain.to != "spectral":
        raise ConfigError(
            f"train.average_checkpoints = {count} with constrain.where ="
            f" {config.constrain.where!r}: the mean of orthogonal matrices is not orthogonal, nor"
            " has that of unit columns unit columns; leave one of them at its default"
        )
    return WeightHistory(run_folder, count) if count else None


class WeightHistory:
    """The weights at the last ``keep`` evaluations, one file each; a run that resumes finds those
    it wrote before."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.folder = run_folder / FOLDER
        self._keep = keep

    def add(self, step: int, model: nn.Module, *, write: bool = True) -> None:
        """Write the weights of ``step`` and forget those before the last ``keep``, or after
        ``step``.

        Of several processes one writes; where weights are sharded the others gather with it.

        Weights of a later step are of a course that was given up by resuming from an earlier
        checkpoint.

        Raises:
            CheckpointError: the disk is full or cannot be written.
        """
        path = self.folder / f"step-{step}.safetensors"
        tensors, _ = model_tensors(model, keep=write)
        if not write:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            durable_files.replace_file(path, encode(tensors))
            kept = [number for number in self.steps() if number <= step][-self._keep :]
            for number in self.steps():
                if number not in kept:
                    (self.folder / f"step-{number}.safetensors").unlink()
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot write the weights to average: {error.strerror or error};"
                " checkpoints are intact; free space on the disk, then continue with --resume auto"
            ) from error

    def steps(self) -> list[int]:
        """Return the steps whose weights are there, in order."""
        names = (
            [path.name for path in self.folder.glob("step-*.safetensors")]
            if self.folder.is_dir()
            else []
        )
        return sorted(int(match[1]) for match in map(_NAME.match, names) if match)

    def mean(self) -> dict[str, torch.Tensor]:
        """Return the mean of the weights that are there; integers are those of the last step."""
        paths = [self.folder / f"step-{step}.safetensors" for step in self.steps()]
        try:
            return mean_tensors([decode(path.read_bytes())[0] for path in paths])
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.folder}: weights to average cannot be read: {error}"
            ) from error

    def remove(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def mean_tensors(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of each float tensor, summed in float64 and rounded once; others are those of
    the last state.

    >>> mean_tensors([{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}])
    {'w': tensor([1.5000])}
    """
    last = states[-1]
    return {
        name: (
            (sum((state[name].double() for state in states), torch.zeros(())) / len(states)).to(
                value.dtype
            )
            if value.is_floating_point()
            else value
        )
        for name, value in last.items()
    }


def choose_weights(
    history: WeightHistory,
    model: nn.Module,
    *,
    best: float,
    best_step: int,
    evaluate: Callable[[], Evaluation],
    metric: str,
    higher_is_better: bool,
) -> tuple[dict[str, Any], Evaluation | None]:
    """Leave the mean weights in ``model`` if they are better on *valid* than its own, which are the
    best so far.

    Returns:
        What was compared and used, for ``result.json``, and the evaluation of the mean where it is
        used.
    """
    steps = history.steps()
    report: dict[str, Any] = {
        "used": "best",
        "best_step": best_step,
        "averaged_steps": steps,
        "chosen_by": f"{metric},valid",
        "best": best,
    }
    if len(steps) < 2:
        return {**report, "average": None}, None
    own = {name: tensor.clone() for name, tensor in model_tensors(model)[0].items()}
    load_model_tensors(model, history.mean())
    found = evaluate()
    value = report["average"] = found.metrics[metric]
    if value > best if higher_is_better else value < best:
        return {**report, "used": "average"}, found
    load_model_tensors(model, own)
    return report, None
