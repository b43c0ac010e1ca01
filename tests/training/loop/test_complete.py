"""The end of a run: mean weights where valid says so, and scores of generated text in the
result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tests.support import stub_task as stub
from tests.support.runs import final, rows, same, stop_at

from wellposed.errors import CheckpointError, ConfigError
from wellposed.training.config import ConstrainOptions
from wellposed.training.folder.checkpoints import WeightHistory, mean_tensors
from wellposed.training.loop import train
from wellposed.training.loop.state import Evaluation, TrainerState


def test_the_mean_is_that_of_float64() -> None:
    draws = [{"w": torch.randn(5), "n": torch.tensor(i)} for i in range(7)]
    mean = mean_tensors(draws)
    slow = [sum(float(draw["w"][k]) for draw in draws) / 7 for k in range(5)]
    assert mean["w"].tolist() == pytest.approx(slow, abs=1e-7)
    assert mean["w"].dtype == torch.float32
    assert int(mean["n"]) == 6


def linear(value: float) -> torch.nn.Linear:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, value)
    return module


@pytest.mark.parametrize(
    ("higher", "value", "used"), [(False, 0.9, True), (False, 1.1, False), (True, 1.1, True)]
)
def test_the_mean_is_used_only_where_valid_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, higher: bool, value: float, used: bool
) -> None:
    history, model = WeightHistory(tmp_path, 2), linear(9.0)
    for step, weight in ((1, 8.0), (2, 3.0), (3, 5.0)):
        history.add(step, linear(weight))
    seen = []

    def evaluate(run: Any, split: str) -> Evaluation:
        seen.append(model.weight.item())
        return Evaluation({"score": value}, 4)

    monkeypatch.setattr(train, "evaluate", evaluate)
    quiet: Any = Mock()
    run: Any = SimpleNamespace(
        history=history,
        model=model,
        state=TrainerState(best_step=2, best_value=1.0),
        task=SimpleNamespace(headline="score", higher_is_better=higher),
        accelerator=quiet,
        progress=quiet,
    )
    report = train.choose_mean_weights(run)["weights"]
    assert seen == [4.0]
    assert model.weight.item() == (4.0 if used else 9.0)
    assert run.state.best_examples == (4 if used else 0)
    assert report == {
        "used": "average" if used else "best", "best_step": 2, "averaged_steps": [2, 3], "chosen_by": "score,valid",
        "best": 1.0, "average": value,
    }  # fmt: skip


def test_weights_of_a_course_that_was_given_up_are_forgotten(tmp_path: Path) -> None:
    history = WeightHistory(tmp_path, 3)
    for step in (1, 2, 3, 4):
        history.add(step, linear(0.0))
    assert list(history.files()) == [2, 3, 4]
    history.add(3, linear(0.0))
    assert list(history.files()) == [2, 3]
    (history.folder / "step-3.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="weights to average cannot be read"):
        history.mean()


def test_a_run_ends_with_the_better_weights(tmp_path: Path) -> None:
    """With a learning rate that bounces the mean wins; the weights kept are those of the last
    evaluations."""
    config = stub.make_config(
        learning_rate=0.3, keep_checkpoints=9, average_checkpoints=2, steps=20
    )
    result = stub.run(config, tmp_path / "run").result
    weights = result["weights"]

    def kept(step: int) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors")

    assert weights["averaged_steps"] == [16, 20]
    is_mean = weights["used"] == "average"
    expected = mean_tensors([kept(16), kept(20)]) if is_mean else kept(weights["best_step"])
    assert same(final(tmp_path / "run"), expected)
    assert result["results"]["stub"]["nats,valid"] == pytest.approx(
        min(weights["best"], weights["average"]), rel=1e-6
    )
    assert is_mean is (weights["average"] < weights["best"])
    assert not (tmp_path / "run" / "averaging").exists()


def test_averaging_survives_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stub.make_config(learning_rate=0.3, dropout=0.2, average_checkpoints=3)
    stub.run(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_at(patch, 10)
        assert stub.run(config, tmp_path / "run").status == "cancelled"
    weights = stub.run(config, tmp_path / "run", resume="auto").result["weights"]
    assert weights["averaged_steps"] == [4, 8, 12]
    assert same(final(tmp_path / "run"), final(tmp_path / "straight"))


def test_the_mean_of_orthogonal_weights_is_refused(tmp_path: Path) -> None:
    config = replace(
        stub.make_config(average_checkpoints=2), constrain=ConstrainOptions("blocks.*")
    )
    with pytest.raises(ConfigError, match="the mean of orthogonal matrices is not orthogonal"):
        stub.run(config, tmp_path / "run")


def writing_task(calls: list[Any]) -> Any:
    """Return the stub task with texts to score: how many, and with which weights."""

    class WritingTask(stub.StubTask):
        report_headline = "bleu"

        def generate_metrics(
            self,
            model: Any,
            split: str,
            *,
            batch_size: int,
            max_examples: int | None = None,
            notify: Any,
        ) -> dict[str, float]:
            notify(0, 1)
            calls.append((split, batch_size, max_examples, model.embedding.weight.detach().clone()))
            return {"bleu": float(len(calls))}

        def describe_generation(self) -> dict[str, Any]:
            return {"signatures": {"bleu": "hand-made"}}

    return WritingTask()


def test_generated_text_is_scored_once_with_the_final_weights(tmp_path: Path) -> None:
    calls: list[Any] = []
    result = stub.run(stub.make_config(), tmp_path / "run", task=writing_task(calls)).result
    assert [call[:3] for call in calls] == [("valid", 4, None), ("test", 4, None)]
    assert all(torch.equal(call[3], final(tmp_path / "run")["embedding.weight"]) for call in calls)
    assert result["headline"] == "bleu"
    assert result["higher_is_better"] == {"bleu": True, "loss": False, "nats": False}
    values = result["results"]["stub"]
    assert (values["bleu,valid"], values["bleu,test"]) == (1.0, 2.0)
    assert {"nats,valid", "nats,test", "loss,valid", "loss,test"} < set(values)
    assert result["generation"] == {"signatures": {"bleu": "hand-made"}}
    assert [row["bleu"] for row in rows(tmp_path / "run", "test")] == [2.0]
