"""A classifier of pairs is trained, loaded and asked from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.words import Cli, succeed

from wellposed.training import load_run_model

SIZES = ["--model.hidden-size", "8", "--model.num-attention-heads", "2"]
SMALL = ["--steps", "2", "--batch-size", "2", "--eval-batches", "1", *SIZES]


@pytest.mark.slow
def test_pairs_are_read_from_lines_with_a_tab(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    succeed("train retrieval --data builtin --num-train 8", SMALL, "--out", [run])
    assert type(load_run_model(run)[0]).__name__ == "WellposedForSequencePairClassification"
    lines, out = tmp_path / "pairs.txt", tmp_path / "labels.txt"
    lines.write_text("one text\tanother text\nthe same\tthe same\n", encoding="utf-8")
    succeed(["predict", str(run), "--input", str(lines), "--output", str(out)])
    labels = out.read_text(encoding="utf-8").splitlines()
    assert len(labels) == 2
    assert all(0.5 <= float(label.split("\t")[1]) <= 1 for label in labels)
    lines.write_text("one text\tanother text\nno tab here\n", encoding="utf-8")
    said = cli(["predict", str(run), "--input", str(lines)], status=1).err
    assert "line 2: 1 texts, expected two with a tab between" in said
