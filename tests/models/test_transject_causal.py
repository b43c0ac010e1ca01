"""TransJect as a language model: no later token has a part in an earlier one, and a cache changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wellposed.models import (
    TransJectConfig,
    TransJectForCausalLM,
)

from .transject import IDS, SETTINGS, SIZES, awake


@pytest.mark.parametrize("settings", SETTINGS)
def test_no_gradient_comes_from_later_tokens(settings: dict[str, Any]) -> None:
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
def test_generation_with_a_cache_is_that_without(settings: dict[str, Any], how: dict[str, Any]) -> None:
    torch.manual_seed(4)
    config = TransJectConfig(**SIZES, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = awake(TransJectForCausalLM(config))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"max_new_tokens": 5, "do_sample": False, **how}
    cached, whole = (
        model.generate(IDS, attention_mask=mask, use_cache=use_cache, **options) for use_cache in (True, False)
    )
    assert torch.equal(cached, whole)
    alone = model.generate(IDS[:1, 2:], **options)
    assert torch.equal(cached[:1, 5 : alone.shape[1] + 2], alone[:, 3:])


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_cache_filled_in_portions_gives_the_logits_of_one_call(settings: dict[str, Any]) -> None:
    torch.manual_seed(5)
    model = awake(TransJectForCausalLM(TransJectConfig(**SIZES, **settings)))
    ids = torch.randint(0, 13, (2, 9))
    whole = model(input_ids=ids).logits
    cache, parts = None, []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        output = model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True)
        cache, parts = output.past_key_values, [*parts, output.logits]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)
