"""Penalties of matrices that one tensor holds: those of each matrix by itself, in float64."""

import pytest
import torch

from wellposed.errors import ConfigError
from wellposed.functional import batched_gram_penalties

OPTIONS = {"squared": True, "side": "columns", "gram_dtype": None}


def slow_values(batch, squared, side):
    """Return the penalty of each matrix, by its definition."""
    values = []
    for matrix in batch.double().unbind():
        gram = matrix.T @ matrix if side == "columns" else matrix @ matrix.T
        distance = (gram - torch.eye(len(gram), dtype=gram.dtype)).square().sum()
        values.append(distance if squared else distance.sqrt())
    return torch.stack(values)


def drawn(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / shape[-1] ** 0.5


KINDS = {
    "tall": lambda: drawn(4, 9, 5),
    "wide": lambda: drawn(4, 5, 9),
    "square": lambda: drawn(3, 6, 6),
    "one matrix": lambda: drawn(1, 6, 4),
    "one row": lambda: drawn(3, 1, 5),
    "float64": lambda: drawn(4, 9, 5, dtype=torch.float64),
    "bfloat16": lambda: drawn(4, 9, 5, dtype=torch.bfloat16),
    "transposed": lambda: drawn(4, 5, 9).mT,
    "upper rows": lambda: drawn(4, 10, 6)[:, 5:],
    "rows between": lambda: drawn(4, 10, 6)[:, 1::2],
    "transposed, rows between": lambda: drawn(4, 6, 10).mT[:, ::2],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["columns", "rows"])
@pytest.mark.parametrize("squared", [True, False])
def test_values_and_gradients_are_those_of_each_matrix(squared, side, kind):
    batch = KINDS[kind]().detach().requires_grad_()
    ((places, values),) = batched_gram_penalties(
        [batch], squared=squared, side=side, gram_dtype=None
    )
    expected = slow_values(batch, squared, side)
    factors = torch.arange(1.0, 1.0 + len(batch)).double()
    slope = torch.autograd.grad((values.double() * factors).sum(), batch)[0]
    wanted = torch.autograd.grad((expected * factors).sum(), batch)[0]
    # A bfloat16 gradient is rounded once, after products in float32.
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3}[batch.dtype]
    assert places == [0]
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
    scale = wanted.abs().max()
    assert (slope - wanted).abs().max() <= 4 * tolerance * scale
    assert slope.stride() == batch.stride() or not batch.is_contiguous()


def test_tensors_of_several_kinds_are_joined_by_kind():
    batches = [build() for build in KINDS.values()]
    frozen = KINDS["tall"]()
    batches = [batch.detach().requires_grad_() for batch in batches] + [frozen]
    results = batched_gram_penalties(batches, **OPTIONS)
    assert sorted(index for places, _ in results for index in places) == list(range(len(batches)))
    for places, values in results:
        assert len({tuple(batches[index].shape[1:]) for index in places}) == 1
        expected = torch.cat([slow_values(batches[index], True, "columns") for index in places])
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)
        assert values.requires_grad == (places != [len(batches) - 1])


def test_copies_in_another_dtype_are_made_some_at_a_time(monkeypatch):
    batch = KINDS["bfloat16"]().requires_grad_()
    at_once = batched_gram_penalties([batch], **OPTIONS)[0][1]
    slope = torch.autograd.grad(at_once.sum(), batch)[0]
    monkeypatch.setattr("wellposed.functional._batched_penalties._ENTRIES", 90)
    parts = batched_gram_penalties([batch], **OPTIONS)[0][1]
    torch.testing.assert_close(parts, at_once, rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.autograd.grad(parts.sum(), batch)[0], slope)


def test_second_derivatives_and_transforms_are_those_of_the_definition():
    batch = drawn(3, 5, 4, dtype=torch.float64).requires_grad_()

    def ours(x):
        return batched_gram_penalties([x], **OPTIONS)[0][1]

    assert torch.autograd.gradcheck(ours, batch)
    assert torch.autograd.gradgradcheck(ours, batch)
    slope = torch.func.grad(lambda x: ours(x).sum())(batch.detach())
    expected = torch.autograd.grad(slow_values(batch, True, "columns").sum(), batch)[0]
    torch.testing.assert_close(slope, expected)


def test_numbers_that_are_not_finite_stay_in_their_matrix():
    batch = drawn(3, 5, 4)
    batch[1, 0, 0] = torch.nan
    ((_, values),) = batched_gram_penalties([batch], squared=False, side="rows", gram_dtype=None)
    assert values.isnan().tolist() == [False, True, False]


def test_orthogonal_matrices_have_a_gradient_of_zero():
    batch = torch.eye(4).repeat(2, 1, 1).requires_grad_()
    ((_, values),) = batched_gram_penalties([batch], squared=False, side="rows", gram_dtype=None)
    assert torch.equal(torch.autograd.grad(values.sum(), batch)[0], torch.zeros(2, 4, 4))


def test_a_dtype_without_products_is_refused():
    with pytest.raises(ConfigError, match=r"gram_dtype = torch\.int8"):
        batched_gram_penalties([drawn(2, 3, 3)], **{**OPTIONS, "gram_dtype": torch.int8})
