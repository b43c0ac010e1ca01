"""Padding, causality and empty rows, under every registered attention: a new one is in the table by
itself."""

import pytest
import torch
from tests.support.close import within
from tests.support.tiny import tiny

from wellposed.models import (
    WellposedForCausalLM,
    WellposedForSequenceClassification,
    WellposedModel,
)
from wellposed.nn import ATTENTIONS


def build(kind, **changes):
    return tiny(kind, **changes).double().eval()


def pad(row, before, after):
    ids = torch.tensor([[7] * before + row + [7] * after])
    mask = torch.tensor([[0] * before + [1] * len(row) + [0] * after])
    return ids, mask


@pytest.mark.parametrize("model_class", [WellposedForCausalLM, WellposedForSequenceClassification])
@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_the_amount_and_the_side_of_padding_change_nothing(model_class, position):
    model, row = build(model_class, position=position), [3, 1, 4, 1, 5]
    alone = model(input_ids=torch.tensor([row])).logits
    # 20 paddings make the batch longer than the 10 positions; the sequence itself is not.
    for before, after in [(0, 1), (1, 0), (0, 20), (20, 0), (3, 4)]:
        ids, mask = pad(row, before, after)
        logits = model(input_ids=ids, attention_mask=mask).logits
        if model_class is WellposedForCausalLM:
            logits = logits[:, before : before + len(row)]
        within(logits, alone, 1e-12)


def test_other_mask_dtypes_mean_the_same():
    model = build(WellposedForSequenceClassification)
    ids, mask = pad([3, 1, 4], 1, 2)
    expected = model(input_ids=ids, attention_mask=mask).logits
    for dtype in (torch.bool, torch.float32, torch.int32):
        assert torch.equal(model(input_ids=ids, attention_mask=mask.to(dtype)).logits, expected)


@pytest.mark.parametrize("pooling", ["mean", "first", "max"])
def test_a_row_of_padding_is_finite_and_leaves_other_rows_alone(pooling):
    model = build(WellposedForSequenceClassification, pooling=pooling, num_labels=3)
    ids, mask = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 1], [0, 0, 0]])
    output = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1]))
    output.loss.backward()
    assert torch.equal(output.logits[1], model.classifier.bias)
    within(output.logits[:1], model(input_ids=ids[:1]).logits, 1e-12)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_encoder_sees_every_token_and_is_causal_where_told():
    x = torch.randn(1, 4, 12, dtype=torch.float64, requires_grad=True)
    for is_causal in (None, True):
        model = build(WellposedModel, is_causal=is_causal)
        states = model(inputs_embeds=x).last_hidden_state
        (gradient,) = torch.autograd.grad(states[0, 0].square().sum(), x)
        assert (gradient[0, 1:].abs().max() == 0) == bool(is_causal)


def test_given_positions_are_used():
    model, ids = build(WellposedForCausalLM), torch.tensor([[1, 2, 3]])
    counted = model(input_ids=ids).logits
    assert torch.equal(model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2]])).logits, counted)
    assert (
        model(input_ids=ids, position_ids=torch.tensor([[4, 5, 6]])).logits - counted
    ).abs().max() > 1e-3


ROW = [3, 1, 4, 1, 5]
NAMES = [name for name in ATTENTIONS.names() if not name.endswith("for-this-test")]


def attending(name):
    return tiny(WellposedForCausalLM, attention=name, pad_token_id=0).double().eval()


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_any_side_changes_nothing(name):
    model = attending(name)
    alone = model(input_ids=torch.tensor([ROW])).logits[0]
    for before, after in [(2, 0), (0, 3), (2, 1)]:
        ids = torch.tensor([[0] * before + ROW + [0] * after, [7] * (before + 5 + after)])
        mask = torch.ones_like(ids)
        mask[0, :before] = 0
        mask[0, before + 5 :] = 0
        logits = model(input_ids=ids, attention_mask=mask).logits[0, before : before + 5]
        within(logits, alone, 1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_comes_from_a_later_token(name):
    x = torch.randn(1, 5, 12, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        attending(name)(inputs_embeds=x).logits[0, 2].square().sum(), x
    )
    assert gradient[0, :3].abs().amax(-1).min() > 0
    assert gradient[0, 3:].abs().max() == 0


@pytest.mark.parametrize("name", NAMES)
def test_generation_with_a_cache_is_generation_without(name):
    model = attending(name)
    ids, mask = torch.tensor([ROW, [0, 0, 0, 9, 2]]), torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(
        model.generate(ids, **options), model.generate(ids, use_cache=False, **options)
    )
