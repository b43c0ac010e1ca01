"""Tasks whose headline is a score of generated text: compared by it, and learnt or not by the
loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.edited import edited

from wellposed.report import aggregate, build_report


@pytest.fixture
def runs(tmp_path: Path, make_run: Any) -> Path:
    """Write two variants with two seeds; the second has the better BLEU and has not learnt its
    targets."""
    for variant, scores, loss in (("post_ln", (20.0, 22.0), 2.0), ("oc3", (25.0, 26.0), 6.0)):
        for seed, score in enumerate(scores):
            folder = make_run(
                tmp_path / variant / f"seed-{seed}", task="translation", variant=variant, seed=seed
            )
            values = {"bleu": score, "loss": loss}
            with edited(folder / "result.json") as result:
                result["results"]["translation"] = {
                    f"{name},{split}": value
                    for name, value in values.items()
                    for split in ("test", "valid")
                }
                result["headline"] = "bleu"
                result["higher_is_better"] = {"bleu": True, "loss": False, "perplexity": False}
                result["reference"] = {"loss": 5.5, "perplexity": 244.7}
    (tmp_path / "compare.json").write_text(json.dumps({"variants": ["post_ln", "oc3"]}))
    return tmp_path


def test_bleu_is_the_headline_and_the_loss_says_what_learnt(runs: Path) -> None:
    task = aggregate([runs]).tasks[0]
    assert (task.metric, task.higher_is_better) == ("bleu,test", True)
    assert (task.reference_metric, task.reference_value) == ("loss,valid", 5.5)
    first, second = task.variants
    assert (first.metrics["bleu,test"].mean, first.learned) == (21.0, True)
    assert (second.metrics["bleu,test"].mean, second.learned) == (25.5, False)
    assert first.metrics["bleu,test"].standard_error == pytest.approx(1.0)
    assert second.comparison is not None
    assert second.comparison.mean_difference == pytest.approx(4.5)


def test_the_page_shows_it(runs: Path, tmp_path: Path) -> None:
    page = build_report([runs], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Test BLEU: higher is better" in page
    assert "validation loss (nats) 6 is no better than the reference 5.5" in page
