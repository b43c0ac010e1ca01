"""Whole models against a slow float64 Transformer written from the papers; padding, generation, training."""

import itertools

import pytest
import torch
from tests.support.close import within
from tests.support.slow_transformer import SlowTransformer, exact, padded
from tests.support.tiny import IDS, MASK, tiny
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import DynamicCache

from wellposed.errors import ShapeError
from wellposed.models import (
    WellposedForCausalLM,
    WellposedForSequenceClassification,
    WellposedModel,
)
from wellposed.nn import ATTENTIONS


def build(model_class, **changes):
    sizes = {"max_position_embeddings": 12, "intermediate_size": 20}
    return exact(tiny(model_class, **sizes, **changes))


ROWS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5]]


STRUCTURES = list(itertools.product(["post", "pre", "none"], ["plain", "rezero"], [False, True]))
STRUCTURES += [("dyt", "plain", True), ("derf", "plain", True)]


@pytest.mark.parametrize(("norm", "residual", "qk_norm"), STRUCTURES)
def test_language_model_logits(norm, residual, qk_norm):
    parts = {"norm": norm, "residual": residual, "qk_norm": qk_norm}
    model = build(WellposedForCausalLM, activation="relu", **parts)
    slow = SlowTransformer(model)
    for side in ("left", "right"):
        ids, mask = padded(ROWS, side, extra=1)
        logits = model(input_ids=ids, attention_mask=mask).logits
        for row, row_logits, row_mask in zip(ROWS, logits, mask, strict=True):
            expected = slow.hidden(row, is_causal=True) @ slow.weights["embeddings.token.weight"].T
            assert_close(row_logits[row_mask.bool()], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("pooling", "position"), [("mean", "sinusoidal"), ("first", "learned"), ("max", "learned")]
)
def test_classifier_logits(pooling, position):
    parts = {"pooling": pooling, "position": position, "num_labels": 5}
    model = build(WellposedForSequenceClassification, **parts)
    slow = SlowTransformer(model)
    pool = {
        "mean": lambda h: sum(h) / len(h),
        "first": lambda h: h[0],
        "max": lambda h: torch.stack(list(h)).amax(0),
    }
    for side in ("left", "right"):
        ids, mask = padded(ROWS, side, extra=1)
        logits = model(input_ids=ids, attention_mask=mask).logits
        for row, row_logits in zip(ROWS, logits, strict=True):
            pooled = pool[pooling](slow.hidden(row, is_causal=False))
            assert_close(row_logits, slow.linear("classifier", pooled), rtol=1e-10, atol=1e-10)


def build_padded(kind, **changes):
    return tiny(kind, **changes).double().eval()


def pad(row, before, after):
    ids = torch.tensor([[7] * before + row + [7] * after])
    return ids, torch.tensor([[0] * before + [1] * len(row) + [0] * after])


ROW = [3, 1, 4, 1, 5]
NAMES = [name for name in ATTENTIONS.names() if not name.endswith("for-this-test")]
NORM_2 = {"attention": "l2_contractive", "lipschitz_norm": "2"}  # its bound depends on the mask
CASES = [(WellposedForCausalLM, {"attention": name}) for name in NAMES]
CASES += [
    (kind, changes)
    for kind in (WellposedForCausalLM, WellposedForSequenceClassification)
    for changes in ({"position": "learned"}, {"position": "sinusoidal"}, NORM_2)
]


@pytest.mark.parametrize(("model_class", "changes"), CASES)
def test_the_amount_and_the_side_of_padding_change_nothing(model_class, changes):
    model = build_padded(model_class, **changes)
    alone = model(input_ids=torch.tensor([ROW])).logits
    # 20 paddings make the batch longer than the 10 positions; the sequence itself is not.
    for before, after in [(0, 1), (1, 0), (0, 20), (20, 0), (3, 4)]:
        ids, mask = pad(ROW, before, after)
        logits = model(input_ids=ids, attention_mask=mask).logits
        if model_class is WellposedForCausalLM:
            logits = logits[:, before : before + 5]
        within(logits, alone, 1e-11)


