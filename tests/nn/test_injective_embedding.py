"""InjectiveEmbedding: distinct pairs get distinct vectors, positions of any length, refusals."""

import math

import pytest
import torch
from tests.support.close import within
from tests.support.refusal import bad_config, bad_shape

from wellposed.nn import InjectiveEmbedding


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_distinct_pairs_get_distinct_vectors(position):
    module = InjectiveEmbedding(7, 8, position=position, max_positions=30)
    ids = torch.arange(7)[:, None].expand(7, 30)
    vectors = module(ids).reshape(-1, 8).double()
    distances = torch.cdist(vectors, vectors).fill_diagonal_(torch.inf)
    assert distances.min() > 1e-3
    # A sum of the two, as usual, is no injection: pick the positions so that it collides.
    token, code = vectors[0, :4], vectors[0, 4:]
    assert torch.equal(
        module(torch.zeros(1, 1, dtype=torch.long))[0, 0].double(), torch.cat([token, code])
    )


def test_sines_follow_the_formula_before_and_beyond_the_table():
    module = InjectiveEmbedding(3, 12, max_positions=4).double()
    codes = module(torch.zeros(1, 9, dtype=torch.long))[0, :, 6:]
    for p in range(9):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            expected = torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64)
            # The stored part was rounded to float32 when the module was made.
            within(codes[p, 2 * i : 2 * i + 2], expected, 1e-7)


def test_no_channel_is_wasted():
    # In the released code 112 of 256 channels vary by less than 1e-3 over 512 positions.
    codes = InjectiveEmbedding(2, 512, max_positions=512)(torch.zeros(1, 512, dtype=torch.long))[
        0, :, 256:
    ]
    assert int((codes.std(0) < 1e-3).sum()) < 0.2 * 256


def test_given_positions():
    module = InjectiveEmbedding(5, 8, max_positions=4)
    ids = torch.tensor([[1, 2, 3]])
    within(module(ids, torch.arange(3)), module(ids), 1e-7)
    shifted = module(ids, torch.tensor([[5, 0, 1]]))
    within(shifted[:, 1:, 4:], module(ids)[:, :2, 4:], 1e-7)


def test_token_margin_is_the_least_distance():
    module = InjectiveEmbedding(20, 8)
    rows = module.token.weight.detach()
    expected = min(float((a - b).norm()) for i, a in enumerate(rows) for b in rows[:i])
    assert module.token_margin(rows_at_a_time=7) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        module.token.weight[3] = module.token.weight[11]
    assert module.token_margin() == 0


def test_refusals():
    with bad_config(match="even width"):
        InjectiveEmbedding(5, 7)
    with bad_shape(match="max_position_embeddings >= 5"):
        InjectiveEmbedding(5, 8, position="learned", max_positions=4)(
            torch.zeros(1, 5, dtype=torch.long)
        )
    with bad_shape(match=r"expected \(batch, tokens\)"):
        InjectiveEmbedding(5, 8)(torch.zeros(4, dtype=torch.long))
