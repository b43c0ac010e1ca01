"""``train.optimizer = muon``: other steps than AdamW, held weights in their set, and resumed
exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from wellposed.compare.variants import apply_variant
from wellposed.linalg import certified_spectral_norm
from wellposed.training import load_run_model, train
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

TASK = {"question": "order", "slots": 3, "num_train": 40, "num_valid": 8, "num_test": 8}
MODEL = ModelOptions(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
TRAIN = TrainOptions(steps=6, batch_size=4, eval_every=3, checkpoint_every=3, optimizer="muon")
BASE = RunConfig(task="marked", task_options=TASK, model=MODEL, train=TRAIN)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_run_model(folder)[0].state_dict()


def test_a_held_weight_stays_in_its_set_and_a_longer_run_is_the_run_from_the_start(
    tmp_path: Path,
) -> None:
    config = apply_variant("lipschitz", replace(BASE, train=replace(TRAIN, schedule="constant")))
    train(config, tmp_path / "whole", progress=False)
    train(
        replace(config, train=replace(config.train, steps=3)), tmp_path / "resumed", progress=False
    )
    train(config, tmp_path / "resumed", progress=False, resume="auto", longer=True)
    whole, resumed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    held = [weight for name, weight in whole.items() if name.endswith("_proj.weight")]
    assert held
    assert all(float(certified_spectral_norm(weight)) <= 1 + 1e-6 for weight in held)
