"""The schema of result.json accepts what a run writes (test_loop) and refuses what a reader could
not trust."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from wellposed.errors import CheckpointError
from wellposed.training import read_result, result_schema


@pytest.fixture(scope="module")
def result(stub: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("schema") / "run"
    values = stub.run(stub.make_config(steps=2), out).result
    jsonschema.validate(values, result_schema())
    return values


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("train_info", "status"), "done"),
        (("train_info", "steps"), -1),
        (("results", "stub", "accuracy"), 0.5),
        (("results", "stub", "accuracy,train,extra"), 0.5),
        (("results", "stub", "loss,test"), "low"),
        (("seed",), 1.5),
        (("git_hash",), 7),
        (("unheard_of",), 1),
        (("schema_version",), 2),
        (("failure",), {"step": 3}),
    ],
)
def test_wrong_values_are_refused(
    result: dict[str, Any], path: tuple[str, ...], value: Any
) -> None:
    broken = copy.deepcopy(result)
    inner = broken
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, result_schema())


def test_reading_results(tmp_path: Path) -> None:
    assert read_result(tmp_path) is None
    (tmp_path / "result.json").write_text('{"train_info": ')
    with pytest.raises(CheckpointError, match=r"result\.json: not a result"):
        read_result(tmp_path)
