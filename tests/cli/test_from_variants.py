"""Variants of a model of the user's, and what a run of it leaves for programs that know nothing of
the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bert import make_checkpoint, make_table
from tests.support.words import TINY, Cli, python, succeed
from tests.support.words import words as typed
from transformers import AutoTokenizer

from wellposed.models import load_pretrained, load_saved_model

IDS = [[2, 5, 6, 3]]
SHOW = f"import torch; print(model(input_ids=torch.tensor({IDS})).logits.tolist())"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_checkpoint(folder / "tiny-bert")
    make_table(folder / "train.tsv")
    return folder


def _words(
    files: Path, command: str, out: Path, *more: str, source: str = "tiny-bert"
) -> list[str]:
    words = typed([command], "text_classification --data", [files / "train.tsv"], "--max-length 16")
    return [*words, "--from", str(files / source), "--epochs", "1", "--out", str(out), *more]


def _result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def _in_a_fresh_process(code: str, cache: Path) -> Any:
    """Return the JSON that the code prints."""
    environment = {"PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = python(["-c", code], env={**environment, "HF_MODULES_CACHE": str(cache)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _of_card(folder: Path) -> str:
    """Return the code that the card of a model gives."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    return code.replace("FOLDER", str(folder))


def test_variants_of_a_checkpoint_are_compared(files: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "runs"
    words = _words(files, "compare", out, "--variants", "plain,key:1e-2,orthogonal", "--quiet")
    shown = cli(words, "--seeds 2").out
    assert (out / "report.html").is_file()
    assert all(name in shown for name in ("plain", "key:1e-2", "orthogonal"))
    assert _result(out / "orthogonal" / "seed-1")["train_info"]["isometry_error"] < 1e-5
    assert _result(out / "key-1e-2" / "seed-0")["config"]["penalty"]["key"] == 0.01


def test_a_comparison_of_a_checkpoint_begins_with_it_unchanged(files: Path, tmp_path: Path) -> None:
    succeed(_words(files, "compare", tmp_path / "runs", "--seeds", "1", "--quiet"))
    written = json.loads((tmp_path / "runs" / "compare.json").read_text())
    assert written["variants"] == ["plain", "key:1e-2"]


@pytest.mark.parametrize("variant", ["t_fixup", "l2"])
def test_a_changed_model_is_predicted_with_as_it_was_trained(
    files: Path, tmp_path: Path, variant: str, cli: Cli
) -> None:
    out = tmp_path / "run"
    source = "tiny-bert/config.json" if variant == "t_fixup" else "tiny-bert"
    said = cli([*_words(files, "train", out, source=source), "--variant", variant]).err
    assert said.count("starts from ") == 1
    card = (out / "final" / "README.md").read_text()
    assert "**A plain `from_pretrained` gives another model**" in card
    with torch.no_grad():
        expected = load_saved_model(out / "final")(input_ids=torch.tensor(IDS)).logits
    found = _in_a_fresh_process(_of_card(out / "final") + SHOW, tmp_path / "cache")
    assert torch.allclose(torch.tensor(found), expected, atol=1e-6)
    succeed(["predict", str(out), "--text", "w1 good w2"])


def test_what_was_drawn_stands_in_the_result_and_is_said_once(
    files: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "run"
    said = cli(_words(files, "train", out)).err.splitlines()
    started = _result(out)["train_info"]["started_from"]
    drawn = ["classifier.bias", "classifier.weight"]
    assert started == {"model": str(files / "tiny-bert"), "new_weights": drawn, "left_out": []}
    (line,) = (line for line in said if line.startswith("starts from "))
    assert line.endswith("tiny-bert; drawn at random: classifier.bias, classifier.weight")


def test_a_model_of_ours_loads_where_wellposed_is_only_installed(tmp_path: Path) -> None:
    words = typed("train char_lm --limit-chars 20000 --seq-len 64 --steps 3", TINY)
    succeed([*words, "--out", str(tmp_path / "run")])
    final = tmp_path / "run" / "final"
    with torch.no_grad():
        expected = load_saved_model(final)(input_ids=torch.tensor(IDS)).logits
    trusted = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer; "
        f"tokenizer = AutoTokenizer.from_pretrained({str(final)!r}, trust_remote_code=True); "
        f"model = AutoModelForCausalLM.from_pretrained({str(final)!r}, trust_remote_code=True)\n"
    )
    imported = _of_card(final)
    assert imported.startswith("import wellposed.models\n")
    for code in (trusted, imported):
        found = _in_a_fresh_process(code + SHOW, tmp_path / "cache")
        assert torch.allclose(torch.tensor(found), expected, atol=1e-6)


def test_tokens_of_a_run_are_read_without_wellposed_and_without_a_question(tmp_path: Path) -> None:
    words = typed("train char_lm --limit-chars 20000 --seq-len 64 --steps 2", TINY)
    succeed([*words, "--out", str(tmp_path / "run")])
    final = tmp_path / "run" / "final"
    card = (final / "README.md").read_text()
    line = card.partition("`PreTrainedTokenizerFast")[2].partition("`")[0]
    code = (
        "import sys; from transformers import PreTrainedTokenizerFast; tokenizer ="
        f" PreTrainedTokenizerFast{line.replace('FOLDER', str(final))}; assert not"
        " any(name.startswith('wellposed') for name in sys.modules); print(tokenizer('a"
        " cat')['input_ids'])"
    )
    expected = load_pretrained(AutoTokenizer, final)("a cat")["input_ids"]
    assert _in_a_fresh_process(code, tmp_path / "cache") == expected


def test_the_card_tells_what_was_made_and_how_without_paths_of_this_machine(
    files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    succeed([*_words(files, "train", out), "--variant", "key:1e-2", "--seed", "3"])
    card = (out / "final" / "README.md").read_text()
    result = _result(out)
    accuracy = result["results"]["text_classification"]["accuracy,test"]
    examples = result["n-samples"]["text_classification"]["test"]
    assert f"| test | {examples} | accuracy | {accuracy:.6g} |" in card
    for line in ("task: text_classification", "data: train.tsv", "variant: `key:1e-2`", "seed: 3"):
        assert f"- {line}\n" in card
    assert "wellposed train text_classification --data train.tsv" in card
    assert str(files) not in card
    assert str(tmp_path) not in card
    assert "license" not in card
    (out / "final" / "README.md").write_text("mine\n" + card)  # not damage
    succeed(["predict", str(out), "--text", "w1 good w2"])


def test_a_certificate_stands_in_the_card(files: Path, tmp_path: Path) -> None:
    for variant, certified in (("lipschitz", True), ("post_ln", False)):
        words = typed("train text_classification --data", [files / "train.tsv"], "--steps 2", TINY)
        succeed([*words, "--variant", variant, "--out", str(tmp_path / variant)])
        card = (tmp_path / variant / "final" / "README.md").read_text()
        assert ("- certificate: Lipschitz bound " in card) == certified
