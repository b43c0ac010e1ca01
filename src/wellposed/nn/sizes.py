"""Checks of the numbers from which modules are built."""

from __future__ import annotations

import math
from numbers import Integral

import torch

from wellposed.errors import ConfigError

LEAST_EPS = torch.finfo(torch.float32).tiny
"""Smallest normal number of float32; below it, a token of zeros divides zero by zero."""


def check_sizes(where: str, **sizes: int) -> None:
    """Raise `ConfigError` where a size is no integer of at least 1.

    >>> check_sizes("Stack", embed_dim=8, num_layers=1.5)
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: Stack: num_layers is 1.5; expected an integer of at least 1
    """
    wrong = [
        f"{name} is {size!r}"
        for name, size in sizes.items()
        if not isinstance(size, Integral) or isinstance(size, bool) or size < 1
    ]
    if wrong:
        raise ConfigError(f"{where}: {' and '.join(wrong)}; expected an integer of at least 1")


def check_eps(where: str, eps: float) -> None:
    """Raise `ConfigError` where eps does not keep a divisor off zero: it is infinite, or 0 in
    float32.

    >>> check_eps("GramSpectrum", 1e-60)
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: GramSpectrum: eps is 1e-60; expected a finite number of at least
    1.17549e-38, or \
tokens that are zero divide by zero
    """
    if not LEAST_EPS <= eps < math.inf:
        raise ConfigError(
            f"{where}: eps is {eps}; expected a finite number of at least {LEAST_EPS:g}, or tokens"
            " that are zero divide by zero"
        )
