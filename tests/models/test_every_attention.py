"""Every registered attention: padding, causality, cache, saving; a new attention is in the table by
itself."""

import pytest
import torch
from tests.support.close import within
from tests.support.tiny import tiny

from wellposed.models import WellposedForCausalLM
from wellposed.nn import ATTENTIONS

ROW = [3, 1, 4, 1, 5]
NAMES = [name for name in ATTENTIONS.names() if not name.endswith("for-this-test")]


def build(name):
    return tiny(WellposedForCausalLM, attention=name, pad_token_id=0).double().eval()


@pytest.mark.parametrize("name", NAMES)
def test_padding_on_any_side_changes_nothing(name):
    model = build(name)
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
    (gradient,) = torch.autograd.grad(build(name)(inputs_embeds=x).logits[0, 2].square().sum(), x)
    assert gradient[0, :3].abs().amax(-1).min() > 0
    assert gradient[0, 3:].abs().max() == 0


@pytest.mark.parametrize("name", NAMES)
def test_generation_with_a_cache_is_generation_without(name):
    model = build(name)
    ids, mask = torch.tensor([ROW, [0, 0, 0, 9, 2]]), torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(
        model.generate(ids, **options), model.generate(ids, use_cache=False, **options)
    )
