"""McGrath (2024): the task of three sets, its losses and scores, and the recipes at toy size."""

import gzip
import itertools
import json
import math

import pytest
import torch
from studies.tests.support.recipes import check_reproduced
from torch.nn import functional

from wellposed.errors import ConfigError, DataError
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.report.runs import read_metrics
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.config import RunConfig
from wellposed_studies.mcgrath2024 import scores as study
from wellposed_studies.mcgrath2024.task import (
    encode_rows,
    overall_score,
    read_minbert,
    train_word_pieces,
)
from wellposed_studies.recipe import Request
from wellposed_studies.reproduce import reproduce


def test_the_overall_score_gives_every_row_of_his_table():
    for row in study.PAPER_TABLE.values():
        scores = dict(zip(study.COLUMNS, row, strict=True))
        assert overall_score(scores) == pytest.approx(scores["overall"], abs=6e-5)


def batch(task, rows=6):
    """Logits and a batch of a few rows of each set."""
    members = task.batches("train", 3 * rows, seed=0, epoch=0)[0]
    examples = task.collate([task.dataset("train")[member] for member in members])
    return torch.randn(3 * rows, 7, generator=torch.Generator().manual_seed(1)), examples


def test_the_loss_is_the_sum_of_the_three_means(task):
    logits, examples = batch(task)
    labels = examples["labels"]
    sst = functional.cross_entropy(logits[:6, :5], labels[:6, 0].long())
    para = logits[6:12, 5]
    duplicate = labels[6:12, 1]
    signs = duplicate * functional.logsigmoid(para) + (1 - duplicate) * functional.logsigmoid(-para)
    sts = (5 / (1 + torch.exp(-logits[12:, 6])) - labels[12:, 2]).square().mean()
    total, count = task.loss_sum(logits, examples)
    assert float(count) == task.target_count(examples) == 18
    torch.testing.assert_close(total / count, sst - signs.mean() + sts)


def test_scores_of_several_batches_are_those_of_all_rows(task):
    logits, examples = batch(task, 10)
    totals = {}
    for part in (slice(0, 11), slice(11, 25), slice(25, 30)):
        sums = task.metric_sums(logits[part], {"labels": examples["labels"][part]})
        totals = {
            name: tuple(map(sum, zip(totals.get(name, (0.0, 0.0)), pair, strict=True)))
            for name, pair in sums.items()
        }
    scores = task.summarize(totals)
    pair = torch.stack([logits[20:, 6], examples["labels"][20:, 2]]).double()
    assert scores["sts"] == pytest.approx(float(torch.corrcoef(pair)[0, 1]), abs=1e-9)
    right = (logits[:10, :5].argmax(-1) == examples["labels"][:10, 0]).double().mean()
    assert scores["sst"] == pytest.approx(float(right))
    constant = task.metric_sums(torch.zeros(30, 7), examples)
    assert task.summarize(constant)["sts"] == 0.0, "it orders nothing"


def test_two_passes_give_a_linear_layer_on_both_states(minbert):
    task = build_task("minbert", {"data": str(minbert), "paraphrase": "two_passes"})
    rows = [row for row in task.dataset("train") if "second" in row][:4]
    sides = [
        [row["input_ids"] for row in examples]
        for examples in (rows, [row["second"] for row in rows])
    ]
    states = torch.tensor([[len(ids), sum(ids)] for side in sides for ids in side]).log()
    head = torch.randn(task.model_kwargs()["num_labels"], 2)
    examples = task.collate(rows)
    logits = torch.cat([states[:4], states[4:]], 1) @ torch.cat([head[5], head[7]])
    loss, count = task.loss_sum(states @ head.mT, examples)
    labels = examples["labels"][:4, 1]
    expected = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    torch.testing.assert_close(loss, 3 * expected)
    assert count == task.target_count(examples) == 4
    assert all(task.tokenizer.decode(ids).count("[SEP]") == 1 for side in sides for ids in side)


def test_batches_hold_rows_of_each_set_and_every_row_once_a_pass(task):
    drawn = [member for epoch in (0, 1) for members in task.batches("train", 12, seed=1, epoch=epoch)
             for member in members]  # fmt: skip
    assert sorted(drawn[:120]) == list(range(3 * 40))
    assert task.batches("train", 12, seed=1, epoch=0) == task.batches("train", 12, seed=1, epoch=0)
    assert task.batches("train", 12, seed=2, epoch=0) != task.batches("train", 12, seed=1, epoch=0)
    for members in task.batches("train", 12, seed=1, epoch=0):
        assert [member // 40 for member in members] == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("variant", "penalty"),
    [
        ("key_query:1e-4", {"key": 1e-4, "query": 1e-4, "form": "gram"}),
        ("gram_schmidt:1e-6", {"key": 1e-6, "form": "qr", "qr_method": "gram_schmidt"}),
        ("householder", {"query": 1e-4, "form": "qr", "qr_method": "householder"}),
    ],
)
def test_his_penalties_are_variants(variant, penalty):
    options = vars(apply_variant(variant, RunConfig("minbert")).penalty)
    assert {name: options[name] for name in penalty} == penalty


