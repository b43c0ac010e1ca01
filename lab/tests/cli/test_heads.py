"""Each kind of head of transformers, by every command that reads one: right, or refused by name."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from tests.support.bert import WORDS as VOCABULARY
from tests.support.bert import make_table
from tests.support.tokenizer_folders import bert_words
from tests.support.words import succeed
from tests.support.words import words as typed

from wellposed.certification import certify
from wellposed.errors import ConfigError
from wellposed.head_kind import SINGLE
from wellposed_lab.training.certified.run import has_certified_accuracy

TEXTS = ["w1 good w2", "bad w3 w4 w5", "w7 w8"]
# problem_type, number of labels
HEADS = {
    "number": ("regression", 1),
    "number by its one label": (None, 1),
    "two numbers": ("regression", 2),
    "several": ("multi_label_classification", 3),
    "several of two": ("multi_label_classification", 2),
    "one of three": ("single_label_classification", 3),
    "one of two by default": (None, 2),
}


def save_head(kind, count, folder):
    """Save a BERT with a head of this kind; return the model and its logits of the texts."""
    torch.manual_seed(1)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    sizes |= {"vocab_size": len(VOCABULARY), "max_position_embeddings": 32, "num_labels": count}
    config = transformers.BertConfig(**sizes, problem_type=kind)
    model = transformers.BertForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.classifier.weight, std=2.0)
    model.save_pretrained(folder)
    tokenizer = bert_words(VOCABULARY[4:])
    tokenizer.save_pretrained(folder)
    rows = [model(**tokenizer(text, return_tensors="pt")).logits[0].tolist() for text in TEXTS]
    return model, rows


def expected(row, kind):
    """Return what a line shows of logits, by mathematics alone: names and numbers."""
    if kind == "regression":
        return row
    total = sum(map(math.exp, row))
    shares = [math.exp(x) / total if kind == SINGLE else 1 / (1 + math.exp(-x)) for x in row]
    ranked = sorted(((p, f"LABEL_{k}") for k, p in enumerate(shares)), reverse=True)
    likely = ranked[:1] if kind == SINGLE else [pair for pair in ranked if pair[0] >= 0.5]
    return [part for p, name in likely for part in (name, p)]


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_each_kind_of_head_is_read_as_it_is_or_refused(head, tmp_path, cli):
    problem_type, count = HEADS[head]
    kind = problem_type or ("regression" if count == 1 else SINGLE)
    folder, lines, out, table = (tmp_path / name for name in ("head", "lines", "out", "table.tsv"))
    model, rows = save_head(problem_type, count, folder)
    lines.write_text("\n".join(TEXTS) + "\n")
    make_table(table)
    succeed(["predict", str(folder), "--input", str(lines), "--output", str(out)])
    for line, row in zip(out.read_text().split("\n"), rows, strict=False):
        parts = list(filter(None, line.split("\t")))
        wanted = expected(row, kind)
        names = [part for part in parts if part.startswith("LABEL")]
        assert names == [value for value in wanted if isinstance(value, str)]
        numbers = [float(part) for part in parts if part not in names]
        wanted = [value for value in wanted if isinstance(value, float)]
        assert numbers == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    succeed(["certify", str(folder), "--seq-len", "8"])
    train = typed("text_classification --data", [table], "--from", [folder], "--steps 1 --quiet")
    train += typed("--max-length 16 --out", [tmp_path / "run"])
    if kind == SINGLE:
        return
    certificate = certify(model, seq_len=8, radius=10.0, cross_check=False)
    for refused in (
        partial(certificate.radius, torch.tensor(rows)),
        partial(has_certified_accuracy, model),
    ):
        with pytest.raises(ConfigError, match=f"problem_type is {kind}"):
            refused()
    for words in (
        typed("predict", [folder], "--text w1 --certified"),
        typed("certify", [folder], "--text w1"),
        ["train", *train],
        ["compare", *train, *typed("--variants plain --seeds 1")],
    ):
        assert f"problem_type is {kind}" in cli(words, status=2).err
    succeed(["train", *train, "--new-head", "--out", str(tmp_path / "new")])
    answer = cli(["predict", str(tmp_path / "new"), "--text", "w1 good"], status=0).out
    assert answer.split("\t")[0] in ("good", "bad")


@pytest.mark.parametrize("kind", ["single_label_classification", "ranking"])
def test_a_head_that_makes_no_sense_is_refused(kind):
    config = SimpleNamespace(num_labels=1, problem_type=kind)
    model = SimpleNamespace(config=config)
    with pytest.raises(ConfigError, match="correct the model"):
        has_certified_accuracy(model)


def test_answers_of_weights_that_are_not_finite_are_refused(tmp_path, cli):
    model, _ = save_head(None, 2, tmp_path)
    with torch.no_grad():
        model.classifier.weight[0, 0] = math.nan
    model.save_pretrained(tmp_path)
    errors = cli("predict", [tmp_path], "--text", ["w1 good"], status=1).err
    assert "weights with such values: classifier.weight" in errors
    assert "Load an earlier checkpoint" in errors
