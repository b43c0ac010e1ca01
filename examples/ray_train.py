"""One run in two workers of Ray Train on this machine: each calls `wellposed_lab.training.loop.train.train`,
unchanged.

Needs `pip install ray[train]`. On a cluster, `out` is a folder that every node sees.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig as RayRun
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def worker(options: dict[str, Any]) -> None:
    """Be one process of the run; Ray has set RANK, WORLD_SIZE and the address."""
    from wellposed.model_options import ModelOptions
    from wellposed_lab.training.config import RunConfig, TrainOptions
    from wellposed_lab.training.loop.train import train

    config = RunConfig(
        "char_lm",
        {"limit_chars": 20000, "seq_len": 64},
        model=ModelOptions(hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
        train=TrainOptions(steps=4, batch_size=8, eval_batches=2),
    )
    train(config, Path(options["out"]), resume="auto", progress=False)


if __name__ == "__main__":
    from wellposed_lab.training.folder.result import read_result

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        TorchTrainer(
            worker,
            train_loop_config={"out": str(out)},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RayRun(storage_path=folder),
        ).fit()
        ray.shutdown()
        result = read_result(out)
        assert result is not None
        print(f"{result.status}: {result.result['train_info']['tokens']} tokens by two workers")
