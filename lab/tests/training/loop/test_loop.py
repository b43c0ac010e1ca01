"""Complete runs of the stub: their files, the chosen weights and the scores of generated text. They
are the same after stopping and resuming."""

import errno
import json
import shutil
from typing import ClassVar

import jsonschema
import pytest
import torch
from lab.tests.support import stub_task as stub
from lab.tests.support.runs import TIMING, final, rows, same, stop_at
from safetensors.torch import load_file
from tests.support.words import words as typed

from wellposed.errors import CheckpointError, DataError
from wellposed_lab.report.runs import read_metrics
from wellposed_lab.training.folder import atomic, checkpoints
from wellposed_lab.training.folder.result import read_result, result_schema


def last(folder, step):
    return {
        f"{file.stem}.{key}": value
        for file in (folder / f"checkpoint-{step}").glob("*.safetensors")
        for key, value in load_file(file).items()
    }


def assert_same_run(one, other):
    """Compare the last checkpoint, the final weights and the rows of two runs, bit for bit."""
    assert same(last(one, 12), last(other, 12))
    assert same(final(one), final(other))
    assert rows(one) == rows(other)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


def test_what_a_run_leaves_behind(out):
    task = stub.StubTask()
    result = stub.run(stub.make_config(), out, task=task, command=["wellposed", "train", "stub"])
    assert (result.status, result.exit_code, result.message) == ("success", 0, "")
    names = {path.name for path in out.iterdir()}
    assert {"config.toml", "env.json", "metrics.jsonl", "result.json", "final"} < names
    assert not any(name.startswith(".tmp") for name in names)
    written = json.loads((out / "result.json").read_text())
    assert written == json.loads(json.dumps(result.result))
    jsonschema.validate(written, result_schema(), format_checker=jsonschema.FormatChecker())
    names = [f"{name},{split}" for split in ("valid", "test") for name in ("loss", "nats")]
    assert sorted(written["results"]["stub"]) == sorted(names)
    assert written["n-samples"]["stub"] == {"valid": 6, "test": 5}
    assert written["train_info"]["steps"] == 12
    assert written["train_info"]["parameters"] == 11 * 8 + 2 * (8 * 8 + 8)
    assert written["command"] == ["wellposed", "train", "stub"]
    assert read_result(out) == result
    logged = read_metrics(out)
    assert [(row["step"], row["split"]) for row in logged if row["split"] != "train"][:-1] == [
        (4, "valid"), (8, "valid"), (12, "valid"),
    ]  # fmt: skip
    assert [row["step"] for row in logged if row["split"] == "train"] == [2, 4, 6, 8, 10, 12]
    columns = typed("step split loss learning_rate penalty grad_norm")
    assert sorted(logged[0]) == sorted([*columns, *TIMING])
    assert task.read.count("test") == 1


def test_the_best_weights_on_valid_are_kept_and_tested(out):
    """A learning rate that ruins late steps: the best evaluation is not the last one."""
    config = stub.make_config(steps=24, learning_rate=0.6, warmup_steps=20)
    result = stub.run(config, out)
    losses = {row["step"]: row["loss"] for row in rows(out, "valid")}
    best = min(losses, key=losses.__getitem__)
    assert best != 24
    info = result.result["train_info"]
    assert (info["best_step"], info["steps"]) == (best, 24)
    assert result.result["results"]["stub"]["loss,valid"] == losses[best]
    folders = sorted(path.name for path in out.glob("checkpoint-*"))
    assert folders == sorted([f"checkpoint-{best}", "checkpoint-24"])
    assert same(final(out), load_file(out / f"checkpoint-{best}" / "model.safetensors"))
    # The test loss is that of the saved weights, by the slow route.
    model = stub.StubModel()
    task = stub.StubTask()
    model.load_state_dict({**final(out), "head.weight": final(out)["embedding.weight"]})
    batch = task.collate(task.dataset("test"))
    total, count = task.loss_sum(model(batch["input_ids"], batch["attention_mask"]).logits, batch)
    slow = float(total.detach() / count)
    assert result.result["results"]["stub"]["loss,test"] == pytest.approx(slow, rel=1e-5)


def test_early_stopping_looks_at_valid_alone(out):
    config = stub.make_config(steps=80, learning_rate=0.6, warmup_steps=20, patience=2)
    result = stub.run(config, out)
    losses = [row["loss"] for row in rows(out, "valid")]
    assert result.status == "success"
    assert result.result["train_info"]["steps"] == 4 * len(losses) < 80
    assert min(losses[-2:]) >= min(losses[:-2])


@pytest.mark.parametrize("ask", [1, 4, 9, 14, 17, 20])
def test_stop_and_resume(tmp_path, out, monkeypatch, ask):
    """The stop falls between steps, inside evaluations on valid and inside the one on test; the
    folder may move."""
    config = stub.make_config(dropout=0.3, log_every=5, keep_checkpoints=2, gradient_accumulation=2)
    stub.run(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_at(patch, ask)
        result = stub.run(config, out)
    assert (result.status, result.exit_code) == ("cancelled", 130)
    assert "--resume auto" in result.message
    assert not (out / "final").exists()
    moved = out.rename(tmp_path / "moved")
    assert stub.run(config, moved, resume="auto").status == "success"
    assert_same_run(moved, tmp_path / "straight")


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, out, monkeypatch, capsys):
    config = stub.make_config(dropout=0.3, keep_checkpoints=3)
    stub.run(config, tmp_path / "straight")
    with monkeypatch.context() as patch:
        stop_at(patch, 12)  # after step 8
        stub.run(config, out)
    older, newest = checkpoints.all_checkpoints(out)[-2:]
    damaged = newest / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    assert stub.run(config, out, resume="auto", progress=True).status == "success"
    errors = capsys.readouterr().err
    assert f"skipped a damaged checkpoint: {damaged}" in errors
    assert f"resuming from {older}" in errors
    assert_same_run(out, tmp_path / "straight")


