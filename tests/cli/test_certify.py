"""``wellposed certify``: the table of any model, certified accuracy of a classifier's run, and bad
input."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
from tests.support.words import succeed
from tests.support.words import words as typed
from transformers import BartConfig, BartModel

from wellposed.cli import main

TINY = [
    "--model.hidden-size",
    "8",
    "--model.num-hidden-layers",
    "1",
    "--model.num-attention-heads",
    "2",
]
SHORT = typed("--steps 6 --eval-every 6 --checkpoint-every 6 --batch-size 8 --quiet", [*TINY])


def write_texts(path: Path, good: str = "good") -> None:
    rng = random.Random(0)
    rows = [
        (label, f"a {word} film {rng.choice('xyz')}")
        for label, word in (("pos", good), ("neg", "bad"))
    ] * 40
    path.write_text(
        "label\ttext\n" + "".join(f"{label}\t{text}\n" for label, text in rows), encoding="utf-8"
    )


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a contractive classifier without LayerNorm, whose certificate says
    something."""
    folder = tmp_path_factory.mktemp("certify")
    write_texts(folder / "train.tsv")
    words = typed(
        "train text_classification --data", [folder / "train.tsv"], "--max-length 6", [*SHORT]
    )
    words += ["--variant", "l2_contractive", "--model.norm", "none", "--out", str(folder / "run")]
    succeed(words)
    return folder / "run"


