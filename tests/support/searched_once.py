"""A fixture for tests that certify the same weights many times."""

import pytest
import torch

from wellposed.certification.bounds import tightest_bound


def _content(link):
    values = (vars(link).get(name) for name in ("weight", "norm", "low", "high"))
    stored = [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]
    return f"{type(link).__name__} {stored}"


@pytest.fixture
def searched_once(monkeypatch):
    """Search multipliers once for the same weights: several norms, and copies of a module, ask for them."""
    made = {}

    def bound(links, skip=0.0, scale=1.0):
        key = (skip, scale, *map(_content, links))
        if key not in made:
            made[key] = tightest_bound(links, skip, scale)
        return made[key]

    monkeypatch.setattr("wellposed.certification._walk.tightest_bound", bound)
