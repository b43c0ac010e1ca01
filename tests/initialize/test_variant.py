"""The variant t_fixup from the command line, beside its baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wellposed.cli import main
from wellposed.compare.variants import apply_variant
from wellposed.training.config import RunConfig, TrainOptions


@pytest.mark.slow
def test_compare_trains_t_fixup_beside_post_ln(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text(
        "the quick brown fox jumps over the lazy dog; pack my box.\n" * 80
    )
    out = tmp_path / "runs"
    words = (
        f"compare char_lm --data {tmp_path / 'prose.txt'} --seq-len 16 --steps 4 --eval-every 2"
        " --checkpoint-every 4 --batch-size 4 --seeds 1 --model.hidden-size 16"
        " --model.num-hidden-layers 1 --model.num-attention-heads 2 --variants post_ln,t_fixup"
        f" --out {out}"
    )
    assert main(words.split()) == 0
    result, baseline = (
        json.loads((out / variant / "seed-0" / "result.json").read_text())
        for variant in ("t_fixup", "post_ln")
    )
    assert result["train_info"]["status"] == "success"
    model = result["config"]["model"]
    assert (model["norm"], model["init"]) == ("none", "t_fixup")
    sizes = [each["train_info"]["parameters"] for each in (baseline, result)]
    assert sizes[0] - sizes[1] == 2 * 2 * 16  # two LayerNorms


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
