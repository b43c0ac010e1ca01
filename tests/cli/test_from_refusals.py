"""What `--from` cannot use is one line that says what to do, on real folders of small models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.bert import make_checkpoint, make_table
from tests.support.tokenizer_folders import byte_level_bpe
from tests.support.words import Cli, succeed
from tests.support.words import words as typed

from wellposed.cli import main

CLASSIFY = "text_classification --data {files}/t.tsv --max-length 16 --epochs None"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a BERT, and folders that differ from it in one thing each."""
    folder = tmp_path_factory.mktemp("files")
    make_checkpoint(folder / "bert")
    make_table(folder / "t.tsv")
    for name, changes in (("wide", {"hidden_size": 32}), ("deep", {"num_hidden_layers": 3})):
        shutil.copytree(folder / "bert", folder / name)
        config = folder / name / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    shutil.copytree(folder / "bert", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    bert = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "bert", num_labels=3
    )
    bert.save_pretrained(folder / "three")
    transformers.AutoTokenizer.from_pretrained(folder / "bert").save_pretrained(folder / "three")
    tokenizer = byte_level_bpe(["a text"])
    tokenizer.save_pretrained(folder / "gpt2")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2Config(vocab_size=len(tokenizer), **sizes, **special)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    vit = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.ViTForImageClassification(vit).save_pretrained(folder / "vit")
    t5 = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    transformers.T5ForConditionalGeneration(t5).save_pretrained(folder / "t5")
    (folder / "my.py").write_text("import nothing_of_this_name\n")
    return folder


WIDTHS = "embeddings.LayerNorm.bias is (16,) in the file and (32,) in the model"
OTHER_TOKENS = "its weights are those of its own tokens"
REFUSED = [
    (
        "language_modeling --from {files}/bert --limit-chars 20000 --seq-len 16",
        "the tokens of a BertLMHeadModel see those after them",
    ),
    ("language_modeling --from {files}/t5", "a t5 model has no head for causal lm"),
    (
        "translation --from {files}/bert --data {files} --src de --tgt en",
        "a bert model has no head for seq2seq lm",
    ),
    (
        "char_lm --from {files}/gpt2 --limit-chars 20000 --seq-len 32",
        f"{OTHER_TOKENS}, and the data of char_lm is read as others",
    ),
    (f"{CLASSIFY} --from {{files}}/vit", "a vit model has no head for sequence classification"),
    (f"{CLASSIFY} --from {{files}}/bert --tokenizer hf:{{files}}/gpt2", OTHER_TOKENS),
    (f"{CLASSIFY} --from {{files}}/three", "give --new-head to draw a new one"),
    (f"{CLASSIFY} --from bert-base-uncased", "couldn't find them in the cached files"),
    (f"{CLASSIFY} --from {{files}}/wide", WIDTHS),
    (f"{CLASSIFY} --from {{files}}/wide --new-head", WIDTHS),
    (f"{CLASSIFY} --from {{files}}/deep", "lacks bert.encoder.layer.1."),
    (f"{CLASSIFY} --from {{files}}/cut", "cut: cannot be loaded: "),
    (
        f"{CLASSIFY} --from {{files}}/bert --import {{files}}/my.py",
        "ModuleNotFoundError: No module named 'nothing_of_this_name'",
    ),
]


def in_place(files: Path, command: str) -> list[str]:
    return [word.format(files=files) for word in command.split()]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_what_cannot_be_started_from_is_one_line(
    files: Path, tmp_path: Path, words: str, says: str, cli: Cli
) -> None:
    out, given = tmp_path / "run", in_place(files, words)
    message = cli("train", given, "--steps 2 --quiet --out", [out], status=None).err
    assert says in message
    assert message.count("\n") == 1
    assert not (out / "config.toml").exists()


@pytest.mark.parametrize("command", ["measure", "certify"])
def test_weights_that_do_not_fit_are_measured_by_no_command(
    files: Path, command: str, cli: Cli
) -> None:
    said = cli([command, str(files / "wide")], status=1).err
    assert WIDTHS in said


def test_a_comparison_that_could_not_begin_leaves_its_folder_free(
    files: Path, tmp_path: Path
) -> None:
    words = typed("compare", in_place(files, CLASSIFY), "--out", [tmp_path / "runs"])
    words += typed("--quiet --steps 2 --variants plain --seeds 1")
    assert main([*words, "--from", str(files / "three")]) == 2
    succeed([*words, "--from", str(files / "bert")])
    assert main([*words, "--from", str(files / "bert")]) == 2  # now there is something to lose


def test_memory_that_ends_is_one_line_with_the_way_out(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def full(self: object, *args: object, **inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", full)
    words = in_place(files, CLASSIFY)
    words += typed("--from", [files / "bert"], "--steps 2 --batch-size 8 --quiet")
    message = cli(["train", *words, "--out", str(tmp_path / "run")], status=1).err
    assert "--batch-size 4 --gradient-accumulation 2, or give --gradient-checkpointing" in message
    assert message.count("out of memory") == 1


def test_texts_longer_than_the_model_are_cut_as_in_training_and_counted(
    files: Path, tmp_path: Path, cli: Cli
) -> None:
    words = in_place(files, CLASSIFY)
    run, lines = tmp_path / "run", tmp_path / "lines.txt"
    succeed("train", words, "--from", [files / "bert"], "--steps 2 --out", [run], "--quiet")
    kept = (  # with both ends, the 16 tokens of training
        "w1 good w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13"
    )
    lines.write_text(f"{kept}\n{kept} bad bad bad\nw1\n")
    said = cli(["predict", "--from", str(run), "--input", str(lines)])
    first, second, _ = said.out.splitlines()
    assert first == second
    assert "1 lines of more than 16 tokens were cut to their start: 2" in said.err
