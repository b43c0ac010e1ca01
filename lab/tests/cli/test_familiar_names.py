"""Options under the Trainer's names, lengths that the checkpoint's positions set, and a reason once."""

import tomllib

import pytest
import torch
from tests.support.tokenizer_folders import bert_words
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from wellposed.errors import ConfigError
from wellposed_lab.cli.arguments import ALIASES, our_name

TASKS = {"max_seq_length": "text_classification", "block_size": "language_modeling"}
VALUES = {
    "model_name_or_path": "MODEL", "output_dir": "there", "lr_scheduler_type": "linear",
    "torch_compile": "", "report_to": "tensorboard", "train_file": "a.csv",
    "validation_file": "b.csv", "test_file": "c.csv", "warmup_ratio": "0.2",
    "label_smoothing_factor": "0.1", "num_train_epochs": "2",
}  # fmt: skip
SIZES: dict = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
}  # fmt: skip


def printed(cli, task, *words):
    """The resolved configuration of a command line."""
    words = ("--data", "builtin", *words)
    return tomllib.loads(cli(["train", task, *words, "--print-config"]).out)


@pytest.fixture
def checkpoint(tmp_path):
    """A BERT of 32 positions with its tokenizer."""
    tokenizer = bert_words(["good", "film"])
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **SIZES)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("dashes", [False, True])
@pytest.mark.parametrize("equals", [False, True])
@pytest.mark.parametrize("alias", ALIASES)
def test_a_name_of_the_trainer_is_our_option(alias, equals, dashes, checkpoint, cli):
    task = TASKS.get(alias, "text_classification")
    value = VALUES.get(alias, "3")
    value = str(checkpoint) if value == "MODEL" else value
    written = alias.replace("_", "-") if dashes else alias
    our = ALIASES[alias].replace("_", "-")
    lines = [
        ([f"--{name}={value}"] if equals else [f"--{name}", value]) if value else [f"--{name}"]
        for name in (written, our)
    ]
    assert [our_name(word) for word in lines[0]] == lines[1]
    first, second = (
        printed(cli, task, *(("--data", "x.csv") if "file" in alias else ()), *line)
        for line in lines
    )
    assert first == second
    if our not in ("out", "track"):
        assert first != printed(cli, task), "the option changes something"


def test_a_batch_of_each_process_is_refused_if_there_are_several(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="several processes share a batch"):
        our_name("--per_device_train_batch_size")


def test_a_checkpoint_with_fewer_positions_sets_the_length(checkpoint, tmp_path, cli):
    classify = ["text_classification", "--from", str(checkpoint)]
    assert printed(cli, *classify)["task_options"]["max_length"] == 32
    assert printed(cli, *classify, "--max-length", "16")["task_options"]["max_length"] == 16
    windows = printed(cli, *classify, "--certified-windows", "1")
    assert windows["task_options"]["max_length"] == 256, "windows of words need no positions"
    roberta = RobertaConfig(vocab_size=9, max_position_embeddings=34, **SIZES)
    RobertaForSequenceClassification(roberta).save_pretrained(tmp_path / "roberta")
    bert_words(["good", "film"]).save_pretrained(tmp_path / "roberta")
    late = printed(cli, "text_classification", "--from", str(tmp_path / "roberta"))
    assert late["task_options"]["max_length"] == 32, "positions begin after the padding token"
    gpt2 = GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=24)
    GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    bert_words(["good", "film"]).save_pretrained(tmp_path / "gpt2")
    language = printed(cli, "language_modeling", "--from", str(tmp_path / "gpt2"))
    assert language["task_options"]["seq_len"] == 24


def test_a_comparison_from_a_checkpoint_of_few_positions_runs_and_says_its_length(
    checkpoint, tmp_path, cli
):
    lines = ["text,label", *["good film,a", "film film good,b"] * 20]
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    words = ["compare", "text_classification", "--data", str(tmp_path / "mine.csv"), "--from"]
    words += [str(checkpoint), "--seeds", "1", "--max-steps", "1", "--out", str(tmp_path / "out")]
    output = cli(words)
    assert "--max-length 32: the model has no more positions" in output.err
    assert "report: " in output.out


def test_the_reason_against_a_model_as_a_whole_comes_once(checkpoint, cli):
    output = cli("certify", [checkpoint])
    assert (output.out + output.err).count("have no bound on all inputs") == 1
    assert "there is no bound on a ball either\n" in output.err
    assert "BertForSequenceClassification" in output.out
