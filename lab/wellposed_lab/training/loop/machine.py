"""The device and the processes of a run, and one-line errors if they fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState

from wellposed import errors
from wellposed.errors import CheckpointError, ConfigError, WellposedError
from wellposed_lab.training.config import RunConfig, TrainOptions

SHARDING_BY_LAUNCHER = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
NOT_TRAINED = {"precision": ("fp16", "bf16"), "margin_loss": ("hinge", "certified")}
"""Choices of older runs that can still be read but not trained, and their replacements."""


def build_accelerator(options: TrainOptions) -> Accelerator:
    """Return the accelerator of ``options.device`` over the launcher's processes (CPU: gloo).

    Raises:
        ConfigError: a missing device, one chosen under a launcher, a removed precision or loss, or
            a launcher that shards the weights.
    """
    for name, (gone, instead) in NOT_TRAINED.items():
        if getattr(options, name) == gone:
            option = f"--{name.replace('_', '-')} {instead}"
            raise ConfigError(f"train.{name} = {gone!r} can no longer be trained; give {option}")

    for name in SHARDING_BY_LAUNCHER:
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("true", "1"):
            raise ConfigError(
                f"accelerate launch would shard the weights ({name}), which a run cannot do; launch"
                " with --multi_gpu or --cpu, or use Hugging Face's Trainer, which has its own flags for"
                " sharding"
            )

    kind, _, index = options.device.partition(":")
    if index and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"train.device = {options.device!r} with several processes, which take one GPU each; give"
            " --device cuda or leave it out, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )

    present = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind in present and int(index or 0) >= present[kind]:
        devices = [f"{name}:{number}" for name, count in present.items() for number in range(count)]
        has = ", ".join(["cpu", *devices])
        raise ConfigError(
            f"train.device = {options.device!r} is not on this machine, which has: {has}"
        )

    on_cpu = kind == "cpu" or (kind == "auto" and not torch.accelerator.is_available())
    if index:
        torch.cuda.set_device(int(index))

    earlier = PartialState._shared_state.get("device")
    # A Trainer of this process may have asked for compilation, and an earlier run for another device.
    is_elsewhere = earlier is not None and kind not in ("auto", earlier.type)
    AcceleratorState._reset_state(reset_partial_state=is_elsewhere)
    # Half precision is an explicit autocast in the step.
    return Accelerator(cpu=on_cpu, mixed_precision="no")


def sum_over_processes(accelerator: Accelerator, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` over all processes."""
    if accelerator.num_processes == 1:
        return values
    total: Any = accelerator.reduce(values.to(accelerator.device), reduction="sum")
    return total


DISK_PROBLEMS = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM]
DISK_PROBLEMS += [errno.EIO]
LOST_PROCESS = ("gloo", "connection closed by peer", "connection reset by peer", "broken pipe")


@contextmanager
def one_line_failures(out: Path, config: RunConfig, accelerator: Accelerator) -> Iterator[None]:
    """Turn a full disk, full memory or a lost process into an error of one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_PROBLEMS:
            raise
        raise CheckpointError(
            f"{error.filename or out}: cannot be written: {error.strerror}; complete checkpoints"
            " are intact; make room or give access, then continue with --resume auto"
        ) from error
    except (RuntimeError, MemoryError) as error:
        text = str(error).lower()
        if errors.is_out_of_memory(error):
            raise WellposedError(_out_of_memory(config, accelerator)) from error
        lost = isinstance(error, torch.distributed.DistError)
        lost = lost or any(words in text for words in LOST_PROCESS)
        if accelerator.num_processes > 1 and lost:
            raise WellposedError(
                f"process {accelerator.process_index} of {accelerator.num_processes}: another"
                " process of this run has ended, so this one ends too; complete checkpoints are"
                " intact: start all of them again with --resume auto"
            ) from error
        raise


def _out_of_memory(config: RunConfig, accelerator: Accelerator) -> str:
    """Return a message about memory, with three ways to need less."""
    return (
        f"out of memory on {accelerator.device} with batch_size = {config.train.batch_size}; give a"
        " smaller --batch-size with as much more --gradient-accumulation for the same gradients,"
        " --gradient-checkpointing, or shorter inputs for another result; complete checkpoints are"
        " intact"
    )
