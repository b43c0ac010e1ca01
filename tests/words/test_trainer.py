"""Certified accuracy of models trained with the Trainer of transformers, as the documentation shows
it, without our training code."""

import re
from pathlib import Path

import pytest
from tests.support.words import python

PAGES = Path(__file__).parents[2] / "docs" / "howto"
CHECKS = """
import itertools
import sys

import torch

predicted = torch.tensor(trainer.predict(rows).predictions).argmax(-1)
assert accuracy.clean == float((predicted == torch.tensor(labels)).double().mean()) == 1
assert all(0 < sure <= seen for sure, seen in zip(accuracy.certified[:1], accuracy.attacked))
table = certificate.model.eval()
ids = certificate.encode(texts[:4])
held = certificate.hold([{"input_ids": i[None], "attention_mask": i[None] * 0 + 1} for i in ids], 2)
assert any(text.replaceable for text in held)
for text, one in zip(ids, held):
    slots = (text >= 0).nonzero()[:, 0].tolist()  # windows have a mark before each word
    for places in itertools.combinations(slots, one.replaceable):
        for new in itertools.product(range(len(words)), repeat=len(places)):
            other = text.clone()
            other[list(places)] = torch.tensor(new)
            assert int(table(input_ids=other[None]).logits.argmax()) == one.predicted
lab = {"charts", "cli", "compare", "recipes", "report", "tasks", "training"}
print("imported:", {name.split(".")[1] for name in sys.modules if name.startswith("wellposed.")} & lab)
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", ["words", "windows"])
def test_a_model_that_the_trainer_trained_is_certified_without_our_training(page, tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.M | re.S)
    ran = python(["-c", code + CHECKS], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "imported: set()" in ran.stdout
