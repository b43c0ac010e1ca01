"""The main job from the command line: compare, report, predict, measure, and what happens on bad
input."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.words import succeed
from tests.support.words import words as typed

from wellposed.cli import main

TEXT = (
    "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.\n" * 60
)
TINY = [
    "--model.hidden-size",
    "16",
    "--model.num-hidden-layers",
    "1",
    "--model.num-attention-heads",
    "2",
]
SHORT = ["--steps", "4", "--eval-every", "2", "--checkpoint-every", "2", "--batch-size", "4", *TINY]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished comparison of two variants and two seeds."""
    folder = tmp_path_factory.mktemp("main_job")
    with gzip.open(folder / "prose.txt.gz", "wt", encoding="utf-8") as file:
        file.write(TEXT)
    words = typed("compare char_lm --data", [folder / "prose.txt.gz"], "--seq-len 24", [*SHORT])
    succeed(words, "--variants post_ln,oc3:1e-3 --seeds 2 --out", [folder / "runs"])
    return folder


def test_a_comparison_leaves_runs_and_one_report(workspace: Path) -> None:
    page = (workspace / "runs" / "report.html").read_text(encoding="utf-8")
    assert "oc3:1e-3" in page
    assert page.count("<script") == 1
    for variant in ("post_ln", "oc3-1e-3"):
        for seed in (0, 1):
            result = json.loads(
                (workspace / "runs" / variant / f"seed-{seed}" / "result.json").read_text()
            )
            assert result["train_info"]["status"] == "success"
            assert result["seed"] == seed


def test_resume_keeps_finished_runs(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in (workspace / "runs").glob("*/*/final/model.safetensors")
    }
    words = typed("compare char_lm --data", [workspace / "prose.txt.gz"], "--seq-len 24", [*SHORT])
    words += ["--variants", "post_ln,oc3:1e-3", "--seeds", "2", "--out", str(workspace / "runs")]
    assert main(words) == 2
    assert "--resume auto" in capsys.readouterr().err
    succeed([*words, "--resume", "auto"])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "difference" in capsys.readouterr().out


