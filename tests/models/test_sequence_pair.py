"""The two-tower classifier: its formula by hand, padding, saving, refusals, roles, measurement and
certificates."""

import pytest
import torch
from tests.support.close import within
from tests.support.tiny import tiny

import wellposed as wp
from wellposed.models import (
    WellposedForSequencePairClassification,
)

FIRST, SECOND = (
    torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]]),
    torch.tensor([[5, 8, 9], [7, 9, 0]]),
)
SIDES = ("input_ids", "attention_mask", "input_ids_pair", "attention_mask_pair")


def batch(first=FIRST, second=SECOND):
    return dict(zip(SIDES, (first, (first != 0).long(), second, (second != 0).long()), strict=True))


def build(**changes):
    return tiny(WellposedForSequencePairClassification, **changes).double().eval()


def run(model):
    return model(**batch()).logits


@pytest.mark.parametrize("pooling", ["mean", "max", "first"])
def test_the_logits_are_those_of_the_formula(pooling):
    model = build(pooling=pooling)
    pools = {"mean": lambda x: x.mean(0), "max": lambda x: x.max(0).values, "first": lambda x: x[0]}
    weights = dict(model.named_parameters())
    for row in range(2):
        a, b = (
            pools[pooling](
                model.model(input_ids=ids[row][ids[row] != 0][None]).last_hidden_state[0]
            )
            for ids in (FIRST, SECOND)
        )
        features = torch.cat([a, b, a * b, a - b])
        hidden = (
            weights["classifier.hidden.weight"] @ features + weights["classifier.hidden.bias"]
        ).clamp(min=0)
        expected = weights["classifier.output.weight"] @ hidden + weights["classifier.output.bias"]
        within(run(model)[row], expected, 1e-12)


def test_verbs_work_or_say_why_not():
    model = build()
    roles = wp.find_roles(model)
    assert len(roles.attention) == 2
    assert wp.measure(model, batch()).rows
    penalty = wp.OrthogonalityPenalty(model, affinity=1e-2, attention=1e-2)
    logits = run(model)
    assert penalty().item() > 0
    assert logits.isfinite().all()
    penalty.remove()
    certificate = wp.certify(model, seq_len=5)
    assert certificate.label == "uncertified"
    assert [layer.path for layer in certificate.uncertified][-1].endswith("attention")
