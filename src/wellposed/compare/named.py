"""Named configurations: functions that return a whole `RunConfig` (``--preset NAME``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wellposed.registry import Registry
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

NAMED: Registry[Callable[[], RunConfig]] = Registry("preset", entry_points="wellposed.presets")


@NAMED.register("ptb-mini")
def ptb_mini() -> RunConfig:
    """Penn Treebank characters, pre-LN, 3 layers of width 128: 1.145 nats on test after 14 minutes
    of one CPU core.

    The data file is given with ``--data``; the row is in ``benchmarks/HISTORY.md``.
    """
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    every: dict[str, Any] = {"eval_every": 650, "checkpoint_every": 650, "log_every": 50}
    rate: dict[str, Any] = {"learning_rate": 3e-3, "warmup_steps": 150, "weight_decay": 0.05}
    train = TrainOptions(steps=2600, batch_size=32, **rate, **every)
    model = ModelOptions(**sizes, norm="pre")
    return RunConfig("char_lm", {"seq_len": 128}, "pre_ln", model, train=train)


@NAMED.register("multi30k-mini")
def multi30k_mini() -> RunConfig:
    """Multi30k De-En, pre-LN, 3 + 3 layers of width 256, joint BPE of 6,000: BLEU 38.5 after 27
    minutes of one core.

    On test_2016_flickr with beam 4, the mean of the last three evaluations being better on valid
    than the last. The data folder is given with ``--data``; the row is in
    ``benchmarks/HISTORY.md``.
    """
    data = {"src": "de", "tgt": "en", "vocab_size": 6000, "generate_beams": 4}
    batches = {"max_tokens": 128, "tokens_per_batch": 2048}
    sizes: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = ModelOptions(**sizes, intermediate_size=512, norm="pre", activation="relu", dropout=0.1)
    every: dict[str, Any] = {"eval_every": 100, "checkpoint_every": 100, "log_every": 20}
    rate: dict[str, Any] = {"learning_rate": 1.5e-3, "schedule": "inverse_sqrt_warmup"}
    rate |= {"warmup_steps": 150, "label_smoothing": 0.1, "average_checkpoints": 3}
    train = TrainOptions(steps=1400, batch_size=512, **rate, **every)
    return RunConfig("translation", {**data, **batches}, "pre_ln", model, train=train)
