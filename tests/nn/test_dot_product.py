"""Dot-product attention against a float64 loop over heads, queries and keys."""

import math

import pytest
import torch
from torch.nn import functional as F

from wellposed.errors import ShapeError
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


class ListCache:
    def __init__(self):
        self.key = self.value = None

    def update(self, key, value):
        self.key = key if self.key is None else torch.cat((self.key, key), dim=-2)
        self.value = value if self.value is None else torch.cat((self.value, value), dim=-2)
        return self.key, self.value


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
    torch.testing.assert_close(
        output, slow_attention(module, x, padding, is_causal), rtol=0, atol=1e-12
    )


def test_a_padded_query_returns_its_own_value():
    module, x = make()
    output = module(x, key_padding_mask=PADDING)
    own = module.o_proj(module.v_proj(x))
    torch.testing.assert_close(output[PADDING], own[PADDING], rtol=0, atol=1e-13)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("steps", [[1] * TOKENS, [3, 2, 1], [4, 2]])
def test_a_cache_in_any_portions_changes_nothing(padding, steps):
    module, x = make(qk_norm=True)
    full = module(x, key_padding_mask=padding, is_causal=True)
    cache, parts, start = ListCache(), [], 0
    for size in steps:
        end = start + size
        seen = None if padding is None else padding[:, :end]
        parts.append(module(x[:, start:end], key_padding_mask=seen, is_causal=True, cache=cache))
        start = end
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=1e-13)


def test_no_gradient_reaches_later_tokens():
    module, x = make()
    x.requires_grad_()
    for i in range(TOKENS):
        (gradient,) = torch.autograd.grad(module(x, is_causal=True)[:, i].sum(), x)
        assert gradient[:, : i + 1].abs().amax(-1).min() > 0
        assert gradient[:, i + 1 :].abs().max() == 0 if i + 1 < TOKENS else True


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


@pytest.mark.parametrize("qk_norm", [False, True])
def test_bf16_autocast_is_close_and_keeps_one_dtype(qk_norm):
    module, x = make(torch.float32, qk_norm=qk_norm)
    exact = make(torch.float64, qk_norm=qk_norm)[0](x.double())
    cache = ListCache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(x, is_causal=False, key_padding_mask=None, cache=cache)
    assert cache.key.dtype == cache.value.dtype == torch.bfloat16
    # bf16 has a unit roundoff of 2^-8; projection, logits, sum and output projection each add a few
    # of them.
    assert (output.double() - exact).norm() <= 8 * 2**-8 * exact.norm()


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ShapeError, match=r"embed_dim=10 and num_heads=3.*divides the width"):
        DotProductAttention(10, 3)
