"""Mixed precision, recomputation, compilation, losses of a classifier."""

import pytest
import torch
from tests.support.tiny import IDS, MASK, options, tiny
from torch.nn import functional as F
from torch.testing import assert_close

from wellposed.models import (
    WellposedForCausalLM,
    WellposedForSeq2SeqLM,
    WellposedForSequenceClassification,
)


def language_model(**changes):
    return tiny(WellposedForCausalLM, hidden_size=24, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "roundings"),
    [
        (WellposedForCausalLM, "norm=post", 10),
        (WellposedForCausalLM, "norm=pre qk_norm=True residual=rezero", 10),
        (WellposedForCausalLM, "norm=none position=sinusoidal", 10),
        (WellposedForSeq2SeqLM, "norm=pre qk_norm=True", 15),
    ],
)
def test_bf16_autocast_is_close_in_value_and_gradient(kind, changes, roundings):
    model = tiny(kind, hidden_size=24, bos_token_id=1, **options(changes))
    exact = model(input_ids=IDS, attention_mask=MASK, labels=IDS)
    exact.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(input_ids=IDS, attention_mask=MASK, labels=IDS)
    output.loss.backward()
    # Unit roundoff 2^-8; roundings in a row: two per product of the two layers (three branches in a
    # decoder) and the head.
    tolerance = roundings * 2**-8
    assert (output.logits - exact.logits).norm() <= tolerance * exact.logits.norm()
    assert output.loss.dtype == torch.float32
    total = torch.stack([g.norm() for g in gradients.values()]).norm()
    error = torch.stack(
        [(p.grad - gradients[name]).norm() for name, p in model.named_parameters()]
    ).norm()
    assert error <= 2 * tolerance * total


def test_a_bf16_model_runs_and_is_close():
    model = language_model(norm="pre", qk_norm=True, residual="rezero").eval()
    exact = model(input_ids=IDS, attention_mask=MASK).logits
    low = model.to(torch.bfloat16)(input_ids=IDS, attention_mask=MASK).logits
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).norm() <= 10 * 2**-8 * exact.norm()


def test_every_weight_gets_a_gradient():
    model = language_model(norm="pre", qk_norm=True, tie_word_embeddings=False)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(
        p.grad is not None and p.grad.abs().max() > 0
        for _, p in model.named_parameters()
        if p.dim() > 1
    )


def classifier(num_labels):
    return tiny(WellposedForSequenceClassification, num_labels=num_labels)


def test_several_labels_are_as_many_questions():
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    output = classifier(3)(input_ids=IDS, attention_mask=MASK, labels=several)
    assert_close(output.loss, F.binary_cross_entropy_with_logits(output.logits, several))


@pytest.mark.parametrize("labels", [torch.tensor([1, 3]), torch.tensor([1.5, -0.5])])
def test_one_label_is_a_regression(labels):
    model = classifier(1)
    output = model(input_ids=IDS, attention_mask=MASK, labels=labels)
    assert_close(output.loss, (output.logits[:, 0] - labels).square().mean())
    output.loss.backward()
    assert model.classifier.weight.grad.dtype == torch.float32


@pytest.mark.slow
def test_a_compiled_language_model_has_no_graph_break():
    model = language_model(norm="pre").eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mask in (None, MASK):
        assert_close(
            compiled(input_ids=IDS, attention_mask=mask).logits,
            model(input_ids=IDS, attention_mask=mask).logits,
            rtol=1e-5,
            atol=1e-5,
        )
