"""Dot-product attention over sqrt(d), and over d with rotated queries and keys, with the parts that
go with it."""

import math

import pytest
import torch
from tests.support.refusal import bad_config, bad_shape
from tests.support.tiny import options
from torch.nn import functional as F

from wellposed.certification import certify
from wellposed.models import WellposedConfig, WellposedForCausalLM
from wellposed.nn import (
    RESIDUALS,
    ConvexResidual,
    DotProductAttention,
    InverseDAttention,
    unit_gelu,
)
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


PARTS = options("attention=inverse_d residual=mean norm=none activation=unit_gelu position=none")


def test_without_a_position_code_the_order_of_tokens_is_still_seen():
    model = WellposedForCausalLM(
        WellposedConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, **PARTS)
    ).eval()
    ends = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in ([3, 4, 5], [4, 3, 5])]
    assert not torch.allclose(ends[0], ends[1], atol=1e-6)


def test_the_largest_slope_of_unit_gelu_is_one():
    x = torch.linspace(-6, 6, 20001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(unit_gelu(x).sum(), x)
    assert 1 - 1e-6 < float(slope.abs().max()) <= 1


def test_the_share_of_a_mean_is_one_over_the_residuals_and_is_not_learnt():
    residual = RESIDUALS.get("mean")(WellposedConfig(num_hidden_layers=3))
    assert isinstance(residual, ConvexResidual)
    assert residual.coefficients() == (pytest.approx(5 / 6), pytest.approx(1 / 6))
    assert not any(parameter.requires_grad for parameter in residual.parameters())


def test_heads_count_in_the_certificate_and_nothing_is_certified_without_a_ball():
    totals = []
    for heads in (1, 4):
        attention = InverseDAttention(16, heads).double()
        for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            torch.nn.init.eye_(part.weight)
        totals.append(certify(attention, seq_len=4, radius=4.0).total)
        assert certify(attention, seq_len=4).total == math.inf
    assert totals[0] == pytest.approx(1, rel=1e-4)
    assert totals[1] > 1 + 1 / 3


@pytest.mark.parametrize("lacking", [{"attention_dropout": 0.1}, {"qk_norm": True}])
def test_what_it_lacks_is_refused(lacking):
    with bad_config(match="attention 'inverse_d' with"):
        WellposedForCausalLM(
            WellposedConfig(hidden_size=8, num_attention_heads=2, **PARTS, **lacking)
        )


def test_heads_of_odd_width_are_refused():
    with bad_shape(match="heads of width 3; expected an even width"):
        InverseDAttention(6, 2)
