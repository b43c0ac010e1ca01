"""Faults that the harness found, each by its smallest case."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
import transformers
from lab.tests.support import stub_task

from wellposed.errors import CheckpointError, ConfigError, DataError
from wellposed.measurement import Measurement
from wellposed.models import build_model
from wellposed_lab.cli.main import main
from wellposed_lab.report.aggregate import aggregate
from wellposed_lab.report.page import build_report
from wellposed_lab.tasks.data import files
from wellposed_lab.tasks.data.labelled import load_labelled
from wellposed_lab.tasks.data.splits import DataOptions
from wellposed_lab.training.certified.record import read_certified
from wellposed_lab.training.config import RunConfig, read_toml
from wellposed_lab.training.folder import checkpoints
from wellposed_lab.training.folder.checkpoints import encode
from wellposed_lab.training.folder.result import read_result
from wellposed_lab.training.folder.run_folder import usual_folder, write_config

DEEP = "[" * 100_000
BERT = transformers.BertConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a finished run of the stub."""
    out = tmp_path_factory.mktemp("found") / "run"
    stub_task.run(stub_task.make_config(learning_rate=2.0), out)
    return out


@pytest.fixture
def folder(run, tmp_path):
    """Return a copy of the run without its manifest."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "manifest.json").unlink()
    return copy


def test_nesting_without_end_is_an_error_of_ours(tmp_path, folder):
    (folder / "certified.json").write_text(DEEP)
    with pytest.raises(DataError, match=r"certified\.json: nested too deeply"):
        read_certified(folder, run_date="d")
    (folder / "certified.json").unlink()
    (folder.parent / "compare.json").write_text(DEEP)
    with pytest.raises(DataError, match=r"compare\.json: expected"):
        aggregate([folder])
    (tmp_path / "deep.toml").write_text("a = " + DEEP)
    with pytest.raises(ConfigError, match=r"deep\.toml: cannot be read: nested too deeply"):
        read_toml(tmp_path / "deep.toml")
    rows = tmp_path / "rows.train.jsonl"
    rows.write_text('{"label": ' + DEEP + "\n")
    with pytest.raises(DataError, match=r"rows\.train\.jsonl:1: not JSON: nested too deeply"):
        load_labelled(DataOptions(str(rows)))
    for content in (DEEP, '{"train_info": '):
        (folder / "result.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"result\.json: not a result of wellposed"):
            read_result(folder)


def changed(path, **values):
    """Change some values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"train_info": []}, {"results": {"stub": {"nats,valid": "x"}}}, {"results": []}, {"task": []}, {"config": {}},
        {"train_info": {"status": "well"}},
    ],
)  # fmt: skip
def test_a_result_of_other_types_is_refused(folder, change):
    changed(folder / "result.json", **change)
    with pytest.raises(CheckpointError, match=r"result\.json: not a result of wellposed"):
        read_result(folder)


def test_packed_data_that_grows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BOMB_BYTES", 1 << 16)
    bomb = tmp_path / "a.txt.gz"
    bomb.write_bytes(gzip.compress(b"a" * (1 << 22)))
    expected = r"a\.txt\.gz: its .* bytes unpack to more than 100 times as many"
    with pytest.raises(DataError, match=expected):
        files.read_text(bomb)
    honest = tmp_path / "b.txt.gz"
    words = " ".join(map(str, range(40_000)))
    honest.write_bytes(gzip.compress(words.encode()))
    assert files.read_text(honest).text == words


@pytest.mark.parametrize(
    "values", [{"best_metrics": []}, {"step": "3"}, {"window": 5}, {"window": {"steps": "x"}}]
)
def test_a_forged_state_is_refused(run, tmp_path, values):
    checkpoint = Path(shutil.copytree(run / "checkpoint-12", tmp_path / "checkpoint-12"))
    changed(checkpoint / "trainer_state.json", **values)
    model = stub_task.make_model(stub_task.make_config(), None)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        checkpoints.load_checkpoint(checkpoint, model)
    for content in (b"", b"\xff" * 20, encode({"x": torch.zeros(2)})[:-3]):
        (checkpoint / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError):
            checkpoints.load_checkpoint(checkpoint, model)


def test_the_best_weights_outlive_the_rest_of_their_checkpoint(run, tmp_path):
    """They were given up for a flipped bit in the random states beside them."""
    out = Path(shutil.copytree(run, tmp_path / "run"))
    result = json.loads((out / "result.json").read_text())
    best = result["train_info"]["best_step"]
    assert best < 12
    before = (out / "final" / "model.safetensors").read_bytes()
    shutil.rmtree(out / "final")
    (out / "result.json").unlink()
    for name in ("random_states_0.safetensors", "trainer_state.json"):
        (out / f"checkpoint-{best}" / name).unlink()
    again = stub_task.run(stub_task.make_config(learning_rate=2.0), out, resume="auto")
    assert again.result["results"] == result["results"]
    assert "reason" not in again.result["train_info"]
    assert (out / "final" / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "env.json", "config.toml"])
