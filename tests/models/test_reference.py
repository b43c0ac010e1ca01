"""The whole model against a slow float64 Transformer written from the papers, one sequence at a
time."""

import itertools

import pytest
import torch
from tests.support.slow_transformer import SlowTransformer, exact, padded
from tests.support.tiny import tiny
from torch.testing import assert_close

from wellposed.models import (
    WellposedForCausalLM,
    WellposedForSequenceClassification,
)


def build(model_class, **changes):
    sizes = {"max_position_embeddings": 12, "intermediate_size": 20}
    return exact(tiny(model_class, **sizes, **changes))


ROWS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5]]


STRUCTURES = list(itertools.product(["post", "pre", "none"], ["plain", "rezero"], [False, True]))
STRUCTURES += [("dyt", "plain", True)]


@pytest.mark.parametrize(("norm", "residual", "qk_norm"), STRUCTURES)
def test_language_model_logits(norm, residual, qk_norm):
    model = build(
        WellposedForCausalLM, norm=norm, residual=residual, qk_norm=qk_norm, activation="relu"
    )
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
    model = build(
        WellposedForSequenceClassification, pooling=pooling, position=position, num_labels=5
    )
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


def test_hidden_states_end_in_the_normed_state():
    model = build(WellposedForCausalLM, norm="pre")
    output = model(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    slow = SlowTransformer(model)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    assert_close(output.hidden_states[0][0], slow.embed([1, 2, 3]), rtol=1e-10, atol=1e-10)
    assert_close(
        output.hidden_states[-1][0], slow.hidden([1, 2, 3], is_causal=True), rtol=1e-10, atol=1e-10
    )


def test_the_loss_is_the_mean_cross_entropy_of_the_labels_that_count():
    model = build(WellposedForCausalLM)
    ids, labels = (
        torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]),
        torch.tensor([[1, 2, -100, 4], [5, 6, -100, -100]]),
    )
    output = model(input_ids=ids, labels=labels)
    log_probabilities = output.logits.float().log_softmax(-1)
    terms = [-log_probabilities[b, i - 1, labels[b, i]] for b, i in [(0, 1), (0, 3), (1, 1)]]
    assert_close(output.loss, sum(terms) / 3, rtol=1e-6, atol=0)
    summed = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(6)).loss
    assert_close(summed, sum(terms) / 6, rtol=1e-6, atol=0)
    kept = model(input_ids=ids, labels=labels, logits_to_keep=3)
    # Products of other shapes may be summed in another order: the last digit of float64 is not the
    # same on every CPU.
    assert_close(kept.logits, output.logits[:, 1:], rtol=1e-13, atol=1e-14)
    assert_close(kept.loss, terms[1], rtol=1e-6, atol=0)
    some = model(input_ids=ids, logits_to_keep=torch.tensor([0, 2]))
    assert_close(some.logits, output.logits[:, [0, 2]], rtol=1e-13, atol=1e-14)
