"""Attention of known forms and hostile weights, attacked: no slope is above its bound."""

import math

import pytest
import torch

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.nn import (
    BallAttention,
    CosineSelfAttention,
    DotProductAttention,
    InverseDAttention,
    L2SelfAttention,
)

WIDTH = 8
HEADS = 2
TOKENS = 4
FORMS = {
    "dot product": (DotProductAttention, {}, 1.5),
    "over d": (InverseDAttention, {}, 1.5),
    "normalised keys": (DotProductAttention, {"qk_norm": True, "eps": 0.1}, 1.5),
    "ball": (BallAttention, {"bias": True}, None),
    "cosine": (CosineSelfAttention, {"tau": 3.0}, None),
    "L2, tied": (L2SelfAttention, {}, None),
    "L2, contractive": (L2SelfAttention, {"contractive": 0.9, "max_tokens": TOKENS}, None),
}


def rank_one(module):
    for weight in matrices(module):
        weight.copy_(torch.outer(weight[:, 0], weight[0]))


def rows_of_zero(module):
    for weight in matrices(module):
        weight[::2] = 0.0


def one_head_alone(module):
    """The first head reads a million times as much as the second, which writes the rest."""
    for name in ("q_proj", "v_proj"):
        getattr(module, name).weight[: WIDTH // HEADS].mul_(1e3)
    module.o_proj.weight[:, WIDTH // HEADS :].mul_(1e3)


def sized(size):
    def scale(module):
        for weight in matrices(module):
            weight.mul_(size)

    return scale


def aligned(module):
    """Queries, keys, values and outputs have one direction in common."""
    for weight in matrices(module):
        weight.add_(3.0 / WIDTH)


def matrices(module):
    return [weight for weight in module.parameters() if weight.ndim == 2]


HOSTILE = {
    "plain": lambda module: None,
    "rank one": rank_one,
    "rows of zero": rows_of_zero,
    "one head": one_head_alone,
    "aligned": aligned,
    "tiny": sized(1e-6),
    "huge": sized(1e6),
}


def starts(seed, count=12):
    """Tokens of many lengths: some near zero, some in opposite pairs, as steep inputs have."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    powers = torch.rand(count, TOKENS, 1, generator=generator, dtype=torch.float64) * 4 - 2
    x = drawn / math.sqrt(WIDTH) * 10**powers
    x[::2, 0] *= 1e-3
    x[::3, 2:] = -x[::3, :-2]
    return x


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("form", FORMS)
def test_no_attention_is_steeper_than_its_bound(form, hostile):
    kind, options, radius = FORMS[form]
    torch.manual_seed(sum(map(ord, form + hostile)))
    module = kind(WIDTH, HEADS, **options).double().eval()
    with torch.no_grad():
        HOSTILE[hostile](module)
    size = max(float(weight.detach().abs().max()) for weight in matrices(module))
    first = starts(len(hostile)) * (1.0 if radius else min(1.0, 1 / size))
    for norm in ("tok", 2):
        certificate = certify(module, seq_len=TOKENS, norm=norm, radius=radius, cross_check=False)
        attack = lipschitz_lower_bound(
            module, (TOKENS, WIDTH), norm=norm, start=first, restarts=len(first), steps=12,
            radius=radius,
        )  # fmt: skip
        assert 0 <= attack.ratio(certificate) <= 1 + 1e-9, norm


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_long_attack_comes_near_the_bound(form):
    """Looseness of random weights, with starts that steep inputs resemble."""
    kind, options, radius = FORMS[form]
    torch.manual_seed(0)
    module = kind(WIDTH, HEADS, **options).double().eval()
    certificate = certify(module, seq_len=TOKENS, radius=radius, cross_check=False)
    attack = lipschitz_lower_bound(
        module, (TOKENS, WIDTH), start=starts(1, 48), restarts=48, steps=300, learning_rate=0.03,
        radius=radius,
    )  # fmt: skip
    most = {"normalised keys": 30.0, "over d": 6.0}.get(form, 4.0)
    assert 1 <= 1 / attack.ratio(certificate) < most


def test_one_head_of_dot_products_reaches_its_bound():
    """Two points +-R, far from the query's own token: sqrt(1 + a^2) + a is nearly attained."""
    torch.manual_seed(0)
    for logit in (0.3, 1.0):
        module = DotProductAttention(2, 1, bias=False).double().eval()
        with torch.no_grad():
            for part in (module.k_proj, module.v_proj, module.o_proj):
                part.weight.copy_(torch.eye(2))
            module.q_proj.weight.copy_(logit * math.sqrt(2) * torch.eye(2))
        bound = math.hypot(1, logit) + logit
        total = certify(module, seq_len=5, radius=1.0, cross_check=False).total
        assert total == pytest.approx(bound, rel=1e-5)
        attack = lipschitz_lower_bound(
            module, (5, 2), restarts=48, steps=150, radius=1.0, scales=(0.1, 2.0)
        )
        assert 0.8 < attack.ratio(certify(module, seq_len=5, radius=1.0)) <= 1
