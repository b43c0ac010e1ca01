"""Where a run computes: its device, and the processes that a launcher made."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState

from wellposed.errors import ConfigError
from wellposed.training.config import TrainOptions
from wellposed.training.loop.processes import refuse_sharding

FP16_DEVICES = ("cuda",)


def build_accelerator(options: TrainOptions) -> Accelerator:
    """Return the accelerator of ``options.device`` over the processes that a launcher made, by gloo
    without a GPU.

    Raises:
        ConfigError: the device is not there, cannot be chosen under a launcher, or cannot compute
            in the precision; or the launcher is to shard the weights.
    """
    refuse_sharding()
    kind, _, index = options.device.partition(":")
    _check_device(options.device, kind, index)
    on_cpu = kind == "cpu" or (kind == "auto" and not torch.accelerator.is_available())
    if index:
        torch.cuda.set_device(int(index))
    earlier = PartialState._shared_state.get("device")
    if earlier is not None and kind not in ("auto", earlier.type):
        AcceleratorState._reset_state(
            reset_partial_state=True
        )  # an earlier run of this process chose another device
    accelerator = Accelerator(
        cpu=on_cpu, mixed_precision="no"
    )  # half precision is an explicit autocast in the step
    if options.precision == "fp16" and accelerator.device.type not in FP16_DEVICES:
        raise ConfigError(
            f"train.precision = 'fp16' on {accelerator.device}: only CUDA devices train in it; give"
            " --precision bf16 or fp32, or --device cuda"
        )
    return accelerator


def _check_device(wanted: str, kind: str, index: str) -> None:
    if index and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"train.device = {wanted!r} with several processes, which take one GPU each; give"
            " --device cuda or leave it out, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    present = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind in present and int(index or 0) >= present[kind]:
        there = [f"{name}:{number}" for name, count in present.items() for number in range(count)]
        raise ConfigError(
            f"train.device = {wanted!r} is not on this machine, which has:"
            f" {', '.join(['cpu', *there])}"
        )
