"""Named configurations: functions that return a whole `RunConfig` (``--preset NAME``)."""

from __future__ import annotations

from collections.abc import Callable

from wellposed.registry import Registry
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

NAMED: Registry[Callable[[], RunConfig]] = Registry("preset")


@NAMED.register("ptb-mini")
def ptb_mini() -> RunConfig:
    """Characters of the Penn Treebank with 3 layers of width 128, sized for 15 minutes on two CPU cores.

    The data folder is given with ``--data``.
    """
    return RunConfig(
        task="char_lm",
        task_options={"seq_len": 192},
        model=ModelOptions(hidden_size=128, num_hidden_layers=3, num_attention_heads=4),
        train=TrainOptions(
            steps=3000,
            batch_size=32,
            learning_rate=2e-3,
            warmup_steps=200,
            weight_decay=0.05,
            eval_every=500,
            checkpoint_every=500,
        ),
    )
