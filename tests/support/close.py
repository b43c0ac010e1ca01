"""Comparisons of tensors."""

from torch.testing import assert_close


def within(found, expected, atol):
    """Assert that no entry differs by more than `atol`, whatever its size."""
    assert_close(found, expected, rtol=0, atol=atol)
