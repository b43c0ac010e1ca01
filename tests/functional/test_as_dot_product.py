"""The vectors that L2 attention is called with: their products, entry by
entry."""

import itertools

import pytest
import torch

from wellposed.functional import l2_vectors, normalized_vectors


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)],
    ids=str,
)
def test_products_are_half_squared_distances_up_to_a_number_of_the_query(
    dtype, tolerance, key_heads, padded
):
    generator = torch.Generator().manual_seed(0)
    # Halves of small integers, so that differences are exact in every dtype.
    query = torch.randint(-6, 7, (2, 4, 3, 5), generator=generator).to(dtype) / 2
    key = torch.randint(-6, 7, (2, key_heads, 6, 5), generator=generator).to(dtype) / 2
    shift = torch.randint(-2, 3, (2, key_heads, 1, 5), generator=generator).to(dtype) / 2
    padding = torch.zeros(2, 1, 6, dtype=torch.bool) if padded else None
    if padding is not None:
        padding[1, 0, 4:] = True
    wide_query, wide_key = l2_vectors(query, key, shift, padding=padding)
    assert wide_query.shape == (2, 4, 3, 8)
    assert wide_key.shape == (2, key_heads, 6, 8)
    assert wide_query.dtype == wide_key.dtype == dtype
    for batch, head in itertools.product(range(2), range(4)):
        group = head * key_heads // 4
        m = shift[batch, group, 0].double()
        for i, j in itertools.product(range(3), range(6)):
            value = float(wide_query[batch, head, i].double() @ wide_key[batch, group, j].double())
            if padding is not None and bool(padding[batch, 0, j]):
                assert value < -1e7
                continue
            q = query[batch, head, i].double() - m
            k = key[batch, group, j].double() - m
            assert value == pytest.approx(float(q @ k - k @ k / 2), rel=tolerance, abs=tolerance)


def test_normalised_vectors_are_shorter_than_one_and_summed_in_float32():
    tokens = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    value = normalized_vectors(tokens, 11.0)
    assert value.tolist() == [[pytest.approx(0.5), pytest.approx(2 / 3)], [0.0, 0.0]]
    long = torch.full((1, 4096), 32.0, dtype=torch.float16)  # the square overflows there
    assert normalized_vectors(long, 1.0)[0, 0].item() == pytest.approx(1 / 64, rel=1e-3)
    assert normalized_vectors(long, 1.0).dtype == torch.float16
