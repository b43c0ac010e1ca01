"""Weights held orthogonal by the loop: named in the configuration, exact through kill and resume,
reported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file

from wellposed.errors import ConfigError
from wellposed.report import build_report
from wellposed.training import ConstrainOptions, RunConfig, read_metrics, result_schema

WEIGHTS = ("blocks.0.inner.weight", "blocks.1.inner.weight")
FILES = (
    "checkpoint-12/model.safetensors",
    "checkpoint-12/optimizer.safetensors",
    "final/model.safetensors",
)


def make_config(stub: ModuleType, where: str = "*.inner", **options: Any) -> RunConfig:
    return replace(stub.make_config(dropout=0.3, **options), constrain=ConstrainOptions(where))


def isometry_error(weight: torch.Tensor) -> float:
    """Return the largest |<w_i, w_j> - [i = j]| over pairs of columns, one by one in float64."""
    columns = weight.double().T
    return max(
        abs(float(columns[i] @ columns[j]) - (i == j))
        for i in range(len(columns))
        for j in range(len(columns))
    )


def test_named_weights_stay_orthogonal_and_the_run_says_how_well(
    stub: ModuleType, tmp_path: Path
) -> None:
    result = stub.run(make_config(stub), tmp_path / "run")
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    worst = max(isometry_error(weights[name]) for name in WEIGHTS)
    assert worst <= 1e-5
    assert result.result["train_info"]["isometry_error"] == pytest.approx(worst, rel=1e-6)
    jsonschema.validate(json.loads((tmp_path / "run" / "result.json").read_text()), result_schema())
    logged = [
        row["isometry_error"] for row in read_metrics(tmp_path / "run") if row["split"] == "train"
    ]
    assert len(logged) == 6
    assert max(logged) <= 1e-5
    assert not any(
        "orthogonality_error" in row for row in read_metrics(tmp_path / "run")
    )  # that is another quantity
    free = stub.run(stub.make_config(), tmp_path / "free")
    assert "isometry_error" not in free.result["train_info"]
    moved = load_file(tmp_path / "free" / "final" / "model.safetensors")
    assert max(isometry_error(moved[name]) for name in WEIGHTS) > 0.1


@pytest.mark.parametrize("to", ["spectral", "columns"])
def test_the_other_sets_are_held_through_kill_and_resume(
    stub: ModuleType, tmp_path: Path, to: Any
) -> None:
    config = replace(stub.make_config(), constrain=ConstrainOptions("*.inner", to=to, bound=0.5))
    result = stub.run(config, tmp_path / "run")
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    for name in WEIGHTS:
        if to == "spectral":
            assert float(torch.linalg.svdvals(weights[name].double())[0]) <= 0.5
        else:
            assert float((weights[name].double().norm(dim=0) / 0.5 - 1.0).abs().max()) <= 1e-6
    assert result.result["train_info"]["constraint_error"] <= 1e-6
    assert "isometry_error" not in result.result["train_info"]
    jsonschema.validate(json.loads((tmp_path / "run" / "result.json").read_text()), result_schema())
    shutil.copytree(
        tmp_path / "run",
        tmp_path / "again",
        ignore=shutil.ignore_patterns("final", "checkpoint-12"),
    )
    (tmp_path / "again" / "result.json").unlink()
    assert stub.run(config, tmp_path / "again", resume="auto").status == "success"
    assert (tmp_path / "again" / FILES[2]).read_bytes() == (
        tmp_path / "run" / FILES[2]
    ).read_bytes()


def test_runs_of_version_0_1_that_name_it_otherwise_are_read(
    stub: ModuleType, tmp_path: Path
) -> None:
    config = make_config(stub)
    stub.run(config, tmp_path / "run")
    for name in ("metrics.jsonl", "result.json"):
        path = tmp_path / "run" / name
        path.write_text(path.read_text().replace('"isometry_error"', '"orthogonality_error"'))
    (tmp_path / "run" / "manifest.json").unlink()  # there were none
    jsonschema.validate(json.loads((tmp_path / "run" / "result.json").read_text()), result_schema())
    build_report([tmp_path / "run"], tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()
    assert stub.run(config, tmp_path / "run", resume="auto").status == "success"


def test_a_crashed_run_continues_bit_for_bit(stub: ModuleType, tmp_path: Path) -> None:
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

    config = make_config(stub, gradient_accumulation=2, log_every=5)
    stub.run(config, tmp_path / "straight")
    with pytest.raises(CrashError):
        stub.run(config, tmp_path / "killed", task=Dies())
    assert (tmp_path / "killed" / "checkpoint-4").is_dir()
    assert stub.run(config, tmp_path / "killed", resume="auto").status == "success"
    for name in FILES:
        assert (tmp_path / "straight" / name).read_bytes() == (
            tmp_path / "killed" / name
        ).read_bytes()
    straight, killed = (
        [row["isometry_error"] for row in read_metrics(tmp_path / name) if row["split"] == "train"]
        for name in ("straight", "killed")
    )
    assert straight == killed


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (
            "*.inner, *.iner",
            (
                r"constrain\.where = '\*\.inner, \*\.iner' cannot be used.*'\*\.iner' matches no"
                r" module"
            ),
        ),
        (
            "*.inner.bias",
            r"constrain\.where.*blocks\.0\.inner\.bias: shape \(8,\), expected a matrix",
        ),
        ("embedding", r"constrain\.where.*embedding of 11 vectors in 8 dimensions"),
    ],
)
def test_names_that_cannot_be_held_are_refused_before_the_first_step(
    stub: ModuleType, tmp_path: Path, where: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        stub.run(make_config(stub, where), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
