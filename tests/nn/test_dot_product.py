"""Dot-product attention: bounded logits, and the masks that its kernel gets."""

import math

import torch
from torch.nn import functional as F

from wellposed.nn import DotProductAttention
from wellposed.nn.attention.heads import split_heads

BATCH, TOKENS, WIDTH, HEADS = 2, 6, 12, 3


def make(dtype=torch.float64, **kwargs):
    """The same module and input in every dtype, up to its rounding."""
    torch.manual_seed(0)
    module = DotProductAttention(WIDTH, HEADS, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.to(dtype), torch.randn(BATCH, TOKENS, WIDTH).to(dtype)


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
