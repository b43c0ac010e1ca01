"""The vectors that L2 attention is called with: their products, their widths, their shift, entry by
entry."""

import itertools

import pytest
import torch

from wellposed.functional.as_dot_product import common_shift, l2_vectors, normalized_vectors


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
        own = head * key_heads // 4
        m = shift[batch, own, 0].double()
        for i, j in itertools.product(range(3), range(6)):
            found = float(wide_query[batch, head, i].double() @ wide_key[batch, own, j].double())
            if padding is not None and bool(padding[batch, 0, j]):
                assert found < -1e7
                continue
            q, k = query[batch, head, i].double() - m, key[batch, own, j].double() - m
            assert found == pytest.approx(float(q @ k - k @ k / 2), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(
    ("width", "value_dim", "dtype", "expected"),
    [
        (7, 0, torch.float32, 8),
        (8, 0, torch.float32, 16),
        (5, 0, torch.bfloat16, 8),
        (6, 0, torch.bfloat16, 16),
        (6, 0, torch.float16, 16),
        (3, 8, torch.float32, 8),
        (3, 9, torch.float32, 16),
        (1, 0, torch.float64, 8),
    ],
)
def test_the_width_is_the_least_multiple_of_eight_that_holds_all(width, value_dim, dtype, expected):
    tokens = torch.ones(1, 2, 3, width, dtype=dtype)
    vectors = l2_vectors(
        tokens, tokens, torch.zeros(1, 2, 1, width, dtype=dtype), value_dim=value_dim
    )
    assert [part.shape[-1] for part in vectors] == [expected, expected]
    columns = 3 if dtype in (torch.float16, torch.bfloat16) else 1
    # Beyond the norm columns there is nothing.
    for part in vectors:
        assert not part[..., width + columns :].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_three_half_columns_hold_a_norm_to_float32(dtype):
    key = torch.tensor([[[[1.0, 3.0]], [[0.0078125, 37.5]]]]).to(dtype)
    _, wide = l2_vectors(key, key, torch.zeros_like(key))
    norms = [-0.5 * float(row.double() @ row.double()) for row in key[0, :, 0]]
    unit = 256.0 if dtype == torch.float16 else 1.0
    for head, norm in enumerate(norms):
        columns = wide[0, head, 0, 2:5].double()
        assert unit * float(columns.sum()) == pytest.approx(norm, rel=2.0**-23)
        assert float(columns[0].abs()) >= float(columns[1].abs()) >= float(columns[2].abs())


def test_a_shift_is_the_mean_of_the_keys_that_are_seen_or_the_first_of_them():
    key = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    unseen = torch.zeros(2, 1, 4, dtype=torch.bool)
    unseen[1, 0, :2] = True
    torch.testing.assert_close(
        common_shift(key, key, first=False),
        torch.stack([key[:, :, i] for i in range(4)]).sum(0)[:, :, None] / 4,
    )
    assert torch.equal(common_shift(key, key, first=True), key[:, :, :1])
    by_mean = common_shift(key, key, unseen, first=False)
    torch.testing.assert_close(by_mean[0, :, 0], key[0].mean(1))
    torch.testing.assert_close(by_mean[1, :, 0], (key[1, :, 2] + key[1, :, 3]) / 2)
    by_first = common_shift(key, key, unseen.expand(2, 3, 4), first=True)
    assert torch.equal(by_first[0], key[0, :, :1])
    assert torch.equal(by_first[1], key[1, :, 2:3])
    nothing = common_shift(key, key, torch.ones(2, 1, 4, dtype=torch.bool), first=False)
    assert nothing.shape == (2, 3, 1, 5)
    assert not nothing.any()
    assert common_shift(key, key[:, :, :0], first=True).shape == (2, 3, 1, 5)
    moving = key.clone().requires_grad_()
    assert not common_shift(moving, moving, first=False).requires_grad


def shift_of(query, key, unseen=None, *, heads=1):
    """The shift of one coordinate in bfloat16, for each key head."""
    asked = torch.tensor(query, dtype=torch.bfloat16).view(1, heads, -1, 1)
    keys = torch.tensor(key, dtype=torch.bfloat16).view(1, 1, -1, 1)
    mask = None if unseen is None else torch.tensor([[unseen]])
    return common_shift(asked, keys, mask, first=False).flatten().tolist()


def test_half_precision_moves_by_what_can_be_subtracted_exactly_and_else_not_at_all():
    assert shift_of([3.0, 4.0], [3.5, 5.0]) == [3.0]
    assert shift_of([3.0, 6.0], [3.5, 5.0]) == [3.0]  # a factor of two at most
    assert shift_of([3.0, 6.125], [3.5, 5.0]) == [0.0]
    assert shift_of([-3.0, -4.0], [-3.5, -6.0]) == [-3.0]
    assert shift_of([-3.0, -4.0], [-3.5, -6.125]) == [0.0]
    assert shift_of([-1.0, 1.0], [1.0, 1.0]) == [0.0]
    assert shift_of([0.0, 1.0], [1.0, 1.0]) == [0.0]
    assert shift_of([-1.0, 0.0], [-1.0, -1.0]) == [0.0]
    # Queries of every head of the group count, and what is unseen does not, in keys and in queries
    # of as many.
    assert shift_of([3.0, 4.0, 1.0, 4.0], [3.5, 5.0], heads=2) == [0.0]
    assert shift_of([3.0, 4.0, 3.0, 4.0], [3.5, 5.0], heads=2) == [3.0]
    assert shift_of([3.0, 99.0], [3.5, 99.0], [False, True]) == [3.0]
    assert shift_of([3.0, 99.0], [3.5, -99.0], [False, True]) == [3.0]
    assert shift_of([3.0, 99.0, 3.0], [3.5, 99.0], [False, True]) == [0.0]
    assert shift_of([], [3.5, 5.0]) == [3.5]
    assert shift_of([], [3.5, 5.0], [True, True]) == [0.0]


def test_normalised_vectors_are_shorter_than_one_and_summed_in_float32():
    tokens = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    found = normalized_vectors(tokens, 11.0)
    assert found.tolist() == [[pytest.approx(0.5), pytest.approx(2 / 3)], [0.0, 0.0]]
    long = torch.full((1, 4096), 32.0, dtype=torch.float16)  # the square overflows there
    assert normalized_vectors(long, 1.0)[0, 0].item() == pytest.approx(1 / 64, rel=1e-3)
    assert normalized_vectors(long, 1.0).dtype == torch.float16
