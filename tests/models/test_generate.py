"""Generation with a cache equals generation without one and a greedy loop; left padding changes
nothing."""

import pytest
import torch
from tests.support.close import within
from tests.support.refusal import bad_shape
from tests.support.tiny import tiny
from transformers import DynamicCache

from wellposed.models import WellposedForCausalLM

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
NEW = 6


def build(**changes):
    model = tiny(WellposedForCausalLM, max_position_embeddings=16, pad_token_id=0, **changes)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def left_padded():
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model, prompt):
    """The definition: append the likeliest token, from the start every time."""
    tokens = list(prompt)
    for _ in range(NEW):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def generate(model, **kwargs):
    torch.manual_seed(7)
    tokens = model.generate(**left_padded(), max_new_tokens=NEW, **kwargs)
    return tokens[:, -NEW:].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre", "position": "sinusoidal", "qk_norm": True},
        {"norm": "none", "residual": "rezero"},
    ],
)
def test_greedy_generation_equals_the_loop_row_by_row(changes):
    model = build(**changes)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) > 1
    assert generate(model, do_sample=False) == expected
    assert generate(model, do_sample=False, use_cache=False) == expected


@pytest.mark.parametrize(
    "how", [{"do_sample": True, "top_k": 5}, {"num_beams": 3, "do_sample": False}]
)
def test_sampling_and_beams_do_not_depend_on_the_cache(how):
    model = build()
    cached = generate(model, **how)
    assert cached == generate(model, use_cache=False, **how)


def test_only_the_new_tokens_pass_the_model_when_cached():
    model, widths = build(), []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args: widths.append(args[0].shape[1])
    )
    generate(model, do_sample=False)
    assert widths == [5] + [1] * (NEW - 1)


@pytest.mark.parametrize("portions", [[5], [1] * 5, [2, 3]])
def test_a_cache_in_any_portions_gives_the_logits_of_one_call(portions):
    model, inputs = build(), left_padded()
    full = model(**inputs).logits
    assert model(**inputs).past_key_values is None
    cache, parts, start = DynamicCache(config=model.config), [], 0
    for size in portions:
        end = start + size
        output = model(
            input_ids=inputs["input_ids"][:, start:end],
            attention_mask=inputs["attention_mask"][:, :end],
            past_key_values=cache,
        )
        assert output.past_key_values is cache
        parts.append(output.logits)
        start = end
    within(torch.cat(parts, dim=1), full, 1e-11)
    assert model(**inputs, use_cache=True).past_key_values.get_seq_length() == 5


def test_a_text_longer_than_the_positions_is_refused():
    with bad_shape(match="a sequence of 17 tokens; expected at most 16"):
        build().generate(torch.tensor([PROMPTS[0]]), max_new_tokens=20, do_sample=False)


def test_generation_starts_from_given_vectors():
    model = build()
    vectors = model.get_input_embeddings()(torch.tensor([PROMPTS[0]]))
    mask = torch.ones(1, 5, dtype=torch.long)
    tokens = model.generate(
        inputs_embeds=vectors, attention_mask=mask, max_new_tokens=NEW, do_sample=False
    )
    assert tokens[0].tolist() == greedy(model, PROMPTS[0])
