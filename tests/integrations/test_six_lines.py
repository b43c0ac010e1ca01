"""The lines of the documentation that take a checkpoint of one's own to a penalised Trainer run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.bert import make_checkpoint

import wellposed as wp

PAGE = Path(__file__).parents[2] / "docs" / "howto.md"


def test_six_lines_penalise_a_checkpoint_in_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 6
    make_checkpoint(tmp_path / "my-checkpoint")
    monkeypatch.chdir(tmp_path)
    rows = [
        {"input_ids": torch.tensor([2, 4 + row % 7, 3]), "labels": row % 2} for row in range(64)
    ]
    began = wp.OrthogonalityPenalty(
        transformers.AutoModel.from_pretrained("my-checkpoint"), key=1e-2, form="paper"
    )().item()
    names = {"rows": rows}
    exec(
        code.replace(
            '"out"', '"out", learning_rate=1e-2, report_to="none", use_cpu=True, save_strategy="no"'
        ),
        names,
    )
    assert names["penalty"]().item() < 0.95 * began
