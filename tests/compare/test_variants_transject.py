"""TransJect and orthogonal weights as variants: any base will do, the right weights are held, and
runs learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from wellposed.compare.variants import EMBEDDING, apply_variant
from wellposed.models import build_model
from wellposed.nn import OrthogonalLinear
from wellposed.tasks import build_task
from wellposed.training import ModelOptions, RunConfig, TrainOptions, read_metrics, train
from wellposed.training.loop.build import build_run_model, constrained_weights

KWARGS: dict[str, Any] = {"vocab_size": 11, "hidden_size": 8}


@pytest.mark.parametrize(
    ("variant", "spectrum"), [("transject", "gram"), ("transject_random", "random")]
)
def test_every_orthogonal_weight_of_a_model_is_held(variant: str, spectrum: str) -> None:
    config = apply_variant(variant, RunConfig("listops"))
    model: Any = build_model("transject", "causal_lm", spectrum=spectrum, num_experts=2, **KWARGS)
    assert set(config.constrain.patterns) == {*model.orthogonal_patterns(), *EMBEDDING}
    held = {id(weight) for weight in constrained_weights(config.constrain, model)}
    maps = {id(part.weight) for part in model.modules() if isinstance(part, OrthogonalLinear)}
    assert held == {*maps, id(model.get_input_embeddings().weight)}
    assert config.constrain.embeddings == "fit"


def test_every_matrix_of_attention_and_feed_forward_is_held_in_the_orthogonal_transformer() -> None:
    config = apply_variant("orthogonal", RunConfig("listops"))
    model = build_model(
        "wellposed", "causal_lm", num_attention_heads=2, num_hidden_layers=2, **KWARGS
    )
    held = {id(weight) for weight in constrained_weights(config.constrain, model)}
    assert held == {
        id(p)
        for path, p in model.named_parameters()
        if ".layers." in path and p.ndim == 2 and "norm" not in path
    }
    assert len(held) == 12


BASES = [
    ModelOptions(),
    ModelOptions(hidden_size=30, num_attention_heads=3),
    ModelOptions(
        norm="none", residual="plain", activation="relu", attention_dropout=0.1, intermediate_size=7
    ),
    ModelOptions(attention="l2_contractive", contractive=0.5, lipschitz_norm="inf", qk_norm=True),
    ModelOptions(
        norm="none", init="t_fixup", num_experts=3, spectrum_norm="trace", num_decoder_layers=2
    ),
]


@pytest.mark.parametrize("model", BASES)
@pytest.mark.parametrize("variant", ["transject", "transject_random"])
def test_a_model_is_built_from_any_base(model: ModelOptions, variant: str) -> None:
    task = build_task("listops", {"num_train": 40, "num_valid": 4, "num_test": 4})
    config = apply_variant(variant, RunConfig("listops", model=model))
    built: Any = build_run_model(config, task)
    expected = (
        model.hidden_size,
        model.num_hidden_layers,
        model.num_experts,
        model.spectrum_norm,
        model.position,
    )
    found = built.config
    assert expected == (
        found.hidden_size, found.num_hidden_layers, found.num_experts, found.spectrum_norm, found.position,
    )  # fmt: skip


def test_the_value_of_the_variant_scales_the_learning_rate() -> None:
    base = RunConfig("listops", train=TrainOptions(learning_rate=0.002))
    assert apply_variant("transject", base).train.learning_rate == pytest.approx(0.01)
    assert apply_variant("transject_random:1", base).train == base.train


def test_a_run_learns_and_says_how_orthogonal_it_stayed(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the north wind and the sun were disputing which was the stronger " * 60)
    base = RunConfig(
        "char_lm",
        {"data": str(text), "seq_len": 16},
        model=ModelOptions(hidden_size=16, num_hidden_layers=2, num_experts=2),
        train=TrainOptions(
            steps=40, batch_size=8, learning_rate=4e-3, eval_every=40, log_every=20, eval_batches=2
        ),
    )
    config = replace(apply_variant("transject", base), variant="transject")
    result = train(config, tmp_path / "run", progress=False, command=[])
    assert result.status == "success", result.message
    values = result.result["results"]["char_lm"]
    assert values["nats_per_char,valid"] < result.result["reference"]["nats_per_char"]
    rows = [row for row in read_metrics(tmp_path / "run") if row["split"] == "train"]
    assert all(0.0 < row["auxiliary_loss"] < 0.01 for row in rows)  # at most the default weight
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    held = [
        weights[name].double()
        for name in weights
        if name.split(".")[-2] in ("left", "right", "up_proj", "basis")
    ]
    worst = max(float((weight.T @ weight - torch.eye(16)).abs().max()) for weight in held)
    assert worst <= result.result["train_info"]["isometry_error"] * (1 + 1e-6) <= 1e-5
