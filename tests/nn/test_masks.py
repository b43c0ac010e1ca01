"""Masks against a loop over every (query, key) pair."""

import itertools

import pytest
import torch
from tests.support.refusal import bad_shape

from wellposed.nn import AttentionMask, attention_mask

CPU = torch.device("cpu")
PADDINGS = [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1]]


def allowed_by_loop(padding, is_causal, num_queries, num_keys):
    """The contract, pair by pair: both real and, if causal, not later; or the token itself."""
    offset = num_keys - num_queries
    rows = [
        [
            (not padding[i + offset] and not padding[j] and (not is_causal or j <= i + offset))
            or j == i + offset
            for j in range(num_keys)
        ]
        for i in range(num_queries)
    ]
    return torch.tensor(rows)


def effective(made, num_queries, num_keys):
    """What `scaled_dot_product_attention` makes of the pair."""
    mask = (
        torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool)
        if made.mask is None
        else made.mask
    )
    return (
        mask.logical_and(torch.ones(num_queries, num_keys, dtype=torch.bool).tril())
        if made.is_causal
        else mask
    )


@pytest.mark.parametrize(
    ("is_causal", "num_queries"), list(itertools.product([False, True], [1, 2, 5]))
)
def test_padding_masks_equal_the_loop(is_causal, num_queries):
    made = attention_mask(torch.tensor(PADDINGS, dtype=torch.bool), is_causal, num_queries, 5, CPU)
    assert made.mask is not None
    assert not made.is_causal
    for row, padding in zip(made.mask, PADDINGS, strict=True):
        assert torch.equal(row[0], allowed_by_loop(padding, is_causal, num_queries, 5))


@pytest.mark.parametrize(
    ("is_causal", "num_queries"), list(itertools.product([False, True], [1, 2, 5]))
)
def test_without_padding_the_pair_means_the_same(is_causal, num_queries):
    made = attention_mask(None, is_causal, num_queries, 5, CPU)
    expected = allowed_by_loop([0] * 5, is_causal, num_queries, 5)
    assert torch.equal(effective(made, num_queries, 5).expand(1, 1, -1, -1)[0, 0], expected)


@pytest.mark.parametrize(
    ("is_causal", "num_queries", "flag"),
    [(False, 5, False), (True, 5, True), (True, 1, False), (False, 2, False)],
)
def test_no_mask_is_made_where_none_is_needed(is_causal, num_queries, flag):
    kind = "causal" if is_causal else "full"
    assert attention_mask(None, is_causal, num_queries, 5, CPU) == AttentionMask(None, flag, kind)


def test_only_masks_made_here_claim_a_pattern():
    padding = torch.tensor([[False, True]])
    assert [attention_mask(padding, flag, 2, 2, CPU).kind for flag in (False, True)] == [
        "full",
        "causal",
    ]
    assert AttentionMask(torch.ones(1, 1, 2, 2, dtype=torch.bool), False).kind == "any"


def test_a_finished_mask_is_returned_as_it_is():
    made = attention_mask(torch.tensor([[False, True]]), True, 2, 2, CPU)
    assert attention_mask(made, False, 2, 2, CPU) is made


def test_masks_that_do_not_fit_are_refused():
    with bad_shape(match=r"is torch.int64 .*; expected torch.bool .* attention_mask == 0"):
        attention_mask(torch.ones(2, 5, dtype=torch.int64), False, 5, 5, CPU)
    with bad_shape(match=r"torch.bool \(2, 4\); expected torch.bool \(2, 5\)"):
        attention_mask(torch.zeros(2, 4, dtype=torch.bool), False, 5, 5, CPU)
    with bad_shape(match="received 3 queries and 2 keys"):
        attention_mask(None, False, 3, 2, CPU)
