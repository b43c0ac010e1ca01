"""``examples.json``: what a finished model answers, and what the report makes of it."""

import json

import pytest
from tests.support.html_page import Page
from tests.support.words import TINY, succeed
from tests.support.words import words as typed

from wellposed.errors import DataError
from wellposed_lab.report.page import build_report
from wellposed_lab.training.folder.model_card import EXAMPLES
from wellposed_lab.training.folder.result import read_result
from wellposed_lab.training.loop.build import load_run_model

SHORT = typed("--steps 3 --eval-every 3 --batch-size 8 --quiet", TINY)


def test_a_classifier_keeps_its_answers_by_label_and_its_first_texts(tmp_path):
    run = tmp_path / "run"
    succeed("train text_classification --data builtin", [*SHORT, "--out", str(run)])
    found, result = json.loads((run / EXAMPLES).read_bytes()), read_result(run)
    right = sum(line[place] for place, line in enumerate(found["counts"]))
    total = sum(map(sum, found["counts"]))
    # The task's own metric, of all of test, which is shorter than what is counted.
    expected = result.result["results"]["text_classification"]["accuracy,test"]
    assert right / total == pytest.approx(expected, rel=1e-12)
    model, tokenizer = load_run_model(run)
    for each in found["texts"][:5]:
        inputs = tokenizer(each["text"], return_tensors="pt", add_special_tokens=False)
        asked = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        assert int(asked.logits.argmax()) == each["answer"]
    page = Page(build_report([run], tmp_path / "page.html").read_text("utf-8"))
    names = found["labels"]
    rows = {row["(text)"]: row for row in page.csv("1-text_classification-texts")}
    assert len(rows) == 12  # half of them right, half wrong
    for each in found["texts"]:
        row = rows.get(each["text"])
        assert row is None or [row["(label)"], row[result.result["variant"]]] == [
            names[each["label"]], names[each["answer"]],
        ]  # fmt: skip
    counted = page.csv("1-text_classification-answers-1")
    assert [[int(row[name]) for name in names] for row in counted] == found["counts"]
    (run / "manifest.json").unlink()
    for damage in (
        '{"labels": ["a"], "counts": [[1]], "texts": [{"text": "b", "label": 7}]}',
        '{"labels": ["a", "b"], "counts": [[1]]}',
    ):
        (run / EXAMPLES).write_text(damage)
        with pytest.raises(DataError, match=r"examples.json: .*the file is damaged, remove it"):
            build_report([run], tmp_path / "page.html")


def test_a_language_model_goes_on_from_texts_alike_every_time(tmp_path):
    files = []
    for name in ("one", "two"):
        words = [*SHORT, "--limit-chars", "20000", "--out", str(tmp_path / name)]
        succeed("train char_lm", words)
        files.append((tmp_path / name / EXAMPLES).read_bytes())
    assert files[0] == files[1]
    samples = json.loads(files[0])["samples"]
    assert len(samples) == 3
    assert all(len(each["prompt"]) == 16 and each["text"] for each in samples)
    page = Page(build_report([tmp_path / "one"], tmp_path / "page.html").read_text("utf-8"))
    rows = page.csv("1-char_lm-texts")
    # a csv marks what a spreadsheet would take for a formula
    assert rows[0]["(text)"].removeprefix("'") == samples[0]["prompt"]
