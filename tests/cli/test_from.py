"""`--from`: the commands on a Hugging Face model of the user's, small and made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from tests.support.bert import make_checkpoint, make_table
from tests.support.words import Cli, succeed
from tests.support.words import words as typed

from wellposed.training import RunConfig, TrainOptions, train
from wellposed.training.loop.schedules import counted_in_steps


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "train.tsv"
    make_table(path)
    return path


def _words(table: Path, source: Path, out: Path, *more: str) -> list[str]:
    words = typed("train text_classification --data", [table], "--max-length 16 --from", [source])
    return [*words, "--out", str(out), "--quiet", *more]


def test_a_checkpoint_is_fine_tuned_with_its_own_tokenizer(
    checkpoint: Path, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    succeed(_words(table, checkpoint, out, "--epochs", "2"))
    config = (out / "config.toml").read_text()
    for line in (
        'schedule = "linear"',
        "epochs = 2",
        "steps = 12",
        "warmup_steps = 1",
        f'tokenizer = "hf:{checkpoint}"',
    ):
        assert line in config
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out / "final")
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.id2label == {0: "bad", 1: "good"}
    succeed(
        _words(table, checkpoint, out, "--epochs", "2", "--resume", "auto")
    )  # finished: nothing to do
    succeed(["predict", str(out), "--text", "w1 good w2"])


def test_a_number_of_steps_takes_the_place_of_the_epochs_of_fine_tuning(
    checkpoint: Path, table: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "run"
    succeed(_words(table, checkpoint, out, "--steps", "3"))
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
    assert "epochs" not in (out / "config.toml").read_text()
    succeed(_words(table, checkpoint, out, "--steps", "5", "--epochs", "None", "--resume", "auto"))
    said = cli(
        _words(table, checkpoint, tmp_path / "both", "--steps", "3", "--epochs", "2"), status=2
    ).err
    assert "--steps 3 and --epochs 2 both say how long to train" in said


def test_it_learns_what_a_random_model_of_the_same_configuration_learns(
    table: Path, checkpoint: Path, tmp_path: Path
) -> None:
    options = ["--steps", "150", "--epochs", "None", "--learning-rate", "3e-3"]
    succeed(_words(table, checkpoint / "config.json", tmp_path / "run", *options))
    run = json.loads((tmp_path / "run" / "result.json").read_text())
    assert run["results"]["text_classification"]["accuracy,valid"] == 1.0


def test_an_architecture_of_ours_beside_it_is_refused(
    checkpoint: Path, table: Path, tmp_path: Path, cli: Cli
) -> None:
    said = cli(
        _words(table, checkpoint, tmp_path / "run", "--model.hidden-size", "64"), status=None
    ).err
    assert "brings its own architecture; received besides: model.hidden_size = 64" in said


def test_epochs_are_counted_in_steps_of_the_data() -> None:
    from wellposed.tasks import build_task

    task = build_task("char_lm", {"limit_chars": 20000, "seq_len": 64})
    for epochs, batch, accumulation, processes in ((1, 32, 1, 1), (0.5, 32, 3, 1), (2, 7, 1, 2)):
        config = RunConfig(
            "char_lm",
            train=TrainOptions(epochs=epochs, batch_size=batch, gradient_accumulation=accumulation),
        )
        batches = -(-len(task.dataset("train")) // batch)
        expected = -(-int(2 * epochs * batches) // (2 * accumulation * processes))
        assert counted_in_steps(config, task, processes=processes).train.steps == expected


def test_a_finished_run_of_epochs_is_known_again(tmp_path: Path) -> None:
    options = TrainOptions(
        epochs=1, batch_size=8, warmup_share=0.25, schedule="linear", eval_batches=1
    )
    config = RunConfig("char_lm", {"limit_chars": 4000, "seq_len": 64}, train=options)
    assert train(config, tmp_path / "run", progress=False).status == "success"
    assert train(config, tmp_path / "run", resume="auto", progress=False).status == "success"
