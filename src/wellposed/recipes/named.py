"""Named configurations: functions that return a whole `RunConfig` (``--preset NAME``)."""

from __future__ import annotations

from collections.abc import Callable

from wellposed.registry import Registry
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

NAMED: Registry[Callable[[], RunConfig]] = Registry("preset")


@NAMED.register("ptb-mini")
def ptb_mini() -> RunConfig:
    """Penn Treebank characters, pre-LN, 3 layers of width 128: 1.145 nats on test after 14 minutes of one CPU core.

    The data file is given with ``--data``; the row is in ``benchmarks/RESULTS.md``.
    """
    return RunConfig(
        task="char_lm",
        task_options={"seq_len": 128},
        variant="pre_ln",
        model=ModelOptions(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, norm="pre"),
        train=TrainOptions(
            steps=2600,
            batch_size=32,
            learning_rate=3e-3,
            warmup_steps=150,
            weight_decay=0.05,
            eval_every=650,
            checkpoint_every=650,
            log_every=50,
        ),
    )
