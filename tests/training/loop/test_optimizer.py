"""The optimizer of a run: the one that is named, exact through a resume, decayed where it should
be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import stub_task as stub
from tests.support.runs import assert_resumed_bit_for_bit, same
from torch import nn

from wellposed.compare.variants import apply_variant
from wellposed.constrain import MuonAndAdamW
from wellposed.errors import ConfigError
from wellposed.linalg import certified_spectral_norm
from wellposed.training import load_run_model, train
from wellposed.training.config import ConstrainOptions, ModelOptions, RunConfig, TrainOptions
from wellposed.training.loop.build import build_optimizer


@pytest.mark.parametrize("kind", ["muon", "sgd"])
@pytest.mark.parametrize("to", [None, "orthogonal", "spectral"])
def test_a_run_that_is_taken_up_again_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, to: Any
) -> None:
    config = stub.make_config(dropout=0.3, optimizer=kind)
    if to is not None:
        config = replace(config, constrain=ConstrainOptions("*.inner", to=to))
    assert_resumed_bit_for_bit(config, tmp_path)


def test_each_name_is_that_optimizer_with_its_numbers() -> None:
    model = stub.StubModel()
    held = [model.blocks[0].inner.weight]

    def build(where: Any = (), **options: Any) -> Any:
        return build_optimizer(model, TrainOptions(**options), constrained=held, where=where)

    adamw = build(adam_beta2=0.9)
    assert type(adamw) is torch.optim.AdamW
    assert adamw.defaults["betas"] == (0.9, 0.9)
    sgd = build(optimizer="sgd", learning_rate=0.5, weight_decay=0.1)
    assert type(sgd) is torch.optim.SGD
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.5, 0.9)
    muon = build(["blocks.0.inner"], optimizer="muon", momentum=0.8, weight_decay=0.1)
    assert type(muon) is MuonAndAdamW
    assert {group["momentum"] for group in muon.param_groups if group["method"] == "muon"} == {0.8}
    for optimizer in (sgd, muon):
        groups = optimizer.param_groups
        decays = {id(entry): group["weight_decay"] for group in groups for entry in group["params"]}
        assert decays[id(held[0])] == 0.0
        assert decays[id(model.blocks[1].inner.weight)] == 0.1
        assert len(decays) == len(list(model.parameters()))


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer = 'lion', expected 'adamw', 'muon' or 'sgd'"):
        TrainOptions(optimizer="lion")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"momentum = 0\.9 with optimizer = adamw"):
        TrainOptions(momentum=0.9)
    with pytest.raises(ConfigError, match="no trainable matrix"):
        build_optimizer(nn.Embedding(4, 2), TrainOptions(optimizer="muon"))


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
    assert same(whole, resumed)
    held = [weight for name, weight in whole.items() if name.endswith("_proj.weight")]
    assert held
    assert all(float(certified_spectral_norm(weight)) <= 1 + 1e-6 for weight in held)