def test_other_mask_dtypes_mean_the_same():
    model = build_padded(WellposedForSequenceClassification)
    ids, mask = pad([3, 1, 4], 1, 2)
    expected = model(input_ids=ids, attention_mask=mask).logits
    for dtype in (torch.bool, torch.float32, torch.int32):
        assert torch.equal(model(input_ids=ids, attention_mask=mask.to(dtype)).logits, expected)


@pytest.mark.parametrize("pooling", ["mean", "first", "max"])
def test_a_row_of_padding_is_finite_and_leaves_other_rows_alone(pooling):
    model = build_padded(WellposedForSequenceClassification, pooling=pooling, num_labels=3)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    output = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 1]))
    output.loss.backward()
    assert torch.equal(output.logits[1], model.classifier.bias)
    within(output.logits[:1], model(input_ids=ids[:1]).logits, 1e-12)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_encoder_sees_every_token_and_is_causal_where_told():
    x = torch.randn(1, 4, 12, dtype=torch.float64, requires_grad=True)
    for is_causal in (None, True):
        model = build_padded(WellposedModel, is_causal=is_causal)
        states = model(inputs_embeds=x).last_hidden_state
        (gradient,) = torch.autograd.grad(states[0, 0].square().sum(), x)
        assert (gradient[0, 1:].abs().max() == 0) == bool(is_causal)


def test_given_positions_are_used():
    model = build_padded(WellposedForCausalLM)
    ids = torch.tensor([[1, 2, 3]])
    counted = model(input_ids=ids).logits
    assert torch.equal(model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2]])).logits, counted)
    moved = model(input_ids=ids, position_ids=torch.tensor([[4, 5, 6]])).logits
    assert (moved - counted).abs().max() > 1e-3


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
NEW = 6


def build_writing(**changes):
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
    return model.generate(**left_padded(), max_new_tokens=NEW, **kwargs)[:, -NEW:].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre", "position": "sinusoidal", "qk_norm": True},
        {"norm": "none", "residual": "rezero"},
    ],
)
def test_greedy_generation_equals_the_loop_row_by_row(changes):
    model = build_writing(**changes)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) > 1
    assert generate(model, do_sample=False) == expected
    assert generate(model, do_sample=False, use_cache=False) == expected


def test_only_the_new_tokens_pass_the_model_when_cached():
    model = build_writing()
    widths = []
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    generate(model, do_sample=False)
    assert widths == [5] + [1] * (NEW - 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("portions", [[5], [1] * 5, [2, 3]])
def test_a_cache_in_any_portions_gives_the_logits_of_one_call(portions, name):
    model = build_writing(attention=name)
    inputs = left_padded()
    full = model(**inputs).logits
    assert model(**inputs).past_key_values is None
    cache = DynamicCache(config=model.config)
    parts = []
    start = 0
    for size in portions:
        end = start + size
        arguments = inputs["input_ids"][:, start:end], inputs["attention_mask"][:, :end]
        output = model(*arguments, past_key_values=cache)
        assert output.past_key_values is cache
        parts.append(output.logits)
        start = end
    within(torch.cat(parts, dim=1), full, 1e-11)
    assert model(**inputs, use_cache=True).past_key_values.get_seq_length() == 5


def test_a_text_longer_than_the_positions_is_refused():
    with pytest.raises(ShapeError, match="a sequence of 17 tokens; expected at most 16"):
        build_writing().generate(torch.tensor([PROMPTS[0]]), max_new_tokens=20, do_sample=False)


def test_generation_starts_from_given_vectors():
    model = build_writing()
    vectors = model.get_input_embeddings()(torch.tensor([PROMPTS[0]]))
    mask = torch.ones(1, 5, dtype=torch.long)
    arguments = {"inputs_embeds": vectors, "attention_mask": mask}
    tokens = model.generate(**arguments, max_new_tokens=NEW, do_sample=False)
    assert tokens[0].tolist() == greedy(model, PROMPTS[0])


def language_model(**changes):
    return tiny(WellposedForCausalLM, hidden_size=24, **changes)


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
        fused, exact = (net(input_ids=IDS, attention_mask=mask).logits for net in (compiled, model))
        assert_close(fused, exact, rtol=1e-5, atol=1e-5)
