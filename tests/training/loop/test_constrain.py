"""Weights held orthogonal by the loop: named in the configuration, exact through kill and resume,
reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tests.support import stub_task as stub
from tests.support.runs import assert_resumed_bit_for_bit, assert_same_files, final, rows

from wellposed.errors import ConfigError
from wellposed.report import build_report
from wellposed.training import ConstrainOptions, RunConfig, result_schema

WEIGHTS = ("blocks.0.inner.weight", "blocks.1.inner.weight")


def make_config(where: str = "*.inner", **options: Any) -> RunConfig:
    return replace(stub.make_config(dropout=0.3, **options), constrain=ConstrainOptions(where))


def isometry_error(weight: torch.Tensor) -> float:
    """Return the largest |<w_i, w_j> - [i = j]| over pairs of columns, one by one in float64."""
    columns = list(enumerate(weight.double().T))
    return max(abs(float(v @ w) - (i == j)) for i, v in columns for j, w in columns)


def test_named_weights_stay_orthogonal_and_the_run_says_how_well(tmp_path: Path) -> None:
    result = stub.run(make_config(), tmp_path / "run")
    worst = max(isometry_error(final(tmp_path / "run")[name]) for name in WEIGHTS)
    assert worst <= 1e-5
    assert result.result["train_info"]["isometry_error"] == pytest.approx(worst, rel=1e-6)
    logged = [row["isometry_error"] for row in rows(tmp_path / "run", "train")]
    assert len(logged) == 6
    assert max(logged) <= 1e-5
    # That is another quantity.
    assert not any("orthogonality_error" in row for row in rows(tmp_path / "run"))
    free = stub.run(stub.make_config(), tmp_path / "free")
    assert "isometry_error" not in free.result["train_info"]
    assert max(isometry_error(final(tmp_path / "free")[name]) for name in WEIGHTS) > 0.1


@pytest.mark.parametrize("to", ["spectral", "columns"])
def test_the_other_sets_are_held_through_kill_and_resume(tmp_path: Path, to: Any) -> None:
    config = replace(stub.make_config(), constrain=ConstrainOptions("*.inner", to=to, bound=0.5))
    info = stub.run(config, tmp_path / "run").result["train_info"]
    for name in WEIGHTS:
        weight = final(tmp_path / "run")[name].double()
        if to == "spectral":
            assert float(torch.linalg.svdvals(weight)[0]) <= 0.5
        else:
            assert float((weight.norm(dim=0) / 0.5 - 1.0).abs().max()) <= 1e-6
    assert info["constraint_error"] <= 1e-6
    assert "isometry_error" not in info
    assert_resumed_bit_for_bit(config, tmp_path)


def test_runs_of_version_0_1_that_name_it_otherwise_are_read(tmp_path: Path) -> None:
    config = make_config()
    stub.run(config, tmp_path / "run")
    for name in ("metrics.jsonl", "result.json"):
        path = tmp_path / "run" / name
        path.write_text(path.read_text().replace('"isometry_error"', '"orthogonality_error"'))
    (tmp_path / "run" / "manifest.json").unlink()  # there were none
    jsonschema.validate(json.loads((tmp_path / "run" / "result.json").read_text()), result_schema())
    build_report([tmp_path / "run"], tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()
    assert stub.run(config, tmp_path / "run", resume="auto").status == "success"


def test_a_crashed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    class CrashError(Exception):
        """Stands for a kill: nothing of the loop catches it."""

    class Dies(stub.StubTask):
        left = 13  # micro-batches: in the seventh step, after the checkpoint of step 4

        def collate(self, examples: Any) -> Any:
            if len(examples) == 4:
                self.left -= 1
            if not self.left:
                raise CrashError
            return super().collate(examples)

    config = make_config(gradient_accumulation=2, log_every=5)
    stub.run(config, tmp_path / "straight")
    with pytest.raises(CrashError):
        stub.run(config, tmp_path / "killed", task=Dies())
    assert (tmp_path / "killed" / "checkpoint-4").is_dir()
    assert stub.run(config, tmp_path / "killed", resume="auto").status == "success"
    assert_same_files(tmp_path / "straight", tmp_path / "killed")
    straight, killed = (rows(tmp_path / name, "train") for name in ("straight", "killed"))
    assert straight == killed


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("*.inner, *.iner", r"where = '\*\.inner, \*\.iner' cannot.*'\*\.iner' matches no module"),
        (
            "*.inner.bias",
            r"constrain\.where.*blocks\.0\.inner\.bias: shape \(8,\), expected a matrix",
        ),
        ("embedding", r"constrain\.where.*embedding of 11 vectors in 8 dimensions"),
    ],
)
def test_names_that_cannot_be_held_are_refused_before_the_first_step(
    tmp_path: Path, where: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        stub.run(make_config(where), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
