"""A verdict needs something learned: no model that answers like a constant gets one, on any task."""

import math
from collections import Counter

import pytest
from tests.support.edited import edited

from wellposed_lab.report.aggregate import aggregate
from wellposed_lab.report.page import build_report
from wellposed_lab.tasks.task import build_task

pytestmark = pytest.mark.slow  # the whole table

# task, reference on valid, that of train on test, values of plain and of key, what begins the answer
CASES = {
    "untrained": (
        "listops",
        0.5,
        0.5,
        [0.50, 0.51, 0.49],
        [0.5, 0.5, 0.5],
        "undecided: plain",
    ),
    "constant, 99:1": ("listops", 0.99, 0.99, [0.99] * 3, [0.99] * 3, "undecided: plain"),
    "shuffled labels": ("listops", 0.5, 0.5, [0.55, 0.47, 0.6], [0.6, 0.6, 0.7], "undecided"),
    "chosen on valid": ("listops", 0.5, 0.58, [0.63] * 3, [0.65, 0.64, 0.66], "undecided"),
    "shifted labels": ("listops", 0.6, 0.4, [0.6, 0.6, 0.6], [0.6, 0.6, 0.61], "undecided"),
    "only key learned": ("listops", 0.5, 0.5, [0.5] * 3, [0.9, 0.91, 0.9], "undecided: plain"),
    "only plain": ("listops", 0.5, 0.5, [0.9, 0.91, 0.9], [0.5, 0.5, 0.5], "not worth it"),
    "better": ("listops", 0.5, 0.5, [0.7, 0.71, 0.7], [0.8, 0.81, 0.81], "worth it: better"),
    "unigram": ("char_lm", 2.87, 2.9, [2.86, 2.85, 2.86], [2.85, 2.85, 2.85], "undecided"),
    "text": ("char_lm", 2.87, 2.9, [2.0, 2.01, 2.0], [1.5, 1.52, 1.5], "worth it: better"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_verdict_needs_a_model_that_learned(case, compare, tmp_path):
    task, reference, of_train, plain, key, expected = CASES[case]
    folder = compare({"plain": plain, "key": key}, task=task)
    for path in folder.rglob("result.json"):
        with edited(path) as record:
            (name,) = record["reference"]
            record["reference"] = {name: reference}
            record["train_reference"] = {f"{name},test": of_train}
    (compared,) = aggregate([folder]).tasks
    answer = compared.worth(0.02)[1].removeprefix("key: ")
    assert answer.startswith(expected)
    learned = [result.learned for result in compared.variants]
    assert ("plain did not learn" in answer) is (learned[0] is False)
    test = compared.variants[1].comparison
    assert (not any(learned)) is test.verdict.startswith("undecided: neither plain nor key")
    if "cannot" in expected and not learned[1]:
        assert not test.significant
    page = build_report([folder], tmp_path / "page.html").read_text()
    assert answer.partition(":")[0] in page


def constant_score(task, split):
    """Return the headline score of the constant answer of train, counted row by row."""
    if task.kind == "causal_lm":
        train, rows = (task._examples[name].tokens.tolist() for name in ("train", split))
        rows = rows[1:]
    else:
        train, rows = (
            [n for row in task.dataset(name) for n in row["labels"]] for name in ("train", split)
        )
    counts = Counter(train)
    if task.kind == "sequence_classification":
        return rows.count(counts.most_common(1)[0][0]) / len(rows)
    total = len(train) + task.model_kwargs()["vocab_size"]
    nats = sum(-math.log((counts[token] + 1) / total) for token in rows) / len(rows)
    bits = nats / math.log(2)  # the tokens are bytes
    return {"bits_per_byte": bits, "perplexity": math.exp(nats)}.get(task.headline, nats)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("text_classification", {"data": "films.tsv"}),
        ("char_lm", {"limit_chars": 4000, "seq_len": 64}),
        ("language_modeling", {"limit_chars": 4000, "seq_len": 64}),
        ("translation", {"data": "pairs.tsv", "src": "de", "tgt": "en", "vocab_size": 300}),
    ],
)
def test_the_constant_answer_of_train_is_scored_on_each_split(name, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{'ab'[k % 3 == 0]}\tfilm {k}" for k in range(60)]
    (tmp_path / "films.tsv").write_text("\n".join(["label\ttext", *rows]))
    pairs = [f"ein Satz {k}\ta sentence {k % 7}" for k in range(80)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["de\ten", *pairs]))
    task = build_task(name, options)
    for split in ("valid", "test"):
        score = task.train_reference(split)[task.headline]
        assert score == pytest.approx(constant_score(task, split), rel=1e-12)
