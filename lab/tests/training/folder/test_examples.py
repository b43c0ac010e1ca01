"""``examples.json``: what a finished model answers."""

import json

import pytest
from tests.support.words import TINY, succeed
from tests.support.words import words as typed

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
