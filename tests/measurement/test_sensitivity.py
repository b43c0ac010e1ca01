"""The sensitivity of the softmax in `Monitor`, one row at a time in float64, and above the exact norm."""

import copy
import math

import pytest
import torch
from torch import nn

from wellposed.measurement import Monitor

EARLIER = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
SEEN = {
    "all keys": EARLIER | True,
    "earlier keys": EARLIER,
    "one key in some rows": torch.eye(6)[None, None].index_fill(2, torch.arange(3), 1.0).bool(),
}
X = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Two heads of width 4, by torch's kernel or written out."""

    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.num_heads = 2
        self.eager = eager
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.k_proj = nn.Linear(8, 8, bias=False)
        self.v_proj = nn.Linear(8, 8, bias=False)
        self.o_proj = nn.Linear(8, 8, bias=False)

    def forward(self, x, mask=None):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in projections)
        if self.eager and mask is not None:
            mixed = (q @ k.mT / 2).masked_fill(~mask, -math.inf).softmax(-1) @ v
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def slow_sensitivities(model, passes):
    """Return the mean of p1 (1 - p1 + p2) of each head over the rows of two keys or more."""
    exact = copy.deepcopy(model).double().requires_grad_(False)
    means = {}
    for head in (0, 1):
        bounds: list[float] = []
        for x, is_open in passes:
            query = exact.q_proj(x.double()).unflatten(-1, (2, 4))[..., head, :]
            key = exact.k_proj(x.double()).unflatten(-1, (2, 4))[..., head, :]
            for example in range(len(x)):
                for i in range(x.shape[1]):
                    keys = key[example, is_open[0, 0, i]]
                    if len(keys) < 2:
                        continue
                    weights = (keys @ query[example, i] / 2).softmax(0)
                    first, second = sorted(weights.tolist(), reverse=True)[:2]
                    bounds.append(first * (1 - first + second))
                    jacobian = weights.diag() - torch.outer(weights, weights)
                    assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bounds[-1] + 1e-12
        means[f"vital/encoder.0.head{head}/softmax_sensitivity"] = sum(bounds) / len(bounds)
    return means


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("mask_name", SEEN)
def test_it_is_the_mean_over_queries_that_see_two_keys(mask_name, eager):
    torch.manual_seed(0)
    model = Attention(eager=eager)
    is_open = SEEN[mask_name]
    with Monitor(model, every=1, weights=False, softmax_sensitivity=True) as monitor:
        for size in (1.0, 3.0):
            model(size * X, is_open.expand(3, 1, 6, 6))
        numbers = monitor.step()
    expected = slow_sensitivities(model, [(X, is_open), (3.0 * X, is_open)])
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("asked", [False, True])
def test_it_is_measured_if_asked_for_and_left_out_with_one_key(asked):
    model = Attention(eager=False)
    with Monitor(model, every=1, weights=False, softmax_sensitivity=asked) as monitor:
        model(X[:, :1])
        short = monitor.step()
        model(X)
        long = monitor.step()
    assert not any(name.endswith("softmax_sensitivity") for name in short)
    assert sum(name.endswith("softmax_sensitivity") for name in long) == 2 * asked
