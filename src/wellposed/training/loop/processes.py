"""Which of the processes of one run this is, as the launcher says; free of torch."""

from __future__ import annotations

import os

from wellposed.errors import ConfigError

SHARDING_BY_LAUNCHER = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DeepSpeed": "ACCELERATE_USE_DEEPSPEED",
    "Megatron": "ACCELERATE_USE_MEGATRON_LM",
}


def is_first() -> bool:
    """Whether this process writes files and prints results: the only one, or the first that a
    launcher started."""
    return os.environ.get("RANK", "0") == "0"


def is_one_of_several() -> bool:
    """Whether ``torchrun`` or ``accelerate launch`` started this process beside others."""
    return "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def refuse_sharding() -> None:
    """Refuse a configuration of Accelerate that shards weights: `TrainOptions.parallel` alone says
    so.

    Raises:
        ConfigError: it asks for FSDP, DeepSpeed or Megatron.
    """
    asked = [
        name
        for name, variable in SHARDING_BY_LAUNCHER.items()
        if os.environ.get(variable, "").lower() in ("true", "1")
    ]
    if asked:
        raise ConfigError(
            f"accelerate launch is to shard the weights ({asked[0]}), which a run does by an option"
            " of its own: launch with --multi_gpu or --cpu, and give --parallel fsdp"
        )