def test_no_usable_checkpoint_is_an_error(out, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        stub.run(stub.make_config(), out)
    (out / "checkpoint-1" / "optimizer.safetensors").unlink()
    expected = r"no checkpoint can be used:\n.*optimizer\.safetensors: missing"
    with pytest.raises(CheckpointError, match=expected):
        stub.run(stub.make_config(), out, resume="auto")


def test_a_full_disk_ends_nothing(tmp_path, out, monkeypatch):
    config = stub.make_config(dropout=0.3)
    stub.run(config, tmp_path / "straight")
    write = atomic.write_synced
    count = 0

    def full(path, data):
        nonlocal count
        count += path.name == "optimizer.safetensors"
        if count == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    expected = "cannot be written: No space left.*complete checkpoints are intact; make room"
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_synced", full)
        with pytest.raises(CheckpointError, match=expected):
            stub.run(config, out)
    assert [path.name for path in out.glob("*checkpoint-*")] == ["checkpoint-4"]
    assert stub.run(config, out, resume="auto").status == "success"
    assert_same_run(out, tmp_path / "straight")


def test_a_disk_that_fills_up_at_the_very_end(out, monkeypatch):
    write = atomic.open_replacing

    def full(path):
        if path.name == "result.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path)

    expected = r"result\.json: cannot be written: No space left on device"
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "open_replacing", full)
        with pytest.raises(CheckpointError, match=expected):
            stub.run(stub.make_config(), out)
    assert stub.run(stub.make_config(), out, resume="auto").status == "success"
    assert len(rows(out, "test")) == 1


def test_a_finished_run_is_returned_as_it_is(out):
    first = stub.run(stub.make_config(), out)
    stamp = (out / "result.json").stat().st_mtime_ns
    task = stub.StubTask()
    assert stub.run(stub.make_config(), out, resume="auto", task=task) == first
    assert task.read == []
    assert (out / "result.json").stat().st_mtime_ns == stamp
    weights = out / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*cannot be trusted"):
        stub.run(stub.make_config(), out, resume="auto")
    shutil.rmtree(out / "final")
    assert (
        stub.run(stub.make_config(), out, resume="auto").result["results"]
        == first.result["results"]
    )


def test_seeds(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        stub.run(stub.make_config(dropout=0.3, seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert not same(final(tmp_path / "a"), final(tmp_path / "c"))


def test_variants_of_a_seed_see_the_same_batches_and_dropout(tmp_path):
    """A model that draws more numbers for its weights, and one of another width, change nothing of
    the stream."""
    batches_of = {}
    masks = {}
    for name, width, draws in (("a", 8, 0), ("b", 8, 1000), ("c", 16, 0)):
        batches = batches_of.setdefault(name, [])
        zeros = masks.setdefault(name, [])

        def make(*_, sizes=(width, 1, 0.5, draws), lists=(batches, zeros)):
            model = stub.StubModel(*sizes)
            (batches, zeros) = lists

            def before(_, args, inputs):
                batches.append(inputs["input_ids"].tolist())

            def after(module, args, output):
                if module.training:
                    zeros.append((output == 0).tolist())

            model.register_forward_pre_hook(before, with_kwargs=True)
            model.blocks[0].dropout.register_forward_hook(after)
            return model

        stub.run(stub.make_config(variant=name), tmp_path / name, model=make)
    assert batches_of["a"] == batches_of["b"] == batches_of["c"]
    assert masks["a"] == masks["b"]
    assert masks["a"] != masks["c"]


def test_evaluation_draws_no_random_numbers_and_ignores_the_batch_size(tmp_path):
    often = stub.make_config(dropout=0.3, eval_every=1, checkpoint_every=12)
    stub.run(often, tmp_path / "often")
    stub.run(stub.make_config(dropout=0.3, eval_every=12, checkpoint_every=12), tmp_path / "once")
    assert same(last(tmp_path / "often", 12), last(tmp_path / "once", 12))


def test_a_split_that_is_empty(tmp_path):
    class NoTest(stub.StubTask):
        sizes: ClassVar = {"train": 8, "valid": 3, "test": 0}

    with pytest.raises(DataError, match="test split is empty"):
        stub.run(stub.make_config(steps=2), tmp_path / "run", task=NoTest())


def writing_task(calls):
    """Return the stub task with texts to score: how many, and with which weights."""

    class WritingTask(stub.StubTask):
        report_headline = "bleu"

        def generate_metrics(self, model, split, **keywords):
            keywords["notify"](0, 1)
            weight = model.embedding.weight.detach().clone()
            calls.append((split, keywords["batch_size"], keywords.get("max_examples"), weight))
            return {"bleu": float(len(calls))}

        def describe_generation(self):
            return {"signatures": {"bleu": "hand-made"}}

    return WritingTask()


def test_generated_text_is_scored_once_with_the_final_weights(tmp_path):
    calls = []
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
