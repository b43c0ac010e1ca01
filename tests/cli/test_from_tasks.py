"""`train --from` on every task that a Hugging Face model has a head for, and `predict` with what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.tokenizers import byte_level_bpe

from wellposed.cli import main
from wellposed.tasks import build_task

LINES = [f"the {colour} {thing} is {size}" for colour in ("red", "green") for thing in ("cat", "hat") for size in "ab"]


def results(run: Path) -> dict[str, Any]:
    (found,) = json.loads((run / "result.json").read_text())["results"].values()
    return found


def gpt2_folder(folder: Path) -> Path:
    tokenizer = byte_level_bpe(LINES)
    tokenizer.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=32,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_a_gpt2_goes_on_learning_a_text_and_continues_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, run, text = gpt2_folder(tmp_path / "gpt2"), tmp_path / "run", tmp_path / "text.txt"
    text.write_text("\n".join(LINES * 30), encoding="utf-8")
    words = ["train", "language_modeling", "--from", str(source), "--data", str(text), "--seq-len", "32"]
    assert (
        main([*words, "--epochs", "12", "--batch-size", "8", "--learning-rate", "1e-2", "--out", str(run), "--quiet"])
        == 0
    )
    found = results(run)
    task = build_task("language_modeling", {"data": str(text), "seq_len": 32, "tokenizer": f"hf:{source}"})
    assert 0 < found["bits_per_byte,valid"] < task.reference()["bits_per_byte"]
    assert found["perplexity,valid"] == pytest.approx(torch.tensor(found["nats_per_token,valid"]).exp().item())
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "final")
    assert type(model).__name__ == "GPT2LMHeadModel"
    capsys.readouterr()
    assert main(["predict", str(run), "--text", "the red", "--max-new-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("the red")
