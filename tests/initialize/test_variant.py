"""The variant t_fixup from the command line, beside its baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wellposed.cli import main
from wellposed.compare.variants import apply_variant
from wellposed.training.config import RunConfig, TrainOptions


def test_compare_trains_t_fixup_beside_post_ln(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text(
        "the quick brown fox jumps over the lazy dog; pack my box.\n" * 80
    )
    words = [
        "compare",
        "char_lm",
        "--data",
        str(tmp_path / "prose.txt"),
        "--seq-len",
        "16",
        "--steps",
        "4",
    ]
    words += ["--eval-every", "2", "--checkpoint-every", "4", "--batch-size", "4", "--seeds", "1"]
    words += [
        "--model.hidden-size",
        "16",
        "--model.num-hidden-layers",
        "1",
        "--model.num-attention-heads",
        "2",
    ]
    assert main([*words, "--variants", "post_ln,t_fixup", "--out", str(tmp_path / "runs")]) == 0
    result = json.loads((tmp_path / "runs" / "t_fixup" / "seed-0" / "result.json").read_text())
    assert result["train_info"]["status"] == "success"
    assert (result["config"]["model"]["norm"], result["config"]["model"]["init"]) == (
        "none",
        "t_fixup",
    )
    baseline = json.loads((tmp_path / "runs" / "post_ln" / "seed-0" / "result.json").read_text())
    assert (
        baseline["train_info"]["parameters"] - result["train_info"]["parameters"] == 2 * 2 * 16
    )  # two LayerNorms


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [
        ("constant", "constant"),
        ("cosine", "cosine"),
        ("inverse_sqrt", "inverse_sqrt"),
        ("inverse_sqrt_warmup", "inverse_sqrt"),
        ("kim2021", "inverse_sqrt"),
    ],
)
def test_there_is_no_warm_up_under_any_schedule(schedule: str, kept: str) -> None:
    base = RunConfig("listops", train=TrainOptions(schedule=schedule, warmup_steps=40, steps=100))
    train = apply_variant("t_fixup", base).train
    assert (train.schedule, train.warmup_steps) == (kept, 0)
    assert train.learning_rate == base.train.learning_rate


def test_other_variants_do_not_inherit_the_initialisation() -> None:
    after = apply_variant("post_ln", apply_variant("t_fixup", RunConfig("listops")))
    assert (after.model.init, after.model.norm) == ("xavier", "post")
