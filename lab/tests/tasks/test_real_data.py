"""The published data sets, as far as they are at hand: counts, vocabularies, labels."""

import gzip

import pytest
from tests.support.tokenizer_folders import bert_words

from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import build_task

pytestmark = pytest.mark.data


def sizes(task):
    return [len(task.dataset(split)) for split in SPLITS]


PUBLISHED = {
    "listops/d20s_train.tsv.gz": ("listops", {}, [8000, 1000, 1000], 10),
    "listops/d8_test.tsv.gz": ("listops", {}, [9000, 500, 500], 10),
    "ag_news": ("text_classification", {"tokenizer": "byte"}, [9000, 1000, 3800], 4),
    "ag_news/": ("retrieval", {"num_train": 2000, "max_length": 256}, [2000, 1000, 3800], 2),
    "cifar10_subset": ("image", {}, [10000, 1000, 2000], 10),
}


@pytest.mark.parametrize("data", PUBLISHED)
def test_published_sets_have_their_sizes_and_labels(shared_data, data):
    """Labels of ListOps are those of every expression, or the task would have refused the file."""
    name, options, expected, labels = PUBLISHED[data]
    task = build_task(name, {"data": str(shared_data / data), **options})
    assert (sizes(task), task.model_kwargs()["num_labels"]) == (expected, labels)


def test_penn_treebank_characters(shared_data):
    task = build_task(
        "char_lm", {"data": str(shared_data / "ptb" / "ptb.char.train.txt.gz"), "seq_len": 256}
    )
    described = task.description()
    assert described["tokenizer"]["vocabulary"] == 50 + 2
    assert all(described["unknown_characters"][split]["count"] == 0 for split in SPLITS)
    # The word files hold the same sentences: one line feed and the text between the outer spaces
    # per line.
    for split in SPLITS:
        words = gzip.decompress((shared_data / "ptb" / f"ptb.{split}.txt.gz").read_bytes()).decode()
        lines = [line.strip() for line in words.removesuffix("\n").split("\n")]
        assert described["characters"][split] == sum(map(len, lines)) + len(lines)
        assert len(task.dataset(split).tokens) == described["characters"][split]
    decoded = task.tokenizer.decode(task.dataset("valid")[0]["input_ids"])
    assert decoded.startswith(
        "consumers may want to move their telephones a little closer to the tv set\n<unk> <unk> "
    )
    assert task.reference()["nats_per_char"] == pytest.approx(3.005, abs=0.001)


@pytest.mark.slow
def test_quora_pairs_with_a_tokenizer_that_has_a_form_for_them(shared_data, tmp_path):
    bert_words(["What", "is", "the", "How", "I"]).save_pretrained(tmp_path)
    columns = {"text_column": "sentence1,sentence2", "label_column": "is_duplicate"}
    columns["tokenizer"] = f"hf:{tmp_path}"
    data = str(shared_data / "minbert" / "quora-train-15k.csv.gz")
    task = build_task("text_classification", {"data": data, "max_length": 64, **columns})
    assert sum(sizes(task)) == 15212
    assert task.model_kwargs()["id2label"] == {0: "0.0", 1: "1.0"}
    described = task.description()
    assert "text 'sentence1' + 'sentence2' as a pair" in described["files"]["train"]["columns"]
    example = task.dataset("train")[0]
    ids, end = example["input_ids"], task.tokenizer.sep_token_id
    first, second = (place for place, token in enumerate(ids) if token == end)
    assert example["token_type_ids"] == [0] * (first + 1) + [1] * (second - first)
