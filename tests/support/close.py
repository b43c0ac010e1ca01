"""Comparisons of tensors."""

from torch.testing import assert_close


def within(actual, expected, atol):
    """Assert that no entry differs by more than `atol`, at any size."""
    assert_close(actual, expected, rtol=0, atol=atol)
