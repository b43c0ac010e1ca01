"""One line where the machine fails a run: its disk, its memory, or another of its processes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator

from wellposed.errors import CheckpointError, WellposedError, is_out_of_memory
from wellposed.training.config import TrainOptions

DISK_PROBLEMS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
LOST_WORKER = "dataloader worker"
LOST_PROCESS = ("gloo", "connection closed by peer", "connection reset by peer", "broken pipe")


@contextmanager
def one_line_failures(out: Path, options: TrainOptions, accelerator: Accelerator) -> Iterator[None]:
    """Turn the end of the disk, of memory or of another process into an error of one line."""
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
        if is_out_of_memory(error):
            raise WellposedError(_out_of_memory(options, accelerator.device)) from error
        if LOST_WORKER in text:
            raise WellposedError(
                f"a process that made batches has ended ({str(error).partition(chr(10))[0]});"
                f" train.num_workers = {options.num_workers}: fewer need less memory, 0 needs no"
                " process; continue with --resume auto"
            ) from error
        lost = isinstance(error, torch.distributed.DistError) or any(
            words in text for words in LOST_PROCESS
        )
        if accelerator.num_processes > 1 and lost:
            raise WellposedError(
                f"process {accelerator.process_index} of {accelerator.num_processes}: another"
                " process of this run has ended, so this one ends too; complete checkpoints are"
                " intact: start all of them again with --resume auto"
            ) from error
        raise


def _out_of_memory(options: TrainOptions, device: torch.device) -> str:
    size, accumulation = options.batch_size, options.gradient_accumulation
    cheaper = "" if options.gradient_checkpointing else ", or give --gradient-checkpointing"
    parts = next((count for count in range(2, size + 1) if size % count == 0), 1)
    smaller = (
        f"the same gradients need less with --batch-size {size // parts} --gradient-accumulation"
        f" {parts * accumulation}"
        if parts > 1
        else "a batch cannot be smaller: shorten the sequences or the model"
    )
    return (
        f"out of memory on {device}: train.batch_size = {size}, gradient_accumulation ="
        f" {accumulation}, gradient_checkpointing = {str(options.gradient_checkpointing).lower()};"
        f" {smaller}{cheaper}; complete checkpoints are intact"
    )
