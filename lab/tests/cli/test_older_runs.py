"""Run folders and checkpoints as versions 0.1 and 0.2 wrote them: every command takes them, and
resuming continues them.

They were written by the sources of 0.1.0 and 0.2.0
(`train text_classification --steps 4 --checkpoint-every 2`) and are never written anew.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.support.words import SMALLEST
from tests.support.words import words as typed

from wellposed_lab.cli.main import main
from wellposed_lab.training.folder.state import TrainerState

pytestmark = pytest.mark.slow  # the whole table

SAVED = Path(__file__).parent / "saved"
FILMS = ("text_classification", "--data", "films.tsv", "--steps", "2", "--quiet")
TRAINED = "--max-length 6 --eval-every 2 --checkpoint-every 2 --batch-size 8 --quiet"


@pytest.fixture(params=["run_0_1", "run_0_2"])
def old_run(request, tmp_path, monkeypatch):
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # Files that other tests imported would be part of the run's configuration.
    monkeypatch.setattr("wellposed_lab.plugins._imported", {})
    return Path(request.param)


def resume(run, steps):
    words = typed("train text_classification --data films.tsv", TRAINED, SMALLEST)
    words += typed("--variant l2_contractive --model.norm none --resume auto --steps", [steps])
    return main([*words, "--out", str(run)])


@pytest.mark.parametrize("command", ["certify", "measure", "report"])
def test_a_command_takes_the_run(old_run, command, cli):
    output = cli([command, str(old_run), *(["--out", "page"] if command == "report" else [])]).out
    expected = {"certify": "certified", "measure": "token_embedding", "report": "0.839"}
    assert expected[command] in output


def test_a_run_that_trained_in_fp16_is_read_and_not_gone_on_with(old_run, cli, capsys):
    for name in ("config.toml", "result.json"):
        text = (old_run / name).read_text().replace("fp32", "fp16")
        (old_run / name).write_text(text)
    (old_run / "manifest.json").unlink(missing_ok=True)
    assert cli(["predict", str(old_run), "--text", "a good film x"]).out
    assert cli(["report", str(old_run), "--out", "page.html"]).out
    assert main(["train", *FILMS, "--config", str(old_run / "config.toml"), "--out", "new"]) == 2
    assert "give --precision bf16" in capsys.readouterr().err


def test_a_checkpoint_with_a_scale_of_the_loss_is_read():
    state = TrainerState(step=2)
    values = {**asdict(state), "loss_scale": 65536.0, "steps_at_scale": 3}
    assert TrainerState.from_dict(values, where="trainer_state.json") == state


def test_predictions_are_of_the_weights_it_saved(old_run, cli):
    Path("lines.txt").write_text("a good film x\na bad film y\n", encoding="utf-8")
    output = cli(["predict", str(old_run), "--input", "lines.txt"]).out
    labels, probabilities = zip(*(line.split() for line in output.splitlines()), strict=True)
    assert set(labels) <= {"pos", "neg"}
    assert all(0.5 <= float(probability) < 1 for probability in probabilities)


def test_resuming_a_run_that_was_cut_ends_in_the_weights_that_it_ended_in(old_run):
    """The last checkpoint, the result and the final model gone, as after a kill: steps 3 and 4 are
    made again."""
    finished = load_file(old_run / "final" / "model.safetensors")
    for name in ("final", "checkpoint-4"):
        shutil.rmtree(old_run / name)
    for name in ("result.json", "measure-final.json"):
        (old_run / name).unlink()
    assert resume(old_run, steps=4) == 0
    again = load_file(old_run / "final" / "model.safetensors")
    assert again.keys() == finished.keys()
    for name, weight in finished.items():
        # Two Adam steps of at most 1e-3; other kernels round otherwise, and a lost optimizer state
        # moves by the step.
        assert (again[name] - weight).abs().max() < 1e-5, name


def test_its_configuration_and_its_model_start_new_runs(old_run):
    words = ["train", *FILMS]
    assert main([*words, "--config", str(old_run / "config.toml"), "--out", "again"]) == 0
    assert main([*words, "--from", str(old_run), "--max-length", "6", "--out", "tuned"]) == 0
    assert main(["report", str(old_run), "again", "--out", "page.html"]) == 0


def test_a_finished_run_is_told_from_its_folder(old_run):
    before = json.loads((old_run / "result.json").read_text())
    assert resume(old_run, steps=4) == 0
    assert json.loads((old_run / "result.json").read_text())["results"] == before["results"]
