"""The weights of the last evaluations of a run, of which its final ones may be the mean."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from wellposed.errors import CheckpointError, ConfigError
from wellposed.training.config import RunConfig
from wellposed.training.folder import durable_files
from wellposed.training.folder.tensors import decode, encode, model_tensors

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
        with durable_files.full_disk_in_a_line(path, "the weights to average"):
            self.folder.mkdir(parents=True, exist_ok=True)
            durable_files.replace_file(path, encode(tensors))
            kept = [number for number in self.steps() if number <= step][-self._keep :]
            for number in self.steps():
                if number not in kept:
                    (self.folder / f"step-{number}.safetensors").unlink()

    def steps(self) -> list[int]:
        """Return the steps whose weights are there, in order."""
        names = map(_NAME.match, (path.name for path in self.folder.glob("step-*")))
        return sorted(int(match[1]) for match in names if match)

    def mean(self) -> dict[str, torch.Tensor]:
        """Return the mean of the weights that are there; integers are those of the last step."""
        paths = [self.folder / f"step-{step}.safetensors" for step in self.steps()]
        try:
            return mean_tensors([decode(path.read_bytes())[0] for path in paths])
        except (OSError, ValueError, RuntimeError) as error:
            problem = f"{self.folder}: weights to average cannot be read: {error}"
            raise CheckpointError(problem) from error

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
    mean = dict(last)
    for name, value in last.items():
        if value.is_floating_point():
            total = sum((state[name].double() for state in states), torch.zeros(()))
            mean[name] = (total / len(states)).to(value.dtype)
    return mean