@pytest.mark.slow
def test_the_recipes_train_each_cell_once_by_the_common_loop(minbert, encoder, tmp_path):
    toy = {"scale": "toy", "out": tmp_path, "data": str(minbert)}
    items = "figure-3", "figure-1", "table-1", "qr"
    made = {item: reproduce(f"mcgrath2024/{item}", **toy) for item in items}
    for item in items:
        check_reproduced(made[item])
    runs = tmp_path / "runs" / "mcgrath2024-toy"
    cells = ["baseline", *study.GRAM, *study.QR]
    assert {path.name for path in runs.iterdir()} == {cell.replace(":", "-") for cell in cells}
    assert [row["cell"] for row in made["figure-1"].result.rows] == ["baseline", *study.GRAM]
    metrics = [read_metrics(runs / "baseline" / f"seed-{seed}") for seed in (0, 1)]
    evaluated = [[row for row in rows if row["split"] == "valid"] for rows in metrics]
    mean = sum(rows[-1]["overall"] for rows in evaluated) / 2
    assert made["table-1"].result.rows[1]["overall"] == pytest.approx(mean)
    drift = made["figure-3"].result.rows
    last = next(
        row for row in drift if (row["seed"], row["step"], row["weight"]) == (1, 3, "key.0")
    )
    assert last["error"] == evaluated[1][-1]["err_orth/key.0"]
    initial = json.loads((runs / "baseline" / "seed-0" / "measure-initial.json").read_text())
    keys = [row["orthogonality_error"] for row in initial["rows"] if row["role"] == "key"]
    first = next(row for row in drift if (row["seed"], row["weight"]) == (0, "key.0"))
    assert (first["step"], first["error"]) == (0, pytest.approx(keys[0]))
    done = reproduce("mcgrath2024/pretrained", encoder=str(encoder), **toy)
    scores = [row["cell"] for row in done.result.rows if "overall" in row]
    assert scores == ["baseline", *study.PRETRAINED]
    assert json.loads(done.files[2].read_text())["command"].endswith("--encoder ENCODER")


def test_an_encoder_with_weights_and_data_are_asked_for(minbert, encoder, tmp_path):
    file = str(encoder / "config.json")
    for scale, scratch in {"mini": (True, True, False), "paper": (False, True, False)}.items():
        requests = [
            Request(scale, tmp_path, encoder=encoder_path)
            for encoder_path in (None, file, str(encoder))
        ]
        assert tuple(map(study.from_scratch, requests)) == scratch
    for weights in (None, file):
        with pytest.raises(ConfigError, match="give --encoder FOLDER"):
            study.pretrained(Request("toy", tmp_path, str(minbert), encoder=weights))
    with pytest.raises(ConfigError, match=r"give --data FOLDER with ids-sst-train.csv"):
        study.qr(Request("toy", tmp_path))


@pytest.mark.parametrize(
    ("key", "affinity", "verdict"),
    [
        ((0.9, 0.92, 0.91), (1.1, 1.11, 1.12), True),
        ((0.9, 0.92, 0.91), (0.8, 0.82, 0.81), True),
        ((1.1, 1.12, 1.11), (1.1, 1.11, 1.12), False),
        # Two errors above 1, and p = 0.07 before Holm's correction.
        ((1.01, 1.03, 1.02), (1.1, 1.11, 1.12), None),
        ((0.9, 0.92, math.nan), (1.1, 1.11, 1.12), None),
    ],
)
def test_the_drift_is_judged_by_the_key_in_every_layer_with_its_error(key, affinity, verdict):
    ends = {"key.0": key, "key.1": (0.9, 0.9, 0.9), "affinity.0": affinity}
    rows = [
        {"seed": seed, "step": step, "weight": weight, "error_over_initial": ratio if step else 1.0}
        for step, (weight, ratios) in itertools.product((0, 9), ends.items())
        for seed, ratio in enumerate(ratios)
    ]
    assert study.judge_drift(rows) is verdict
    assert study.judge_drift([]) is None


