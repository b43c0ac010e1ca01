"""``wellposed predict`` on an encoder-decoder: no line lost or moved, long lines, files whole
or absent."""

import os
import random

import pytest
import torch
from tests.support.words import words as typed

from wellposed_lab.cli.main import main
from wellposed_lab.cli.prediction.lines import line_writer

WORDS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "acht": "eight"}
LIMIT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small corpus and an untrained translation model, saved as
    ``model``."""
    from wellposed.models import build_model
    from wellposed_lab.tasks.task import build_task

    folder = tmp_path_factory.mktemp("predict")
    draw = random.Random(0)
    rows = [draw.choices(list(WORDS), k=draw.randint(1, 4)) for _ in range(60)]
    (folder / "train.de").write_text("\n".join(map(" ".join, rows)))
    (folder / "train.en").write_text("\n".join(" ".join(WORDS[w] for w in row) for row in rows))
    options = {"data": str(folder), "src": "de", "tgt": "en", "vocab_size": 60, "max_tokens": LIMIT}
    task = build_task("translation", options)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = build_model("wellposed", "seq2seq_lm", **sizes, **task.model_kwargs())
    model.save_pretrained(folder / "model")
    task.tokenizer.save_pretrained(folder / "model")
    return folder


def predict(folder, lines, *more):
    source = folder / "in.txt"
    out = folder / "out.txt"
    source.write_bytes(lines.encode() if isinstance(lines, str) else lines)
    out.unlink(missing_ok=True)
    words = typed("predict", [folder / "model"], "--input", [source], "--output", [out])
    return main(typed(words, "--batch-size 3 --beams 1 --max-new-tokens 4", more)), out


def some_lines(count):
    draw = random.Random(1)
    return [" ".join(draw.choices(list(WORDS), k=draw.randint(0, 5))) for _ in range(count)]


def test_lines_keep_their_number_and_order(folder):
    """Every line of a file of several batches is what the line gives alone; blank lines stay
    blank."""
    lines = some_lines(25)
    code, out = predict(folder, "\n".join(lines) + "\n")
    assert code == 0
    together = out.read_text().split("\n")
    assert together.pop() == ""
    assert len(together) == len(lines)
    assert [line == "" for line in together] == [line == "" for line in lines]
    alone = {}
    for line in sorted(set(lines) - {""})[:2]:
        assert predict(folder, line)[0] == 0
        alone[line] = out.read_text().removesuffix("\n")
    pairs = zip(lines, together, strict=True)
    assert all(translation == alone[line] for line, translation in pairs if line in alone)
    assert len(set(together)) > 3


def test_long_lines_are_refused_with_their_numbers(folder, capsys):
    long = "eins zwei " * LIMIT
    lines = f"eins\n{long}\nzwei\n{long}\n"
    code, out = predict(folder, lines)
    errors = capsys.readouterr().err
    assert code == 1
    assert not out.exists()
    limit = f"lines have more tokens than the model has positions, {LIMIT}; cut them"
    assert all(part in errors for part in (limit, "in.txt:2: ", "in.txt:4: "))


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        ("eins\n", ["--temperature", "0.5"], "--temperature has no effect on this model"),
        ("eins\ngr\xf6\xdfe\n".encode("latin-1"), [], "in.txt:2: not UTF-8: byte 0xf6 at byte 3"),
        ("", [], "the file is empty"),
    ],
)
def test_what_cannot_be_translated_leaves_no_file(folder, capsys, lines, more, message):
    code, out = predict(folder, lines, *more)
    assert code in (1, 2)
    assert not out.exists()
    assert message in capsys.readouterr().err


def test_an_interrupt_leaves_the_old_file(tmp_path):
    out = tmp_path / "out.txt"
    out.write_text("old\n")
    writer = line_writer(out)
    writer.__enter__().write("half")
    assert len(os.listdir(tmp_path)) == 2
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert os.listdir(tmp_path) == ["out.txt"]
    assert out.read_text() == "old\n"