def test_a_classifier_run_gives_table_curve_and_files(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    words = typed("certify", [run_folder], "--examples 8 --attack-steps 3 --out", [tmp_path])
    succeed([*words, "--require"])
    text = capsys.readouterr().out
    assert "total, norm tok" in text
    assert "certified accuracy on test of text_classification" in text
    assert "for scale: embedded tokens have 2-norm" in text
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["label"] == "certified"
    assert certificate["tokens"] == 6
    with (tmp_path / "certified_accuracy.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert all(row["attacked"] >= row["certified"] for row in rows)
    assert rows[1]["radius"] > 0
    assert (tmp_path / "certified_accuracy.svg").read_text().lstrip().startswith("<?xml")


def test_norm_length_and_radii_are_those_asked_for(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["certify", str(run_folder), "--norm", "2", "--seq-len", "4", "--radii", "0,0.5"]
    succeed([*words, "--examples", "0"])
    text = capsys.readouterr().out
    assert "total, norm 2" in text
    assert "<= 4 tokens" in text
    assert "certified accuracy" not in text
    succeed(["certify", str(run_folder), "--radii", "0,0.5", "--examples", "4", "--split", "valid"])
    assert "       0.5  " in capsys.readouterr().out


def test_a_layer_without_a_bound_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from wellposed.models import WellposedConfig, WellposedForCausalLM

    config = WellposedConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=1, norm="none", vocab_size=9
    )
    WellposedForCausalLM(config).save_pretrained(tmp_path / "model")
    succeed(["certify", str(tmp_path / "model"), "--seq-len", "8"])
    captured = capsys.readouterr()
    assert "uncertified" in captured.out
    assert "model.layers.0.attention" in captured.err
    assert "--radius" in captured.err
    assert main(["certify", str(tmp_path / "model"), "--seq-len", "8", "--require"]) == 1
    succeed(["certify", str(tmp_path / "model"), "--seq-len", "8", "--radius", "9", "--require"])
    assert "mask causal, tokens with |x_i| <= 9" in capsys.readouterr().out


def test_a_total_of_no_use_says_so_first_and_costs_no_attack(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "text_classification", "--data", str(run_folder.parent / "train.tsv")]
    words += ["--max-length", "6", *SHORT, "--variant", "l2_tied", "--out", str(tmp_path / "run")]
    succeed(words)
    capsys.readouterr()
    succeed(["certify", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    text = capsys.readouterr().out
    first = text.splitlines()[0]
    assert first.startswith("of no use: L = ")
    assert len(first) <= 100
    assert "contribute" in text
    assert "certified accuracy" not in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["certificate.json"]


def test_lengths_of_the_data_are_checked(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every text has 4 tokens."""
    words = ["certify", str(run_folder), "--norm", "2", "--examples", "8", "--attack-steps", "2"]
    succeed([*words, "--min-tokens", "4"])
    assert "4 to 6 tokens" in capsys.readouterr().out
    assert main([*words, "--min-tokens", "5"]) == 1
    captured = capsys.readouterr()
    assert "at least 5 real tokens, received 4 (4 of 4 inputs are shorter)" in captured.err
    assert "certified accuracy on" not in captured.out
    assert main([*words, "--seq-len", "3"]) == 1
    assert "at most 3 tokens, received 4 (4 of 4 inputs are longer)" in capsys.readouterr().err
    succeed(words)
    assert "<= 6 tokens" in capsys.readouterr().out


@pytest.fixture(scope="module")
def plain_folder(run_folder: Path) -> Path:
    """Return the run of a classifier with dot-product attention, which has a bound on a ball
    only."""
    words = typed(
        "train text_classification --data", [run_folder.parent / "train.tsv"], "--max-length 6"
    )
    words += [*SHORT, "--model.norm", "none", "--out", str(run_folder.parent / "plain")]
    succeed(words)
    return run_folder.parent / "plain"


def _rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "certified_accuracy.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_without_a_bound_nothing_is_certified_and_the_reason_is_said(
    plain_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = typed("certify", [plain_folder], "--examples 8 --attack-steps 2 --out", [tmp_path])
    succeed(words)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("of no use: L = inf")
    assert not any("certified accuracy" in line or "in words" in line for line in others)
    succeed([*words, "--radii", "0,0.1"])
    captured = capsys.readouterr()
    assert (
        "no bound (model.layers.0.attention), so nothing is certified at any radius above 0"
        in captured.out
    )
    assert "try --radius" in captured.err
    rows = _rows(tmp_path)
    assert rows[0]["certified"] == rows[0]["attacked"] > 0
    assert all(row["certified"] == 0 for row in rows[1:])


def test_no_ball_is_suggested_where_none_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = BartConfig(
        d_model=8, vocab_size=11, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    BartModel(config).save_pretrained(tmp_path / "bart")
    succeed(["certify", str(tmp_path / "bart"), "--seq-len", "4"])
    said = capsys.readouterr().err
    assert "nor is there one on a ball" in said
    assert "two sequences" in said
    assert "--radius" not in said


@pytest.mark.parametrize("norm", ["tok", "2", "inf"])
def test_on_a_ball_radii_stay_inside(
    plain_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], norm: str
) -> None:
    words = ["certify", str(plain_folder), "--examples", "8", "--attack-steps", "2", "--norm", norm]
    succeed([*words, "--radius", "9", "--radii", "0,1e-9,9", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "mask full, tokens with |x_i| <= 9" in text  # a classifier sees both sides
    assert "no radius reaches out of the ball |x_i| <= 9" in text
    assert json.loads((tmp_path / "certificate.json").read_text())["ball"] == 9.0
    rows = _rows(tmp_path)
    assert rows[1]["certified"] == rows[0]["certified"] > 0
    assert rows[2]["certified"] == 0.0
    succeed([*words, "--radius", "1e-6", "--radii", "0,1e-9", "--out", str(tmp_path)])
    assert "4 of 4 inputs lie outside the ball" in capsys.readouterr().out
    assert _rows(tmp_path)[1]["certified"] == 0.0


def test_bad_usage_is_one_message(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", str(run_folder), "--radii", "a,b"]) == 2
    assert "comma-separated numbers" in capsys.readouterr().err
    assert main(["certify", str(run_folder / "final"), "--data", "x.tsv"]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    write_texts(tmp_path / "train.tsv", good="superb")
    assert main(["certify", str(run_folder), "--data", str(tmp_path / "train.tsv")]) == 2
    assert "vocabulary" in capsys.readouterr().err
    assert main(["certify", str(tmp_path / "nowhere"), "--norm", "inf"]) == 1
    assert "no such folder" in capsys.readouterr().err
