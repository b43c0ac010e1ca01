"""Common properties of all attention modules: padding, causality, caches, saving, low precision,
gradients."""

from types import SimpleNamespace

import pytest
import torch
from tests.support.close import within
from tests.support.layers import built, draw, gradients_are_right

from wellposed import nn as wn

D = 8
H = 2
N = 6
PADDING = torch.tensor([[False] * 4 + [True] * 2, [True] * 3 + [False] * 3])
FORMS = {
    "dot product": (wn.DotProductAttention, {}),
    "dot product, qk_norm": (wn.DotProductAttention, {"qk_norm": True}),
    "inverse d": (wn.InverseDAttention, {}),
    "cosine": (wn.CosineSelfAttention, {}),
    "cosine, no bias": (wn.CosineSelfAttention, {"bias": False}),
    "ball": (wn.BallAttention, {}),
    "ball with biases": (wn.BallAttention, {"bias": True, "unit_lipschitz": False}),
    "l2": (wn.L2SelfAttention, {}),
    "l2, wide queries": (wn.L2SelfAttention, {"query_width": 2}),
    "l2, untied": (wn.L2SelfAttention, {"tied": False, "query_width": 2}),
    "l2, no bias": (wn.L2SelfAttention, {"bias": False}),
    "l2, contractive": (wn.L2SelfAttention, {"contractive": 0.7, "max_tokens": 9}),
    "l2, contractive at its own length": (wn.L2SelfAttention, {"contractive": 0.7}),
}  # fmt: skip
every = pytest.mark.parametrize("name", FORMS)
# A division by a bound from Gram iterations has its own tests in `test_l2_certificate`.
undivided = pytest.mark.parametrize("name", [name for name in FORMS if "contractive" not in name])


def build(name):
    kind, options = FORMS[name]
    return built(kind, D, H, **options)


def tokens(batch=2, n=N, **keywords):
    return draw(batch, n, D, **keywords)


class GrowingCache:
    """The smallest possible cache."""

    def __init__(self):
        self.cached = []

    def update(self, *new):
        earlier = self.cached or [part[..., :0, :] for part in new]
        self.cached = [torch.cat(pair, -2) for pair in zip(earlier, new, strict=True)]
        return self.cached


@every
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_changes_nothing(name, is_causal):
    layer = build(name)
    x = tokens(batch=1, n=4)
    padded = torch.cat([x, tokens(batch=1, n=3, size=50.0)], 1)
    mask = torch.tensor([[False] * 4 + [True] * 3, [False] * 7])
    out = layer(
        torch.cat([padded, tokens(batch=1, n=7, seed=8)]),
        key_padding_mask=mask,
        is_causal=is_causal,
    )
    within(out[:1, :4], layer(x, is_causal=is_causal), 1e-12)


@every
def test_a_finished_mask_is_the_same_as_what_it_is_made_of(name):
    layer = build(name)
    x = tokens()
    mask = wn.attention_mask(PADDING, True, N, N, x.device)
    expected = layer(x, key_padding_mask=PADDING, is_causal=True)
    within(layer(x, key_padding_mask=mask), expected, 1e-12)


@every
def test_no_gradient_comes_from_a_later_token(name):
    layer = build(name)
    x = tokens().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x, is_causal=True)[:, :3].square().sum(), x)
    assert gradient[:, 3:].abs().max() == 0
    assert (gradient[:, :3].abs().sum((0, 2)) > 0).all()


@pytest.mark.parametrize("name", [name for name in FORMS if "own length" not in name])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1, 1), (3, 1, 2)])
def test_a_cache_in_any_portions_changes_nothing(name, padding, steps):
    layer = build(name)
    x = tokens()
    cache = GrowingCache()
    expected = layer(x, key_padding_mask=padding, is_causal=True)
    pieces = []
    end = 0
    for step in steps:
        start = end
        end = end + step
        mask = None if padding is None else padding[:, :end]
        pieces.append(layer(x[:, start:end], key_padding_mask=mask, is_causal=True, cache=cache))
    within(torch.cat(pieces, 1), expected, 1e-12)


@every
@pytest.mark.parametrize("length", [N, 0])
def test_a_sequence_of_padding_alone_is_finite_in_both_directions(name, length):
    layer = build(name)
    x = tokens(n=length).requires_grad_()
    mask = torch.tensor([[True], [False]]).expand(2, length)
    for is_causal in (False, True):
        out = layer(x, key_padding_mask=mask, is_causal=is_causal)
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        assert out.isfinite().all()
        assert gradient.isfinite().all()


@undivided
def test_low_precision_stays_near_float64(name):
    """Projections, logits, sums and output are each rounded a few times, of D terms at most."""
    layer = build(name)
    x = tokens()
    expected = layer(x, key_padding_mask=PADDING, is_causal=True)
    for dtype, unit in ((torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-9)):
        got = layer.to(dtype)(x.to(dtype), key_padding_mask=PADDING, is_causal=True)
        assert got.dtype is dtype
        assert (got.double() - expected).abs().max() <= 8 * D * unit * expected.abs().max()


@every
def test_autocast_stays_near_float32(name):
    layer = build(name).float()
    x = tokens().float()
    expected = layer(x, key_padding_mask=PADDING)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, key_padding_mask=PADDING)
    assert (out.float() - expected).abs().max() <= 8 * D * 2.0**-9 * expected.abs().max()
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@undivided
def test_gradcheck(name):
    layer = build(name)
    x = tokens(n=3).requires_grad_()
    assert gradients_are_right(layer, x, key_padding_mask=PADDING[:, 1:4])


CROSS = [wn.CrossAttention, wn.CosineCrossAttention, wn.BallCrossAttention]
across = pytest.mark.parametrize("kind", CROSS)


@across
def test_a_memory_is_read_without_its_padding_and_once(kind):
    layer = built(kind, D, H, memory_dim=5)
    x = tokens(n=3)
    memory = draw(2, 7, 5, seed=2)
    padding = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])
    out = layer(x, memory, key_padding_mask=padding)
    within(out[:1], layer(x[:1], memory[:1, :5]), 1e-12)
    made = []
    cache = SimpleNamespace(once=lambda make: made[0] if made else made.append(make()) or made[0])
    for read in (memory, torch.zeros_like(memory)):
        within(layer(x, read, key_padding_mask=padding, cache=cache), out, 1e-12)


@across
def test_a_memory_of_padding_alone_gives_the_bias(kind):
    layer = built(kind, D, H, bias=True)
    x = tokens(n=3).requires_grad_()
    out = layer(x, tokens(), key_padding_mask=torch.ones(2, N, dtype=torch.bool))
    within(out, layer.o_proj.bias.expand_as(out), 1e-12)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert gradient.isfinite().all()
