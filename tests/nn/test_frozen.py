"""`frozen` reaches layers of this library alone, whoever enters it."""

from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import nn

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import LayerBound, certify, register_rule
from wellposed.nn import (
    InvertibleResidual,
    L2SelfAttention,
    MaxMinFeedForward,
    ReversibleSequential,
    frozen,
)


class Foreign(nn.Module):
    """A module of others."""

    def forward(self, x):
        return 0.5 * x


class Method(Foreign):
    def frozen(self):
        raise AssertionError("it was called")


class MethodWithArguments(Foreign):
    def frozen(self, weights, *, until):
        raise AssertionError("it was called")


class Property(Foreign):
    @property
    def frozen(self):
        raise AssertionError("it was read")


class Flag(Foreign):
    frozen = True


class OfAnotherClass(MaxMinFeedForward):
    """A layer of ours that divides by no bound, and a method of a user's own."""

    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        return 0.5 * x

    def frozen(self, *, until):
        raise AssertionError("it was called")


class Ours(L2SelfAttention):
    """A layer of a user's own that is one of ours."""

    entered = 0

    @contextmanager
    def frozen(self, layers=None):
        type(self).entered += 1
        with super().frozen(layers):
            yield


FOREIGN = [Method, MethodWithArguments, Property, Flag, OfAnotherClass]
for foreign in FOREIGN:
    register_rule(foreign)(lambda module, site: LayerBound(0.5, "half", "exact"))


def residual(part):
    return InvertibleResidual(part, lipschitz=0.5)


def enter(part):
    with frozen(part):
        part(torch.randn(1, 3, 8))


def attack(part):
    lipschitz_lower_bound(part, (3, 8), restarts=2, steps=2)


def attack_in_its_own_dtype(part):
    lipschitz_lower_bound(part, (3, 8), restarts=2, steps=2, dtype=None)


def invert(part):
    block = residual(part)
    x = torch.randn(1, 3, 8)
    rebuilt, _ = block.inverse(block(x))
    assert torch.allclose(rebuilt, x, atol=1e-4)


def train_without_activations(part):
    stack = ReversibleSequential([residual(part)])
    stack(torch.randn(1, 3, 8).requires_grad_()).sum().backward()


def certify_and_check(part):
    assert certify(part, seq_len=3).total <= 1


ROUTES = [
    enter,
    attack,
    attack_in_its_own_dtype,
    invert,
    train_without_activations,
    certify_and_check,
]


# certify refuses a subclass whose forward is its own.
PAIRS = [pair for pair in product(FOREIGN, ROUTES) if pair != (OfAnotherClass, certify_and_check)]


@pytest.mark.parametrize(("kind", "route"), PAIRS)
def test_what_others_mean_by_frozen_is_left_alone(kind, route):
    layers = [L2SelfAttention(8, 2, contractive=0.5, max_tokens=4), kind()]
    route(nn.Sequential(*layers).eval())


@pytest.mark.parametrize("route", ROUTES[:-1])  # certify refuses a subclass without a rule
def test_a_subclass_of_our_layer_takes_part(route, monkeypatch):
    monkeypatch.setattr(Ours, "entered", 0)
    route(nn.Sequential(Ours(8, 2, contractive=0.5, max_tokens=4)).eval())
    assert Ours.entered


def test_a_contractive_layer_is_bounded_once_and_its_outputs_are_the_same(monkeypatch):
    layer = L2SelfAttention(8, 2, contractive=0.9).eval()
    x = torch.randn(2, 3, 8)
    bounded = []
    divisor = L2SelfAttention._divisor
    monkeypatch.setattr(
        L2SelfAttention, "_divisor", lambda *args: bounded.append(1) or divisor(*args)
    )
    with torch.no_grad():
        expected = [layer(x), layer(2 * x)]
        assert len(bounded) == 2
        with frozen(nn.Sequential(layer)):
            assert all(map(torch.equal, [layer(x), layer(2 * x)], expected))
        assert len(bounded) == 3
