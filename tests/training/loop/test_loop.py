"""Whole runs of the stub: what is left behind, what is chosen, and that stopping and resuming
changes nothing."""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import IO, Any, ClassVar

import jsonschema
import pytest
import torch
from safetensors.torch import load_file

from wellposed.errors import CheckpointError, DataError
from wellposed.training import read_metrics, read_result, result_schema
from wellposed.training.folder import durable_files
from wellposed.training.loop.processes import StopRequest

TIMING = ("seconds", "tokens_per_second")


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl without what a clock decides."""
    return [
        {key: value for key, value in row.items() if key not in TIMING}
        for row in read_metrics(folder)
    ]


def final(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


def last(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = {}
    for name in ("model", "optimizer", "random_states_0"):
        found |= {
            f"{name}.{key}": value
            for key, value in load_file(
                folder / f"checkpoint-{step}" / f"{name}.safetensors"
            ).items()
        }
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def stop_at(monkeypatch: pytest.MonkeyPatch, ask: int) -> None:
    """Make the run believe a signal came when it asks for the n-th time whether one did."""
    asked = 0

    def requested(self: StopRequest) -> bool:
        nonlocal asked
        asked += 1
        return asked >= ask

    monkeypatch.setattr(
        StopRequest, "requested", property(requested, lambda self, value: None), raising=False
    )


def test_what_a_run_leaves_behind(stub: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "run"
    task = stub.StubTask()
    result = stub.run(stub.make_config(), out, task=task, command=["wellposed", "train", "stub"])
    assert (result.status, result.exit_code, result.message) == ("success", 0, "")
    names = {path.name for path in out.iterdir()}
    assert {"config.toml", "env.json", "metrics.jsonl", "result.json", "final"} < names
    assert not any(name.startswith(".tmp") for name in names)
    written = json.loads((out / "result.json").read_text())
    assert written == json.loads(json.dumps(result.result))
    jsonschema.validate(written, result_schema(), format_checker=jsonschema.FormatChecker())
    assert written["results"]["stub"].keys() == {
        "loss,valid",
        "nats,valid",
        "loss,test",
        "nats,test",
    }
    assert written["n-samples"]["stub"] == {"valid": 6, "test": 5}
    assert written["train_info"]["steps"] == 12
    assert written["train_info"]["parameters"] == 11 * 8 + 2 * (8 * 8 + 8)
    assert written["command"] == ["wellposed", "train", "stub"]
    assert read_result(out) == result
    found = read_metrics(out)
    assert [(row["step"], row["split"]) for row in found if row["split"] != "train"][:-1] == [
        (4, "valid"), (8, "valid"), (12, "valid"),
    ]  # fmt: skip
    assert [row["step"] for row in found if row["split"] == "train"] == [2, 4, 6, 8, 10, 12]
    assert {
        "step",
        "split",
        "loss",
        "learning_rate",
        "penalty",
        "grad_norm",
        "tokens_per_second",
        "seconds",
    } == set(found[0])
    assert task.read.count("test") == 1


def test_the_best_weights_on_valid_are_kept_and_tested(stub: ModuleType, tmp_path: Path) -> None:
    """A learning rate that ruins late steps: the best evaluation is not the last one."""
    config = stub.make_config(steps=24, learning_rate=0.6, schedule="constant", warmup_steps=20)
    out = tmp_path / "run"
    result = stub.run(config, out)
    losses = {row["step"]: row["loss"] for row in rows(out) if row["split"] == "valid"}
    best = min(losses, key=losses.__getitem__)
    assert best != 24
    info = result.result["train_info"]
    assert (info["best_step"], info["steps"]) == (best, 24)
    assert result.result["results"]["stub"]["loss,valid"] == losses[best]
    assert {path.name for path in out.glob("checkpoint-*")} == {
        f"checkpoint-{best}",
        "checkpoint-24",
    }
    assert same(final(out), load_file(out / f"checkpoint-{best}" / "model.safetensors"))
    # The test loss is that of the saved weights, by the slow route.
    model, task = stub.StubModel(), stub.StubTask()
    model.load_state_dict({**final(out), "head.weight": final(out)["embedding.weight"]})
    batch = task.collate(task.dataset("test"))
    total, count = task.loss_sum(model(batch["input_ids"], batch["attention_mask"]).logits, batch)
    assert result.result["results"]["stub"]["loss,test"] == pytest.approx(
        float(total.detach() / count), rel=1e-5
    )


def test_early_stopping_looks_at_valid_alone(stub: ModuleType, tmp_path: Path) -> None:
    config = stub.make_config(
        steps=80, learning_rate=0.6, schedule="constant", warmup_steps=20, patience=2
    )
    out = tmp_path / "run"
    result = stub.run(config, out)
    losses = [row["loss"] for row in rows(out) if row["split"] == "valid"]
    assert result.status == "success"
    assert result.result["train_info"]["steps"] == 4 * len(losses) < 80
    assert min(losses[-2:]) >= min(losses[:-2])


@pytest.mark.parametrize("ask", [1, 4, 9, 14, 17, 20])
def test_an_interrupted_run_continues_bit_for_bit(
    stub: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: int
) -> None:
    """The stop falls between steps, inside evaluations on valid and inside the one on test."""
    config = stub.make_config(dropout=0.3, log_every=5, keep_checkpoints=2, gradient_accumulation=2)
    stub.run(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_at(patch, ask)
        result = stub.run(config, tmp_path / "run")
    assert (result.status, result.exit_code) == ("cancelled", 130)
    jsonschema.validate(result.result, result_schema())
    assert "--resume auto" in result.message
    assert not (tmp_path / "run" / "final").exists()
    again = stub.run(config, tmp_path / "run", resume="auto")
    assert again.status == "success"
    assert same(last(tmp_path / "run", 12), last(tmp_path / "straight", 12))
    assert same(final(tmp_path / "run"), final(tmp_path / "straight"))
    assert rows(tmp_path / "run") == rows(tmp_path / "straight")


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    stub: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = stub.make_config(dropout=0.3, keep_checkpoints=3)
    stub.run(config, tmp_path / "straight")
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 12)  # after step 8
        stub.run(config, out)
    newest, older = sorted(
        out.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])
    )[:2]
    damaged = newest / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: \d+ bytes, expected \d+ \(cut short\)"
    ):
        stub.run(config, out, resume=newest)
    assert stub.run(config, out, resume="auto", progress=True).status == "success"
    said = capsys.readouterr().err
    assert f"skipped a damaged checkpoint: {damaged}" in said
    assert f"resuming from {older}" in said
    assert same(final(out), final(tmp_path / "straight"))
    assert rows(out) == rows(tmp_path / "straight")


def test_no_usable_checkpoint_is_an_error_not_a_fresh_start(
    stub: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stub.make_config()
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        stub.run(config, tmp_path / "run")
    (tmp_path / "run" / "checkpoint-1" / "optimizer.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint can be used:\n.*optimizer\.safetensors: missing"
    ):
        stub.run(config, tmp_path / "run", resume="auto")


def test_a_full_disk_ends_the_run_and_loses_nothing(
    stub: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stub.make_config(dropout=0.3)
    stub.run(config, tmp_path / "straight")
    write, count = durable_files.write_synced, 0

    def full(path: Path, data: bytes) -> None:
        nonlocal count
        count += path.name == "optimizer.safetensors"
        if count == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "write_synced", full)
        with pytest.raises(
            CheckpointError,
            match=r"checkpoint-8: .*No space left.*checkpoint-4 is intact; free space",
        ):
            stub.run(config, out)
    assert [path.name for path in out.glob("*checkpoint-*")] == ["checkpoint-4"]
    assert stub.run(config, out, resume="auto").status == "success"
    assert same(final(out), final(tmp_path / "straight"))
    assert rows(out) == rows(tmp_path / "straight")


def test_a_disk_that_fills_up_at_the_very_end(
    stub: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = durable_files.open_replacing

    def full(path: Path) -> AbstractContextManager[IO[bytes]]:
        if path.name == "result.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path)

    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "open_replacing", full)
        with pytest.raises(
            CheckpointError, match=r"result\.json: cannot be written: No space left on device"
        ):
            stub.run(stub.make_config(), tmp_path / "run")
    result = stub.run(stub.make_config(), tmp_path / "run", resume="auto")
    assert result.status == "success"
    assert [row["split"] for row in read_metrics(tmp_path / "run")].count("test") == 1


def test_a_finished_run_is_returned_as_it_is(stub: ModuleType, tmp_path: Path) -> None:
    first = stub.run(stub.make_config(), tmp_path / "run")
    stamp = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    task = stub.StubTask()
    assert stub.run(stub.make_config(), tmp_path / "run", resume="auto", task=task) == first
    assert task.read == []
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == stamp


def test_seeds(stub: ModuleType, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        stub.run(stub.make_config(dropout=0.3, seed=seed), tmp_path / name)
    assert same(final(tmp_path / "a"), final(tmp_path / "b"))
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert not same(final(tmp_path / "a"), final(tmp_path / "c"))


def test_variants_of_a_seed_see_the_same_batches_and_dropout(
    stub: ModuleType, tmp_path: Path
) -> None:
    """A model that draws more numbers for its weights, and one of another width, change nothing of
    the stream."""
    seen: dict[str, list[Any]] = {}
    masks: dict[str, list[Any]] = {}

    def recorder(name: str, width: int, draws: int) -> Any:
        def make(config: Any, task: Any) -> Any:
            model = stub.StubModel(width, 1, 0.5, extra_draws=draws)
            seen[name], masks[name] = [], []
            model.register_forward_pre_hook(
                lambda module, args, kwargs: seen[name].append(kwargs["input_ids"].tolist()),
                with_kwargs=True,
            )
            dropout = model.blocks[0].dropout
            dropout.register_forward_hook(
                lambda module, args, output: (
                    masks[name].append((output == 0).tolist()) if module.training else None
                )
            )
            return model

        return make

    for name, width, draws in (("a", 8, 0), ("b", 8, 1000), ("c", 16, 0)):
        stub.run(
            stub.make_config(variant=name), tmp_path / name, model=recorder(name, width, draws)
        )
    assert seen["a"] == seen["b"] == seen["c"]
    assert masks["a"] == masks["b"]
    assert masks["a"] != masks["c"]


def test_evaluation_draws_no_random_numbers_and_ignores_the_batch_size(
    stub: ModuleType, tmp_path: Path
) -> None:
    often = stub.make_config(dropout=0.3, eval_every=1, checkpoint_every=12)
    stub.run(often, tmp_path / "often")
    stub.run(stub.make_config(dropout=0.3, eval_every=12, checkpoint_every=12), tmp_path / "once")
    assert same(last(tmp_path / "often", 12), last(tmp_path / "once", 12))


def test_fewer_validation_batches(stub: ModuleType, tmp_path: Path) -> None:
    result = stub.run(stub.make_config(steps=4, eval_batches=1), tmp_path / "run")
    assert result.result["n-samples"]["stub"] == {"valid": 4, "test": 5}


def test_a_split_that_is_empty(stub: ModuleType, tmp_path: Path) -> None:
    class NoTest(stub.StubTask):
        sizes: ClassVar = {"train": 8, "valid": 3, "test": 0}

    with pytest.raises(DataError, match="test split is empty"):
        stub.run(stub.make_config(steps=2), tmp_path / "run", task=NoTest())


def test_a_folder_copied_elsewhere_still_resumes(
    stub: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stub.make_config()
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        stub.run(config, tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for name in ("here", "there"):
        assert stub.run(config, tmp_path / name, resume="auto").status == "success"
    assert same(final(tmp_path / "here"), final(tmp_path / "there"))
