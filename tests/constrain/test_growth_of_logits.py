"""How QK-clip foresees a step: its rule, head by head, against a slow one in float64."""

import math

import pytest
import torch
from torch import nn

from wellposed.constrain import constrain_
from wellposed.errors import ConvergenceError

BOUND = 2.0
NEAR = 0.5
"""Part of the bound from which growth counts."""
SCALES = {
    "twofold": (0.4, 0.6, 0.8, 3.0, 3.6, 4.5, 1.0, 4.4),
    "slow": (1.0, 1.04, 1.08, 1.12, 1.16, 1.3, 1.32, 1.5, 1.6),
}
"""Sizes of the batches: growth below the bound, then above it by more than twofold; or less."""


def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)


def largest_by_head(model, x):
    """Return the largest logit of each head, by definition."""
    attention = model.self_attn
    projected = x.double() @ attention.in_proj_weight.detach().double().T
    projected = projected + attention.in_proj_bias.detach().double()
    query, key, _ = projected.unflatten(-1, (3, 4, 8)).unbind(-3)
    logits = torch.einsum("bihd,bjhd->hbij", query, key) / math.sqrt(8)
    return logits.amax((1, 2, 3))


class SlowRule:
    """The factors of heads, one step after another."""

    def __init__(self):
        self.growth = 1.0
        self.left = [0.0] * 4

    def factors(self, largest):
        """Return the factor of each head for its largest logit."""
        growths = [1.0]
        for now, before in zip(largest, self.left, strict=True):
            if now >= NEAR * BOUND and before > 0:
                growths.append(min(now / before, 2.0))
        self.growth = max(self.growth * 0.995 + 0.005, *growths)
        goal = BOUND * self.growth**-1.5
        factors = [min(1.0, goal / now) for now in largest]
        self.left = [now * factor for now, factor in zip(largest, factors, strict=True)]
        return factors


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
def test_heads_are_scaled_by_the_largest_growth_that_was_seen(scales):
    model = layer()
    torch.manual_seed(1)
    tokens = torch.randn(2, 5, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    constrain_(model, optimizer, to="logits", bound=BOUND, batch=tokens)
    rule = SlowRule()

    for scale in scales:
        x = scale * tokens
        before = largest_by_head(model, x)
        model(x).square().mean().backward()
        optimizer.step()
        expected = before * torch.tensor(rule.factors(before.tolist()))
        # Float32 sums of 32 products in projections and of 8 in logits.
        torch.testing.assert_close(largest_by_head(model, x), expected, rtol=2e-5, atol=0.0)

    assert rule.growth > 1.1, "growth was seen"


def test_no_head_is_scaled_after_logits_that_are_not_finite():
    model = layer()
    tokens = torch.randn(2, 5, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    constrain_(model, optimizer, to="logits", bound=BOUND, batch=tokens)
    before = model.self_attn.in_proj_weight.clone()
    model(1e25 * tokens)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model.self_attn.in_proj_weight, before)
    with pytest.raises(ConvergenceError, match="not finite"):
        optimizer.step()


def test_remove_leaves_no_entry_in_the_state_of_plain_sgd():
    model = layer()
    tokens = torch.randn(2, 5, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = constrain_(model, optimizer, to="logits", bound=BOUND, batch=tokens)
    model(tokens).square().mean().backward()
    optimizer.step()
    noted = [entry for entry in optimizer.state.values() if entry]
    handle.remove()
    assert len(noted) == 1
    assert dict(optimizer.state) == {}


class Interrupted(torch.optim.SGD):
    """SGD whose step is cut off after it has changed the weights."""

    def step(self, closure=None):
        super().step(closure)
        raise InterruptedError


def test_a_step_that_raises_leaves_query_and_key_as_before():
    model = layer()
    tokens = torch.randn(2, 5, 32)
    optimizer = Interrupted(model.parameters(), lr=0.1)
    constrain_(model, optimizer, to="logits", bound=BOUND, batch=tokens)
    model(tokens).square().mean().backward()
    attention = model.self_attn
    before = (attention.in_proj_weight[:64].clone(), attention.in_proj_bias[:64].clone())
    with pytest.raises(InterruptedError):
        optimizer.step()
    assert torch.equal(attention.in_proj_weight[:64], before[0])
    assert torch.equal(attention.in_proj_bias[:64], before[1])