HEADERS = {
    "ids-sst": "\tid\tsentence\tsentiment\n",
    "quora": "\tid\tsentence1\tsentence2\tis_duplicate\n",
    "sts": "\tid\tsentence1\tsentence2\tsimilarity\n",
}
ROWS = {
    "ids-sst": '0\ta\t good film \t4\n1\tb\t"""quoted"" film"\t0\n',
    "quora": "0\ta\twhat is it?\twhat's it?\t1.0\n1\tb\twho?\twhere?\t0.0\n",
    "sts": "0\ta\ta cat\ta dog\t0.8\n",
}


def folder_of(path):
    for stem, header in HEADERS.items():
        for split in ("train", "dev"):
            (path / f"{stem}-{split}.csv").write_text(header + ROWS[stem], encoding="utf-8")
    return path


def test_sentences_and_labels_are_read(tmp_path):
    (folder_of(tmp_path) / "quora-train-extra.csv.gz").write_bytes(
        gzip.compress((HEADERS["quora"] + "7\tz\tone\ttwo\t1.0\n").encode())
    )
    (tmp_path / "ids-sst-test-student.csv").write_text("no labels here\n")
    rows, files = read_minbert(tmp_path)
    assert list(files) == ["sst", "para", "sts"]
    assert rows["sst", "train"] == [(("good film",), 4.0), (('"quoted" film',), 0.0)]
    assert rows["para", "train"][0] == (("one", "two"), 1.0)  # files in the order of their names
    assert [len(rows["para", split]) for split in ("train", "valid")] == [3, 2]
    assert rows["sts", "valid"] == [(("a cat", "a dog"), 0.8)]
    assert [file["rows"] for file in files["para"]] == [1, 2, 2]


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        ("ids-sst-train", "0\ta\tfilm\t4\n1\tb\tfilm\t7\n", ":3: sentiment is '7'"),
        ("ids-sst-train", '0\ta\t"two\nlines"\t1\n1\tb\tfilm\tgood\n', ":4: sentiment is 'good'"),
        ("ids-sst-dev", "0\ta\tfilm\t1.5\n", ":2: .*whole number in 0..4"),
        ("quora-train", "0\ta\tone\ttwo\t\n", ":2: is_duplicate is ''"),
        ("quora-dev", "0\ta\tone\t1.0\n", ":2: 4 columns, expected 5"),
        ("sts-train", "0\ta\t \ttwo\t1.0\n", ":2: sentence1 is empty"),
        ("sts-train", "0\ta\tone\ttwo\tnan\n", ":2: similarity is 'nan'"),
        ("sts-dev", "\tid\tsentence1\tsentence2\n0\ta\tone\ttwo\n", ":1: the header lacks sim"),
        ("sts-dev", "", ".*a header and no rows"),
        ("sts-dev", '0\ta\t"one\ttwo\t1.0\n', ":2: not a row of quoted fields"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, file, rows, message):
    header = "" if "sentence1" in rows else HEADERS[file.rpartition("-")[0]]
    (folder_of(tmp_path) / f"{file}.csv").write_text(header + rows)
    with pytest.raises(DataError, match=f"{file}.csv{message}"):
        read_minbert(tmp_path)


def test_missing_and_doubled_files_are_named(tmp_path):
    (folder_of(tmp_path) / "sts-dev.csv").unlink()
    (tmp_path / "quora-train.csv").unlink()
    with pytest.raises(DataError, match=r"(?s)para, train.*sts, valid.*it holds"):
        read_minbert(tmp_path)
    (folder_of(tmp_path) / "sts-dev.csv.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(DataError, match=r"both plain and gzip"):
        read_minbert(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        read_minbert(tmp_path / "elsewhere")


def test_pairs_are_joined_by_sep_and_cut_rows_are_counted(tmp_path):
    read, _ = read_minbert(folder_of(tmp_path))
    texts = [text for rows in read.values() for row, _ in rows for text in row]
    tokenizer = train_word_pieces(texts, vocab_size=80, max_length=8)
    again = train_word_pieces(texts, vocab_size=80, max_length=8)
    assert tokenizer.get_vocab() == again.get_vocab()
    pair = tokenizer("a cat", "a dog")
    assert tokenizer.decode(pair["input_ids"]) == "[CLS] a cat [SEP] a dog [SEP]"
    first = pair["input_ids"].index(tokenizer.sep_token_id)
    assert pair["token_type_ids"] == [0] * (first + 1) + [1] * (len(pair["input_ids"]) - first - 1)
    rows, cut = encode_rows(read["para", "train"], tokenizer, max_length=6)
    sizes = [len(tokenizer(*row)["input_ids"]) for row, _ in read["para", "train"]]
    assert cut == sum(size > 6 for size in sizes) > 0
    assert [len(row["input_ids"]) for row in rows] == [min(size, 6) for size in sizes]
    assert all(row["input_ids"][-1] == tokenizer.sep_token_id for row in rows)