def test_predict_continues_a_text_past_the_positions(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(workspace / "runs" / "post_ln" / "seed-0")
    succeed(["predict", run, "--text", "the quick", "--max-new-tokens", "60"])
    first = capsys.readouterr().out
    assert first.startswith("the quick")
    assert len(first.rstrip("\n")) > len("the quick") + 40
    succeed(["predict", run, "--text", "the quick", "--max-new-tokens", "60"])
    assert capsys.readouterr().out == first
    succeed(["predict", run, "--text", "the quick", "--max-new-tokens", "60", "--seed", "1"])
    assert capsys.readouterr().out != first


def test_a_fresh_process_loads_the_same_model(workspace: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    final = workspace / "runs" / "post_ln" / "seed-0" / "final"
    code = (
        "import sys, torch, wellposed.models; from transformers import AutoModelForCausalLM as M;"
        "print(M.from_pretrained(sys.argv[1])(torch.arange(9)[None]).logits.double().sum().item())"
    )
    found = subprocess.check_output(
        [sys.executable, "-c", code, str(final)], text=True, stderr=subprocess.DEVNULL
    )
    with torch.no_grad():
        here = (
            AutoModelForCausalLM.from_pretrained(final)(torch.arange(9)[None])
            .logits.double()
            .sum()
            .item()
        )
    assert float(found) == pytest.approx(here, abs=0, rel=1e-12)


def test_measure_prints_and_writes(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(workspace / "runs" / "oc3-1e-3" / "seed-0")
    succeed(["measure", run, "--text", "the lazy dog", "--out", str(tmp_path / "m")])
    out = capsys.readouterr().out
    assert "query" in out
    assert "feedforward_in" in out
    assert {path.suffix for path in (tmp_path / "m").iterdir()} >= {".csv", ".json", ".svg"}


def test_report_over_several_folders(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    succeed(["report", str(workspace / "runs"), "--out", str(page)])
    assert page.is_file()
    assert str(page) in capsys.readouterr().out


def test_classify_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [("good", "fine"), ("bad", "dull")] * 40
    rows = [f"{label}\tthe film was {word} {number}" for number, (label, word) in enumerate(kinds)]
    (tmp_path / "films.tsv").write_text("\n".join(["label\ttext", *rows]) + "\n", encoding="utf-8")
    run = tmp_path / "run"
    words = typed(
        "train text_classification --data",
        [tmp_path / "films.tsv", *SHORT],
        "--out",
        [run],
        "--quiet",
    )
    succeed(words)
    (tmp_path / "lines.txt").write_text(
        "the film was fine 3\nthe film was dull 4\n", encoding="utf-8"
    )
    out = tmp_path / "labels.tsv"
    capsys.readouterr()
    succeed(["predict", str(run), "--input", str(tmp_path / "lines.txt"), "--output", str(out)])
    labels = [line.split("\t")[0] for line in out.read_text().splitlines()]
    assert len(labels) == 2
    assert set(labels) <= {"good", "bad"}


def _train(folder: Path, data: Path, *more: str) -> int:
    return main(
        typed(
            "train char_lm --data",
            [data],
            "--seq-len 24",
            [*SHORT],
            "--out",
            [folder],
            "--quiet",
            [*more],
        )
    )


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "no such"),
        ("empty.txt", b"", "empty"),
        ("latin.txt", "caf\xe9 ".encode("latin-1") * 500, "UTF-8"),
    ],
)
def test_bad_text_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert _train(tmp_path / "run", tmp_path / name) in {1, 2}
    captured = capsys.readouterr()
    assert says in captured.err
    assert name in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("label\ttext\n1\tfine\n0\n1\tdull\n" * 9, "films.tsv:3"),
        ("label\ttext\n" + "1\tfine\n0\tdull\n" * 9, "20"),
    ],
)
def test_bad_rows_name_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, says: str
) -> None:
    (tmp_path / "films.tsv").write_text(rows, encoding="utf-8")
    words = typed(
        "train text_classification --data",
        [tmp_path / "films.tsv", *SHORT],
        "--out",
        [tmp_path / "run"],
    )
    assert main(words) in {1, 2}
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_unknown_key_in_a_config_file(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (workspace / "runs" / "post_ln" / "seed-0" / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(
        config.replace("learning_rate", "learning_rat"), encoding="utf-8"
    )
    assert (
        main(
            typed("train char_lm --config", [tmp_path / "config.toml"], "--out", [tmp_path / "run"])
        )
        == 2
    )
    assert "nearest: learning_rate" in capsys.readouterr().err


def test_resume_into_a_changed_config_lists_the_fields(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert _train(run, workspace / "prose.txt.gz") == 0
    capsys.readouterr()
    assert (
        _train(
            run,
            workspace / "prose.txt.gz",
            "--resume",
            "auto",
            "--learning-rate",
            "0.5",
            "--seed",
            "3",
        )
        == 2
    )
    message = capsys.readouterr().err
    assert "train.learning_rate" in message
    assert "train.seed" in message


def test_a_checkpoint_cut_in_half_is_named(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert _train(run, workspace / "prose.txt.gz") == 0
    (run / "result.json").unlink()
    shutil.rmtree(run / "final")
    for weights in run.glob("checkpoint-*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    newest = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    capsys.readouterr()
    assert _train(run, workspace / "prose.txt.gz", "--resume", str(newest)) in {1, 2}
    message = capsys.readouterr().err
    assert "model.safetensors" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["predict", "runs/none", "--text", "a"], "no such folder"),
        (["measure", "./nowhere"], "no such folder"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_missing_folders(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) in {1, 2}
    assert says in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    succeed(["doctor"])
    out = capsys.readouterr().out
    assert out.count("ok  ") == 3
    assert "torch" in out
