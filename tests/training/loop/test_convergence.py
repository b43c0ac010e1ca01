"""A run whose weights cannot be made, or whose step does not converge, has failed and says so in
its folder."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from wellposed.compare.compare import compare
from wellposed.errors import ConvergenceError
from wellposed.report import aggregate
from wellposed.training import (
    ModelOptions,
    RunConfig,
    TrainOptions,
    read_result,
    result_schema,
    train,
)
from wellposed.training.loop.build import build_run_model


@pytest.mark.parametrize("when", ["start", "step"])
def test_a_convergence_error_is_a_failed_run(stub: ModuleType, tmp_path: Path, when: str) -> None:
    config = stub.make_config()

    def broken(*_: Any) -> Any:
        raise ConvergenceError("polar: the (8, 8) matrix holds values that are not finite")

    class Breaking(stub.StubTask):
        def loss_sum(self, *_: Any, **__: Any) -> Any:
            broken()

    keywords = {"model": broken} if when == "start" else {"task": Breaking()}
    result = stub.run(config, tmp_path / "run", **keywords)
    assert result.status == "failed"
    assert "not finite" in result.message
    jsonschema.validate(result.result, result_schema())
    found = read_result(tmp_path / "run")
    assert found is not None
    assert found.status == "failed"
    assert (
        stub.run(config, tmp_path / "run", resume="auto").status == "success"
    )  # nothing stands in the way


def test_a_comparison_goes_on_and_the_report_lists_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(config: RunConfig, task: Any) -> Any:
        if config.variant == "rezero":
            raise ConvergenceError("the initialisation did not converge")
        return build_run_model(config, task)

    defaults = {**(train.__kwdefaults__ or {}), "model": breaking}
    monkeypatch.setattr(train, "__kwdefaults__", defaults)
    base = RunConfig(
        "char_lm",
        {"limit_chars": 9000, "seq_len": 64},
        model=ModelOptions(hidden_size=8, num_attention_heads=2, num_hidden_layers=1),
        train=TrainOptions(steps=2, batch_size=64, eval_batches=1),
    )
    runs = compare(
        base, ["post_ln", "rezero", "pre_ln"], seeds=1, out=tmp_path / "runs", progress=False
    )
    assert [result.status for result in runs.results] == ["success", "failed", "success"]
    assert "rezero" in aggregate(runs.folders).table()
