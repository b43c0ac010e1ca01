"""Word language modelling: words, ends of lines, vocabulary, accounting, perplexity, Penn
Treebank's counts."""

import pytest
from tests.support.refusal import bad_config

from wellposed.tasks import SPLITS, build_task

LINES = [" the cat <unk> N times ", " a dog 's bark ", "", " the dog sat "]


def build(data, **options):
    return build_task("word_lm", {"data": str(data), "seq_len": 6, **options})


def decoded(task, split):
    """Join the blocks of a split, without their one-token overlap, back into its words."""
    blocks = [block["input_ids"] for block in task.dataset(split)]
    ids = blocks[0] + [token for block in blocks[1:] for token in block[1:]]
    return task.tokenizer.convert_ids_to_tokens(ids)


@pytest.fixture
def folder(tmp_path):
    for split, lines in {"train": LINES * 5, "valid": LINES, "test": [" the parrot sat "]}.items():
        (tmp_path / f"ptb.{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_words_and_ends_of_lines_are_those_of_the_file(folder):
    task = build(folder)
    expected = [word for line in LINES if line.strip() for word in [*line.split(), "<eos>"]]
    assert decoded(task, "train") == expected * 5
    assert decoded(task, "valid") == expected
    assert task.description()["words"]["train"] == 5 * len(expected)
    without = build(folder, eos=False)
    assert decoded(without, "valid") == [word for word in expected if word != "<eos>"]


def test_the_vocabulary_is_that_of_train_and_unknown_words_are_counted(folder):
    task = build(folder)
    assert task.model_kwargs()["vocab_size"] == 2 + 11
    described = task.description()["unknown_words"]
    assert described["test"] == {"count": 1, "distinct": 1, "most_frequent": {"parrot": 1}}
    assert described["valid"]["count"] == 0
    small = build(folder, max_words=3)
    assert small.model_kwargs()["vocab_size"] == 2 + 3
    assert {"<eos>", "the", "dog"} <= set(decoded(small, "train"))


def test_pieces_are_words_and_marks(tmp_path):
    (tmp_path / "x.txt").write_text("Well, it's (almost) done.\n" * 30)
    task = build(tmp_path / "x.txt", words="pieces", eos=False)
    text = "".join(decoded(task, "train")[:7])
    assert text == "Well,it's(almost"
    assert "done." in decoded(build(tmp_path / "x.txt"), "train")


def test_limit_words_cuts_train_alone(folder):
    full, task = build(folder), build(folder, limit_words=9)
    assert decoded(task, "train") == decoded(full, "train")[:9]
    assert (
        task.description()["train_words_left_out_by_limit_words"] == len(decoded(full, "train")) - 9
    )
    with bad_config(match="limit_words = 1, expected an integer >= 2"):
        build(folder, limit_words=1)


@pytest.mark.data
def test_penn_treebank_has_its_published_counts(shared_data):
    task = build(shared_data / "ptb" / "ptb.train.txt.gz", seq_len=36)
    assert task.description()["words"] == {"train": 929_589, "valid": 73_760, "test": 82_430}
    assert task.model_kwargs()["vocab_size"] == 10_000 + 2
    assert [task.description()["unknown_words"][split]["count"] for split in SPLITS] == [0, 0, 0]
