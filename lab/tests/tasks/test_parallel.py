"""Sentence pairs: layouts of folders, tables, the hub; and one message with file:line for
everything that is wrong."""

import gzip

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.data import splits
from wellposed_lab.tasks.data.parallel import ParallelOptions, load_parallel

PAIRS = [(f"wort {i} .", f"word {i} .") for i in range(50)]


def write(folder, name, texts):
    content = "".join(text + "\n" for text in texts).encode()
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def write_split(folder, stem, count, ending=""):
    write(folder, f"{stem}.de{ending}", [de for de, _ in PAIRS[:count]])
    write(folder, f"{stem}.en{ending}", [en for _, en in PAIRS[:count]])


LAYOUTS = {
    "multi30k": ["train*.gz", "val", "test_2016_flickr"],
    "iwslt": ["train*.gz", "valid*.gz", "test*.gz"],
    "fairseq": ["train.de-en", "valid.de-en", "test.de-en"],
    "wmt": ["corpus.train", "newsdev2017", "newstest2017"],
}


def load(data, source="de", target="en"):
    return load_parallel(ParallelOptions(str(data), source, target))


def rows_of(texts):
    return list(zip(texts.source, texts.target, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flipped", [False, True])
def test_every_layout_gives_the_same_pairs(tmp_path, layout, flipped):
    for name, count in zip(LAYOUTS[layout], (40, 7, 5), strict=True):
        stem, _, ending = name.partition("*")
        write_split(tmp_path, stem, count, ending)
    pairs, described = load(tmp_path, *(("en", "de") if flipped else ("de", "en")))
    assert [len(pairs[split]) for split in ("train", "valid", "test")] == [40, 7, 5]
    assert rows_of(pairs["train"]) == [pair[:: -1 if flipped else 1] for pair in PAIRS[:40]]
    assert len(described["files"]["test"]["de"]["sha256"]) == 64
    assert "cut_from_train" not in described


def test_several_test_sets_are_named(tmp_path):
    for count, stem in enumerate(("test_2017_mscoco", "test_2016_flickr", "val", "train"), start=3):
        write_split(tmp_path, stem, count)
    problem = r"2 files could be the test split; leave one there:\n  test_2016_fl"
    with pytest.raises(DataError, match=problem):
        load(tmp_path)


def test_missing_splits_are_cut_from_train_and_said_so(tmp_path):
    write_split(tmp_path, "train", 40)
    pairs, described = load(tmp_path)
    cut = dict.fromkeys(("valid", "test"), "2 of 40 pairs, by a fixed shuffle")
    assert described["cut_from_train"] == cut
    assert sorted(row for texts in pairs.values() for row in rows_of(texts)) == sorted(PAIRS[:40])
    assert pairs["valid"].where(0, 1).startswith(f"{tmp_path / 'train.en'}:")
    write_split(tmp_path, "train", 39)
    with pytest.raises(DataError, match="39 pairs are too few"):
        load(tmp_path)


def test_a_table_of_pairs(tmp_path):
    rows = ["id\ten\tde"] + [f"{i}\t{en}\t{de}" for i, (de, en) in enumerate(PAIRS)]
    write(tmp_path, "train.tsv.gz", rows)
    write(tmp_path, "valid.tsv", rows[:4])
    pairs, described = load(tmp_path)
    assert rows_of(pairs["valid"]) == PAIRS[:3]
    assert described["files"]["valid"]["columns"] == "id,en,de"


def test_columns_without_names_are_refused(tmp_path):
    path = write(tmp_path, "all.tsv", [f"{en}\t{de}" for de, en in PAIRS])
    problem = r"all\.tsv:1: no header names de and en \(the line has 2 columns: word 0"
    with pytest.raises(ConfigError, match=problem):
        load(path)
    write(tmp_path, "all.tsv", ["de\ten", "one", "c\td"])
    with pytest.raises(DataError, match=r"all\.tsv:2: 1 columns"):
        load(path)


ENGLISH = [en for _, en in PAIRS]
SHORT = r"train\.de has 40 lines, \S+train\.en has 43; .* partner is \S+train\.en:41: 'word 40 \.'"
EMPTY = r"train\.en:2: the target is empty\n\s+\S+train\.en:40: the target is empty"


@pytest.mark.parametrize(
    ("texts", "problem"), [(ENGLISH[:43], SHORT), (["a", " ", *ENGLISH[2:39], ""], EMPTY)]
)
def test_lines_without_a_partner_are_named(tmp_path, texts, problem):
    write_split(tmp_path, "train", 40)
    write(tmp_path, "train.en", texts)
    with pytest.raises(DataError, match=problem):
        load(tmp_path)


def test_an_unknown_language_names_those_that_exist(tmp_path):
    write_split(tmp_path, "train", 40)
    with pytest.raises(
        DataError, match=r"no train file for language 'fr'.*languages that exist there: de, en"
    ):
        load(tmp_path, "de", "fr")
    with pytest.raises(ConfigError, match="expected two languages"):
        load(tmp_path, "de", "de")
    with pytest.raises(DataError, match="no such file or folder"):
        load(tmp_path / "nowhere")


def test_pairs_of_the_hub(monkeypatch):
    from datasets import Dataset

    nested = Dataset.from_dict({"translation": [{"de": de, "en": en} for de, en in PAIRS]})
    flat = Dataset.from_dict({"de": [de for de, _ in PAIRS[:3]], "en": ENGLISH[:3]})
    hub = {"train": nested, "valid": flat, "test": flat}
    monkeypatch.setattr(splits, "load_hub_dataset", lambda data: hub)
    pairs, _ = load("hf:some/pairs:de-en")
    assert rows_of(pairs["train"]) == PAIRS
    assert list(pairs["valid"].target) == ENGLISH[:3]
    with pytest.raises(DataError, match=r"hf:some/pairs \(train\): no cs, only de, en"):
        load("hf:some/pairs", "cs", "en")
