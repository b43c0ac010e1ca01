"""Certificates of TransJect classifiers, attacked; and certified accuracy from X^0."""

import pytest
import torch
from tests.support.tiny import options
from tests.support.transject import IDS, MASK
from torch.testing import assert_close

from wellposed.certification import certify
from wellposed.models import TransJectConfig, TransJectForSequenceClassification, input_vectors
from wellposed.training.certified.accuracy import certified_accuracy


def classifier(**changes):
    torch.manual_seed(0)
    sizes = options("vocab_size=12 hidden_size=8 num_hidden_layers=2 num_labels=3")
    how = {**sizes, "spectrum_norm": "trace", "residual": "sigmoid", **changes}
    model = TransJectForSequenceClassification(TransJectConfig(**how))
    return model.double().eval()


def test_input_vectors_give_what_the_ids_give():
    model = classifier()
    vectors = input_vectors(model, IDS, MASK)
    by_vectors = model(inputs_embeds=vectors, attention_mask=MASK).logits
    assert_close(by_vectors, model(input_ids=IDS, attention_mask=MASK).logits)


@pytest.mark.parametrize(
    "changes", ["", "spectrum_norm=max", "spectrum=random", "num_experts=2 gating=normalized"]
)
@pytest.mark.parametrize("norm", ["tok", 2])
def test_no_ascent_beats_the_certificate(changes, norm):
    model = classifier(**options(changes))
    total = certify(model, seq_len=5, norm=norm).total
    start = input_vectors(model, IDS[:1]).detach()
    step = torch.full_like(start, 1e-3).requires_grad_()
    optimizer = torch.optim.Adam([step], lr=1e-2)
    worst = 0.0
    for _ in range(40):
        change = model(inputs_embeds=start + step).logits - model(inputs_embeds=start).logits
        size = step.norm(dim=-1).max() if norm == "tok" else step.norm()
        ratio = change.norm() / size
        worst = max(worst, float(ratio.detach()))
        optimizer.zero_grad()
        (-ratio).backward()
        optimizer.step()
    assert 0.01 * total < worst <= total


def test_pooled_gates_are_named():
    certificate = certify(classifier(num_experts=2), seq_len=5)
    assert certificate.label == "uncertified"
    assert [layer.path for layer in certificate.uncertified] == ["model.stack"]


def test_certified_accuracy_is_below_the_attacked_one():
    model = classifier()
    certificate = certify(model, seq_len=5)
    labels = model(input_ids=IDS, attention_mask=MASK).logits.argmax(-1)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": labels}
    curve = certified_accuracy(model, [batch], certificate, radii=[0.0, 1e-4, 10.0], attack_steps=5)
    assert curve.certified[1] == 1.0
    assert all(sure <= seen for sure, seen in zip(curve.certified, curve.attacked, strict=True))
    assert curve.certified[2] < 1.0
