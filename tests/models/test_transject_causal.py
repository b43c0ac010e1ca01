"""TransJect as a language model: no later token has a part in an earlier one, and a cache changes
nothing."""

import pytest
import torch
from tests.support.refusal import bad_config
from tests.support.tiny import options
from tests.support.transject import IDS, SETTINGS, SIZES, awake
from torch.testing import assert_close

from wellposed.models import TransJectConfig, TransJectForCausalLM


@pytest.mark.parametrize("settings", SETTINGS)
def test_no_gradient_comes_from_later_tokens(settings):
    torch.manual_seed(3)
    model = awake(TransJectForCausalLM(TransJectConfig(**SIZES, **settings)))
    start = torch.randn(1, 6, 16, requires_grad=True)
    logits = model(inputs_embeds=start).logits[0]
    earlier = 0.0
    for position in range(6):
        (gradient,) = torch.autograd.grad(logits[position].square().sum(), start, retain_graph=True)
        sizes = gradient[0].abs().amax(-1)
        assert float(sizes[position + 1 :].sum()) == 0.0
        assert float(sizes[position]) > 0.0
        earlier += float(sizes[:position].sum())
    mixes = settings.get("spectrum") != "random" or settings.get("num_experts", 1) > 1
    assert (earlier > 0.0) == mixes


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_generation_with_a_cache_is_that_without(settings, how):
    torch.manual_seed(4)
    config = TransJectConfig(**SIZES, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = awake(TransJectForCausalLM(config))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    how = {"max_new_tokens": 5, "do_sample": False, **how}
    cached, whole = (
        model.generate(IDS, attention_mask=mask, use_cache=use_cache, **how)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, whole)
    alone = model.generate(IDS[:1, 2:], **how)
    assert torch.equal(cached[:1, 5 : alone.shape[1] + 2], alone[:, 3:])


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_cache_filled_in_portions_gives_the_logits_of_one_call(settings):
    torch.manual_seed(5)
    model = awake(TransJectForCausalLM(TransJectConfig(**SIZES, **settings)))
    ids = torch.randint(0, 13, (2, 9))
    whole = model(input_ids=ids).logits
    cache, parts = None, []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        output = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_a_returned_cache_goes_on_where_the_last_call_of_generate_ended():
    torch.manual_seed(5)
    model = awake(TransJectForCausalLM(TransJectConfig(**SIZES, num_experts=2)))
    how = options("do_sample=False max_new_tokens=3 min_new_tokens=3 return_dict_in_generate=True")
    first = model.generate(IDS[:1], **how)
    prompt = torch.cat((first.sequences, torch.tensor([[7, 2]])), dim=1)
    again = model.generate(prompt, past_key_values=first.past_key_values, **how)
    assert_close(again.sequences, model.generate(prompt, use_cache=False, **how).sequences)


def test_a_piece_of_padding_is_no_error_in_training_with_a_cache():
    model = awake(TransJectForCausalLM(TransJectConfig(**SIZES, num_experts=2)))
    ids, mask = IDS.repeat(1, 2), torch.ones(2, 10, dtype=torch.long)
    mask[1, :5] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        model.train()
        first = model(input_ids=ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        assert first.auxiliary_loss is None
        second = model(
            input_ids=ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values
        )
    assert_close(second.logits, expected[:, 5:])


def test_a_token_of_zeros_meets_no_division_by_zero_at_the_smallest_eps():
    with bad_config(match="spectrum_eps: received 1e-60"):
        TransJectConfig(**SIZES, spectrum_eps=1e-60)
    model = awake(
        TransJectForCausalLM(TransJectConfig(**SIZES, spectrum_eps=2.0**-126, gating="normalized"))
    )
    assert bool(model(inputs_embeds=torch.zeros(1, 2, 16)).logits.isfinite().all())
