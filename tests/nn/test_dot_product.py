"""Dot-product attention against a float64 loop over heads, queries and keys."""

import math

import pytest
import torch
from tests.support.close import within
from torch.nn import functional as F

from wellposed.nn import DotProductAttention
from wellposed.nn.attention.heads import split_heads

BATCH, TOKENS, WIDTH, HEADS = 2, 6, 12, 3


def slow_attention(module, x, padding=None, is_causal=False):
    """`softmax(q k^T / sqrt(d)) v` by loops; a padded query sees itself alone."""
    d = WIDTH // HEADS
    output = torch.zeros_like(x)
    for b in range(x.shape[0]):
        joined = torch.zeros(x.shape[1], WIDTH, dtype=x.dtype)
        for h in range(HEADS):
            rows = slice(h * d, (h + 1) * d)
            q, k, v = (
                x[b] @ getattr(module, name).weight[rows].T + getattr(module, name).bias[rows]
                for name in ("q_proj", "k_proj", "v_proj")
            )
            if module.q_norm is not None:
                q = (q - q.mean(-1, keepdim=True)) / (
                    q.var(-1, correction=0, keepdim=True) + 1e-5
                ).sqrt()
                k = (k - k.mean(-1, keepdim=True)) / (
                    k.var(-1, correction=0, keepdim=True) + 1e-5
                ).sqrt()
                q, k = q * module.q_norm.weight, k * module.k_norm.weight
            for i in range(x.shape[1]):
                if padding is not None and padding[b, i]:
                    seen = [i]
                else:
                    seen = [
                        j
                        for j in range(x.shape[1])
                        if (not is_causal or j <= i) and (padding is None or not padding[b, j])
                    ]
                weights = torch.stack([q[i] @ k[j] / math.sqrt(d) for j in seen]).exp()
                joined[i, rows] = sum(
                    w * v[j] for w, j in zip(weights / weights.sum(), seen, strict=True)
                )
        output[b] = joined @ module.o_proj.weight.T + module.o_proj.bias
    return output


def make(dtype=torch.float64, **kwargs):
    """The same module and input in every dtype, up to its rounding."""
    torch.manual_seed(0)
    module = DotProductAttention(WIDTH, HEADS, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.to(dtype), torch.randn(BATCH, TOKENS, WIDTH).to(dtype)


PADDING = torch.tensor(
    [[False, False, False, False, True, True], [True, True, False, False, False, False]]
)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING])
def test_it_equals_the_loop(qk_norm, is_causal, padding):
    module, x = make(qk_norm=qk_norm)
    output = module(x, key_padding_mask=padding, is_causal=is_causal)
    # Sums of at most 12 float64 products of size one, four deep: 1e-12 is a thousand roundings.
    within(output, slow_attention(module, x, padding, is_causal), 1e-12)


def test_a_padded_query_returns_its_own_value():
    module, x = make()
    output = module(x, key_padding_mask=PADDING)
    own = module.o_proj(module.v_proj(x))
    within(output[PADDING], own[PADDING], 1e-13)


def test_qk_norm_bounds_every_logit():
    module, x = make(qk_norm=True)
    with torch.no_grad():
        module.q_norm.weight.fill_(1.0)
        module.k_norm.weight.fill_(1.0)
    heads = split_heads(1e3 * x, module.num_heads)
    query, key = module.q_norm(heads), module.k_norm(-heads)
    logits = query @ key.transpose(-1, -2) / math.sqrt(module.head_dim)
    assert logits.abs().max() <= math.sqrt(module.head_dim) * (1 + 1e-12)


def test_no_mask_reaches_the_kernel_without_padding(monkeypatch):
    seen = []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: (seen.append(k), original(*a, **k))[1]
    )
    module, x = make()
    module(x, is_causal=True)
    module(x)
    assert [(k["attn_mask"], k["is_causal"]) for k in seen] == [(None, True), (None, False)]


def test_every_argument_changes_something():
    plain, x = make()
    base = plain(x)
    assert make(qk_norm=True)[0](x).sub(base).abs().max() > 1e-3
    assert make(qk_norm=True)[0](x).sub(make(qk_norm=True, eps=0.5)[0](x)).abs().max() > 1e-3
    assert DotProductAttention(WIDTH, HEADS, bias=False).o_proj.bias is None
    dropped, _ = make(dropout=0.5)
    assert dropped(x).sub(base).abs().max() > 1e-3
    assert torch.equal(dropped.eval()(x), base)