def test_a_pipe_in_the_place_of_a_file_is_refused(folder, tmp_path, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    out = tmp_path / "page.html"
    if name == "config.toml":
        (folder / "result.json").unlink()
        with pytest.raises(ConfigError, match="pipe or a device"):
            read_toml(folder / name)
        assert "unfinished" in aggregate([folder]).table()
    else:
        with pytest.raises(DataError, match=rf"{name}: .*pipe or a device"):
            build_report([folder], out)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no such device here")
def test_endless_files_are_refused(tmp_path, capsys):
    (tmp_path / "m.json").symlink_to("/dev/zero")
    with pytest.raises(DataError, match="pipe or a device"):
        Measurement.from_json(tmp_path / "m.json")
    with pytest.raises(DataError, match="/dev/zero: cannot be read: is a pipe or a device"):
        files.read_text(Path("/dev/zero"))
    assert main(["train", "char_lm", "--config", "/dev/zero", "--out", str(tmp_path / "x")]) != 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_name_that_is_no_text_is_shown_and_breaks_no_page(run, tmp_path):
    """The system gives such names as lone surrogates, which no UTF-8 output takes."""
    odd = Path(shutil.copytree(run, tmp_path / os.fsdecode(b"run-\xff\x1b[31m")))
    out = tmp_path / "page.html"
    words = ["-m", "wellposed", "report", str(odd), "--out", str(out)]
    done = subprocess.run([sys.executable, *words], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "run-\\udcff" in out.read_text(encoding="utf-8")
    shutil.rmtree(odd)
    done = subprocess.run([sys.executable, *words], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"run-\\udcff\\x1b[31m: does not exist" in done.stderr
    with pytest.raises(ConfigError, match=r"config\.toml: .* is not UTF-8"):
        write_config(tmp_path, RunConfig("char_lm", {"data": "\udcff"}))


def test_a_tokenizer_without_padding_is_an_error_of_ours():
    from wellposed_lab.cli.prediction.labels import label_lines

    class Bare:
        name_or_path = "here"
        pad_token = None
        model_max_length = 9
        init_kwargs = MappingProxyType({})

        def __call__(self, *sides, **_):
            return {"input_ids": [[1, 2] for _ in sides[0]]}

    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(max_position_embeddings=9, model_type="bert")
    with pytest.raises(CheckpointError, match="here: the tokenizer has no padding token"):
        list(label_lines(model, Bare(), ["a line", "and another"], 2))


@pytest.mark.parametrize(
    "change", [{"reference": {"nats": {}}}, {"results": {"stub": {"nats,valid": [], "x": 1}}}]
)
def test_numbers_of_a_result_are_numbers(folder, change):
    changed(folder / "result.json", **change)
    with pytest.raises(DataError, match=r"result\.json: .* expected a number; the file is damaged"):
        aggregate([folder])


@pytest.mark.parametrize("size", ["1e999", "1" * 5000, "NaN"])
def test_an_impossible_number_leaves_the_one_before(run, tmp_path, size):
    """An infinite size in the newest manifest ended the command in an OverflowError."""
    older, newest = checkpoints.all_checkpoints(run)
    for folder in (older, newest):
        shutil.copytree(folder, tmp_path / folder.name)
    path = tmp_path / newest.name / "manifest.json"
    path.write_text(re.sub(r'"bytes": \d+', f'"bytes": {size}', path.read_text()))
    usable, damaged = checkpoints.newest_complete(tmp_path)
    assert usable == tmp_path / older.name
    assert "unreadable manifest" in damaged[0]


@pytest.mark.parametrize("command", ["train", "compare"])
def test_an_out_that_is_no_text_is_refused_before_training(tmp_path, capsys, command):
    """The run was trained, and lost when its final model could not be saved."""
    out = tmp_path / os.fsdecode(b"run-\xff")
    assert main([command, "char_lm", "--steps", "1", "--out", str(out)]) == 2
    assert "the name is not UTF-8" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: you tried")]
)
def test_the_end_of_memory_is_one_line_in_every_command(monkeypatch, capsys, error):
    def run(words):
        raise error

    monkeypatch.setattr("wellposed_lab.cli.doctor.run", run)
    assert main(["doctor"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("wellposed: doctor: out of memory")
    assert errors.count("\n") == 1


def test_a_local_configuration_asks_nobody(tmp_path, monkeypatch):
    BERT.save_pretrained(tmp_path)
    monkeypatch.setattr("wellposed.models._loading.hub_answers", lambda: pytest.fail("a request"))
    assert main(["measure", str(tmp_path / "config.json")]) == 0


def test_a_run_does_not_choose_what_is_downloaded(tmp_path, monkeypatch, capsys):
    config = RunConfig("text_classification", {"data": "hf:someone/secrets"})
    model = build_model("wellposed", "sequence_classification", vocab_size=9, num_labels=2)
    model.save_pretrained(tmp_path / "final")
    write_config(tmp_path, config)
    monkeypatch.setattr("wellposed_lab.tasks.task.build_task", lambda *_: pytest.fail("a request"))
    assert main(["certify", str(tmp_path), "--seq-len", "4", "--radii", "0"]) == 0
    errors = capsys.readouterr().err
    assert "the run read hf:someone/secrets, and only data that you name is downloaded" in errors


def test_a_prediction_keeps_its_input(run, tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    other = tmp_path / "same.txt"
    lines.write_text("one\n")
    other.symlink_to(lines)
    words = ["predict", str(run), "--input", str(lines), "--output", str(other)]
    assert main(words) == 2
    assert "would overwrite the file of --input" in capsys.readouterr().err
    assert lines.read_text() == "one\n"


def test_a_second_run_has_the_next_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("listops", "listops-2", "listops-3"):
        out = usual_folder("listops", last=False)
        assert out == Path("runs") / name
        out.mkdir(parents=True)
        assert usual_folder("listops", last=True) == out
