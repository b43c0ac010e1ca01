"""Every attention against explicit float64 sums, head by head, from the stored weights alone."""

import math

import pytest
import torch
from tests.support.close import within
from tests.support.layers import allowed_by_loop, built, draw

from wellposed import nn as wn

D = 8
H = 2
N = 6
PADDING = torch.tensor([[False] * 4 + [True] * 2, [True] * 2 + [False] * 4])


def normed(tokens, weight):
    """LayerNorm without a bias."""
    apart = tokens - tokens.mean(-1, keepdim=True)
    return apart / (apart.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def scaled(tokens, eps):
    return tokens / (tokens.square().sum(-1, keepdim=True) + eps).sqrt()


def inside(tokens):
    """Each token, or the nearest point of the unit ball."""
    rows = [row / max(1.0, float(row.norm())) for row in tokens.reshape(-1, tokens.shape[-1])]
    return torch.stack(rows).reshape(tokens.shape)


def dot_product(layer, state, h, q, k, v):
    if layer.q_norm is not None:
        q = normed(q, state["q_norm.weight"])
        k = normed(k, state["k_norm.weight"])
    return q @ k.mT / math.sqrt(layer.head_dim), v


def cosine(layer, state, h, q, k, v):
    q, k, v = (scaled(part, layer.eps) for part in (q, k, v))
    return state["log_tau"][h].exp() * q @ k.mT, state["nu"][h] * v


def ball(layer, state, h, q, k, v):
    shares = state["mix_logit"].exp() / state["mix_logit"].exp().sum()
    t = layer.max_temperature / (1 + (-state["temperature_logit"]).exp())
    divisor = float((shares * (1 + 2 * t)).sum()) if layer.unit_lipschitz else 1.0
    return t[h] * q @ k.mT, shares[h] / divisor * v


def turned(tokens):
    """Each pair (entry i, entry i + d/2) of token p as a complex number, turned by p 10000^(-2i/d)."""
    n = tokens.shape[-2]
    half = tokens.shape[-1] // 2
    angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    pairs = torch.complex(tokens[..., :half], tokens[..., half:])
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def inverse_d(layer, state, h, q, k, v):
    return turned(q) @ turned(k).mT / layer.head_dim, v / 3


def l2(layer, state, h, q, k, v):
    apart = q[..., :, None, :] - k[..., None, :, :]
    logits = -apart.square().sum(-1) / math.sqrt(layer.head_dim)
    if not layer.tied:
        return logits, v
    w, wv = (state[f"{name}.weight"].chunk(layer.num_heads)[h].T for name in ("q_proj", "v_proj"))
    bias = state.get("v_proj.bias", torch.zeros(layer.embed_dim)).chunk(layer.num_heads)[h]
    return logits, k @ (w.T @ wv) / math.sqrt(layer.head_dim) + bias


FORMULAS = {
    wn.DotProductAttention: dot_product, wn.CrossAttention: dot_product, wn.L2SelfAttention: l2,
    wn.CosineSelfAttention: cosine, wn.CosineCrossAttention: cosine,
    wn.BallAttention: ball, wn.BallCrossAttention: ball, wn.InverseDAttention: inverse_d,
}  # fmt: skip


def reference(layer, x, memory, allowed):
    """`allowed`: bool, broadcasts to (batch, queries, keys)."""
    state = {name: weight.detach().double() for name, weight in layer.state_dict().items()}
    formula = FORMULAS[type(layer)]
    if formula is ball:
        x = inside(x)
        memory = inside(memory)

    def heads_of(name, tokens):
        if f"{name}.weight" not in state:  # a tied layer has no keys
            return heads_of("q_proj", tokens)
        full = tokens @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)
        return full.chunk(layer.num_heads, -1)

    parts = heads_of("q_proj", x), heads_of("k_proj", memory), heads_of("v_proj", memory)
    heads = []
    for h, qkv in enumerate(zip(*parts, strict=True)):
        logits, value = formula(layer, state, h, *qkv)
        heads.append(logits.masked_fill(~allowed, -math.inf).softmax(-1) @ value)
    if formula is ball:
        outputs = state["o_proj.weight"].chunk(layer.num_heads, 1)
        joined = sum(head @ output.T for head, output in zip(heads, outputs, strict=True))
    else:
        joined = torch.cat(heads, -1) @ state["o_proj.weight"].T
    return joined + state.get("o_proj.bias", 0)


