"""Layouts that no library has under these names: each is right, or its missing parts are named."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wellposed.roles import find_roles

D = 16
H = 4
T = 6


def split(x, heads=H):
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def merged(x):
    return x.transpose(-3, -2).flatten(-2)


class Layout(nn.Module):
    """Weights a to f of D x D, and what a layout makes of tokens."""

    def __init__(self):
        super().__init__()
        for name in "abcdef":
            setattr(self, name, nn.Linear(D, D, bias=False))
        self.fused = nn.Linear(D, 3 * D, bias=False)
        self.mix = nn.Parameter(torch.randn(H, H))
        self.up = nn.Linear(D, 24)
        self.down = nn.Linear(24, D)

    def heads(self, x):
        return split(self.a(x)), split(self.b(x)), split(self.c(x))


class TalkingHeads(Layout):
    """Logits and weights are mixed over heads (Shazeer et al. 2020)."""

    def forward(self, x):
        q, k, v = self.heads(x)
        logits = torch.einsum("hg,bgij->bhij", self.mix, q @ k.mT)
        return x + self.d(merged(torch.einsum("hg,bgij->bhij", self.mix, logits.softmax(-1)) @ v))


class Interleaved(Layout):
    """ALiBi, and a fused weight whose rows go round query, value, key within each number."""

    def forward(self, x):
        q, v, k = (split(part) for part in self.fused(x).unflatten(-1, (D, 3)).unbind(-1))
        far = (torch.arange(T)[None] - torch.arange(T)[:, None]).abs()
        slopes = 2.0 ** -torch.arange(1, H + 1)[:, None, None]
        return x + self.d(merged((q @ k.mT / 2 - slopes * far).softmax(-1) @ v))


class Parallel(Layout):
    """Attention and a feed-forward network read the same and are added at once."""

    def forward(self, x):
        y = F.layer_norm(x, (D,))
        q, k, v = self.heads(y)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.d(merged(mixed)) + self.down(F.gelu(self.up(y)))


class Sigmoid(Layout):
    """Attention by a sigmoid, which no softmax shows (Ramapuram et al. 2024)."""

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.mT / 2 - math.log(T)).sigmoid()
        x = x + self.d(merged(weights @ v))
        return x + self.down(F.gelu(self.up(x)))


class Convolved(Layout):
    """Queries and keys pass a depthwise convolution over tokens (Primer, So et al. 2021)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1, groups=D)

    def forward(self, x):
        q, k = (self.conv(part(x).mT).mT for part in (self.a, self.b))
        mixed = F.scaled_dot_product_attention(split(q), split(k), split(self.c(x)))
        return x + self.d(merged(mixed))


class RoutedHeads(Layout):
    """A router weighs the heads of each token (Jin et al. 2024)."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, H, bias=False)

    def forward(self, x):
        q, k, v = self.heads(x)
        share = self.router(x).softmax(-1).mT[..., None]
        return x + self.d(merged(share * F.scaled_dot_product_attention(q, k, v)))


class Differential(Layout):
    """The difference of two attentions, with one output (Ye et al. 2024)."""

    def forward(self, x):
        one = (split(self.a(x)) @ split(self.b(x)).mT / 2).softmax(-1)
        two = (split(self.e(x)) @ split(self.f(x)).mT / 2).softmax(-1)
        return x + self.d(merged((one - 0.5 * two) @ split(self.c(x))))


class TiedKeyValue(Layout):
    """One weight is key and value, two tokens see four memory rows before the others."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, 4, D))

    def forward(self, x):
        tokens = torch.cat([self.memory.expand(len(x), -1, -1), x], 1)
        k = v = split(self.b(tokens))
        return x + self.d(merged(F.scaled_dot_product_attention(split(self.a(x)), k, v)))


def labels(roles):
    (part,) = roles.attention
    return {role: getattr(part, role).parameter_name[0] for role in PLAIN}


PLAIN = {"query": "a", "key": "b", "value": "c", "output": "d"}


@pytest.mark.parametrize("layout", [TalkingHeads, Parallel, RoutedHeads, Differential])
def test_layouts_that_are_found_whole(layout):
    roles = find_roles(layout(), torch.randn(2, T, D))
    assert labels(roles) == PLAIN
    (part,) = roles.attention
    width = D // H
    even = tuple(((row, row + width),) for row in range(0, D, width))
    assert part.heads == dict.fromkeys(("query", "key", "value"), even)
    assert bool(roles.feedforward) is (layout is Parallel)
    assert not roles.notes
    assert not roles.not_added
    assert any("fused.weight" in name for name in roles.unnamed)
    both = [("query", "e.weight"), ("key", "f.weight")] if layout is Differential else []
    assert [(role, view.parameter_name) for role, view in part.extra_projections] == both


def test_rows_that_go_round_within_each_number_are_known_one_by_one():
    (part,) = find_roles(Interleaved(), torch.randn(2, T, D)).attention
    for offset, role in enumerate(("query", "value", "key")):
        rows = tuple((row, row + 1) for row in range(offset, 3 * D, 3))
        assert getattr(part, role).spans == rows
        assert part.heads[role] == tuple(rows[4 * head : 4 * head + 4] for head in range(H))
    assert part.key.parameter_name == "fused.weight"


def test_one_weight_of_keys_and_values_is_both():
    roles = find_roles(TiedKeyValue(), torch.randn(2, T, D))
    assert labels(roles) == {**PLAIN, "key": "b", "value": "b"}
    assert any("memory" in name for name in roles.unnamed)


@pytest.mark.parametrize("layout", [Convolved, Sigmoid])
def test_layouts_that_are_not_told_whole_say_so_by_name(layout):
    roles = find_roles(layout(), torch.randn(2, T, D))
    assert not roles.attention
    text = " ".join((*roles.unnamed, *roles.notes, *(w.view.label for w in roles.loose)))
    for name in "abcd":
        assert f"{name}.weight" in text