SELF = [
    (wn.InverseDAttention, {}),
    (wn.DotProductAttention, {}),
    (wn.DotProductAttention, dict(qk_norm=True)),
    (wn.DotProductAttention, dict(bias=False)),
    (wn.CosineSelfAttention, {}),
    (wn.CosineSelfAttention, dict(eps=1.0)),
    (wn.CosineSelfAttention, dict(tau=0.5, nu=2.0)),
    (wn.CosineSelfAttention, dict(bias=False)),
    (wn.BallAttention, dict(temperature=0.5)),
    (wn.BallAttention, dict(max_temperature=3.0)),
    (wn.BallAttention, dict(unit_lipschitz=False)),
    (wn.BallAttention, dict(bias=True)),
    (wn.L2SelfAttention, {}),
    (wn.L2SelfAttention, dict(tied=False)),
    (wn.L2SelfAttention, dict(query_width=2)),
    (wn.L2SelfAttention, dict(bias=False)),
    (wn.L2SelfAttention, dict(query_width=2, tied=False)),
]


@pytest.mark.parametrize(("kind", "settings"), SELF)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_self_attentions_are_their_formulas(kind, settings, heads, size):
    layer = built(kind, D, heads, **settings)
    x = draw(2, N, D, size=size)
    nobody = torch.zeros(2, N, dtype=torch.bool)
    visible = (torch.rand(1, 1, N, N) < 0.5) | torch.eye(N).bool()
    by_hand = wn.AttentionMask(visible, False)
    tolerance = 1e-11 * max(1.0, size)
    within(layer(x, key_padding_mask=by_hand), reference(layer, x, x, visible[0]), tolerance)
    for is_causal in (False, True):
        for padding in (nobody, PADDING):
            allowed = [allowed_by_loop(row, is_causal, N, N) for row in padding.tolist()]
            expected = reference(layer, x, x, torch.stack(allowed))
            mask = None if padding is nobody else padding
            output = layer(x, key_padding_mask=mask, is_causal=is_causal)
            within(output, expected, tolerance)


CROSS = {
    wn.CrossAttention: [{}, dict(qk_norm=True)],
    wn.CosineCrossAttention: [{}, dict(eps=1.0)],
    wn.BallCrossAttention: [{}, dict(unit_lipschitz=False), dict(bias=True)],
}


@pytest.mark.parametrize(("kind", "settings"), [(k, g) for k, gs in CROSS.items() for g in gs])
@pytest.mark.parametrize("memory_dim", [None, 5])
def test_cross_attentions_are_their_formulas(kind, settings, memory_dim):
    layer = built(kind, D, H, memory_dim=memory_dim, **settings)
    x = draw(2, 4, D)
    memory = draw(2, 7, memory_dim or D, seed=2)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    expected = reference(layer, x, memory, ~padding[:, None, :])
    within(layer(x, memory, key_padding_mask=padding), expected, 1e-11)


CHANGES = [
    (wn.DotProductAttention, {}, dict(qk_norm=True)),
    (wn.DotProductAttention, {}, dict(dropout=0.5)),
    (wn.DotProductAttention, {}, dict(bias=False)),
    (wn.DotProductAttention, dict(qk_norm=True), dict(eps=0.5)),
    (wn.CosineSelfAttention, {}, dict(eps=1.0)),
    (wn.CosineSelfAttention, {}, dict(tau=0.5)),
    (wn.CosineSelfAttention, {}, dict(nu=2.0)),
    (wn.CosineSelfAttention, {}, dict(dropout=0.3)),
    (wn.CosineSelfAttention, {}, dict(bias=False)),
    *(
        (kind, {}, change)
        for kind in (wn.BallAttention, wn.BallCrossAttention)
        for change in (dict(temperature=1.0), dict(unit_lipschitz=False), dict(bias=True))
    ),
    (wn.L2SelfAttention, {}, dict(tied=False)),
    (wn.L2SelfAttention, {}, dict(query_width=2)),
    (wn.L2SelfAttention, {}, dict(bias=False)),
    (wn.L2SelfAttention, {}, dict(contractive=0.5)),
    (wn.L2SelfAttention, {}, dict(dropout=0.4)),
    (wn.L2SelfAttention, {}, dict(init_scale=0.1)),
    (wn.L2SelfAttention, dict(contractive=0.5), dict(norm="inf")),
    (wn.L2SelfAttention, dict(contractive=0.5), dict(norm=2)),
    (wn.L2SelfAttention, dict(contractive=0.5), dict(max_tokens=40)),
]


@pytest.mark.parametrize(("kind", "base", "change"), CHANGES)
def test_every_option_changes_something(kind, base, change):
    outputs = []
    for settings in (base, base | change):
        torch.manual_seed(0)
        layer = kind(D, H, **settings)
        for name, bias in layer.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.constant_(bias, 0.5)
        x = draw(2, N, D).float()
        outputs.append(layer(x, x) if kind is wn.BallCrossAttention else layer(x))
    assert not torch.allclose(outputs[0], outputs[1], rtol=1e-3)
