"""The Lipschitz claims of L2 attention, attacked; and the forms that are refused, each shown to
have no bound."""

import math

import pytest
import torch
from tests.support.jacobians import OPERATOR_NORMS
from torch.autograd.functional import jacobian
from torch.testing import assert_close

from wellposed.errors import ConfigError, NotContractiveError, NotLipschitzError, ShapeError
from wellposed.functional import l2_attention
from wellposed.linalg import l2_constants
from wellposed.nn import AttentionMask, L2SelfAttention, l2_attention_refusal
from wellposed.nn.attention import split_heads

NORMS = ("tok", "inf", 2)


def random_layer(seed, width=4, heads=2, **options):
    torch.manual_seed(seed)
    layer = L2SelfAttention(width, heads, **options).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            size = 10 ** float(torch.empty(()).uniform_(-2, 2, generator=generator))
            entries = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(size * entries)
    return layer, generator


def attacked_input(layer, n, generator):
    """Tokens whose squared scaled distances are of order one, so that the softmax is neither flat nor
    one-hot."""
    x = torch.randn(n, layer.embed_dim, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        z = split_heads(layer.q_proj(x)[None], layer.num_heads)
        spread = (z - z.mean(-2, keepdim=True)).square().sum(-1).mean() / math.sqrt(layer.head_dim)
    return x * float(torch.empty(()).uniform_(0.3, 3, generator=generator)) / spread.sqrt()


def masks(n, generator):
    padding = torch.rand(1, n, generator=generator) > 0.6
    visible = (torch.rand(1, 1, n, n, generator=generator) > 0.5) | torch.eye(n, dtype=torch.bool)
    return [
        {},
        {"is_causal": True},
        {"key_padding_mask": padding},
        {"key_padding_mask": padding, "is_causal": True},
        {"key_padding_mask": AttentionMask(visible, False)},
    ]


FORMS = [{}, {"query_width": 2}, {"contractive": 0.9, "max_tokens": 6}]


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_no_random_jacobian_exceeds_the_bound(options, heads):
    for seed in range(3):
        layer, generator = random_layer(seed, heads=heads, **options)
        n = 3 + seed
        x = attacked_input(layer, n, generator)
        # Random masks that keep the diagonal are drawn too, so norm 2 needs the bound for any mask.
        bounds = {norm: layer.lipschitz_bound(n, norm=norm, mask="any") for norm in NORMS}
        for mask in masks(n, generator):
            matrix = jacobian(lambda x: layer(x[None], **mask), x)  # noqa: B023
            for norm in NORMS:
                assert OPERATOR_NORMS[norm](matrix) <= bounds[norm] * (1 + 1e-9)


def star(n):
    """Every token sees itself and the first: two keys a row, n queries on one key."""
    mask = torch.eye(n, dtype=torch.bool)
    mask[:, 0] = True
    return AttentionMask(mask[None, None], False)


@pytest.mark.parametrize("max_tokens", [None, 64])
def test_a_hub_that_all_tokens_see_does_not_break_a_contraction_in_norm_2(max_tokens):
    options = {"contractive": 0.9, "norm": 2, "max_tokens": max_tokens, "bias": False}
    layer = L2SelfAttention(1, 1, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    x = torch.zeros(1, 64, 1, dtype=torch.float64)
    function = lambda x: layer(x, key_padding_mask=star(64))  # noqa: E731
    matrix = jacobian(function, x).reshape(64, 64)
    largest = float(torch.linalg.matrix_norm(matrix, 2))
    # With all tokens equal the Jacobian is the scaled P, whose norm grows as sqrt(N) / 2: above 4
    # here.
    assert largest <= 0.9
    assert largest > 0.9 * 4 / l2_constants(64).bracket(2) * 0.99


def test_the_scale_under_a_finished_mask_is_the_one_for_what_is_known_of_it():
    layer = L2SelfAttention(4, 2, contractive=0.9, norm=2, max_tokens=64, bias=False)
    x = torch.randn(1, 64, 4)
    every = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    described = layer(x, key_padding_mask=AttentionMask(every, False, "full"))
    undescribed = layer(x, key_padding_mask=AttentionMask(every, False))
    assert_close(described, layer(x))
    ratio = l2_constants(64, mask="full").bracket(2) / l2_constants(64).bracket(2)
    assert_close(undescribed, ratio * described, rtol=1e-4, atol=0)


def test_the_bound_carries_gradient_in_training():
    layer = L2SelfAttention(4, 2, contractive=0.9, max_tokens=8).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def scaled(size):
        changed = {"o_proj.weight": parameters["o_proj.weight"] * size}
        return torch.func.functional_call(layer, {**parameters, **changed}, (x,))

    # The division undoes any rescaling of W_O, so that direction has zero derivative: only true
    # with the gradient.
    size = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(scaled(size).square().sum(), size)
    assert abs(float(derivative)) < 1e-9
    assert_close(scaled(torch.tensor(7.0).double()), scaled(size), rtol=1e-7, atol=1e-9)


def test_zero_weights_stay_zero_and_finite():
    layer = L2SelfAttention(4, 2, contractive=0.9, max_tokens=8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    x = torch.randn(1, 3, 4, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert L2SelfAttention(4, 2).double().lipschitz_bound(1) > 0


@pytest.mark.parametrize("constant", [0.0, 1.0, -0.5, 1.5])
def test_contractive_must_be_inside_the_unit_interval(constant):
    with pytest.raises(NotContractiveError, match="contractive is"):
        L2SelfAttention(4, 2, contractive=constant)


def test_sequences_above_the_certified_length():
    layer = L2SelfAttention(4, 2, contractive=0.9, max_tokens=3)
    with pytest.raises(ShapeError, match="4 tokens; the certificate covers at most max_tokens=3"):
        layer(torch.randn(1, 4, 4))
    with pytest.raises(ShapeError, match="max_tokens=3"):
        layer.lipschitz_bound(4)
    padding = torch.tensor([[False, False, False, True]])
    assert layer(torch.randn(1, 4, 4), key_padding_mask=padding).isfinite().all()


def test_options_that_leave_no_certificate():
    for options in ({"tied": False}, {"dropout": 0.1}):
        with pytest.raises(NotLipschitzError, match=":"):
            L2SelfAttention(4, 2, contractive=0.9, **options)
        layer = L2SelfAttention(4, 2, **options)
        assert layer.certificate_refusal()
        with pytest.raises(NotLipschitzError, match=":"):
            layer.lipschitz_bound(4)
    dropped = L2SelfAttention(4, 2, dropout=0.1).eval()
    assert dropped.certificate_refusal() is None
    assert dropped.lipschitz_bound(4) > 0
    hollow = AttentionMask(~torch.eye(3, dtype=torch.bool)[None, None], False)
    with pytest.raises(NotLipschitzError, match="diagonal"):
        L2SelfAttention(4, 2, contractive=0.9)(torch.randn(1, 3, 4), key_padding_mask=hollow)


def test_a_cache_or_another_norm_needs_one_fixed_scale():
    layer = L2SelfAttention(4, 2, contractive=0.9)
    with pytest.raises(ConfigError, match="max_tokens"):
        layer.lipschitz_bound(4, norm=2)
    with pytest.raises(ConfigError, match="max_tokens"):
        layer(torch.randn(1, 1, 4), is_causal=True, cache=object())


# Theory note B4: slopes of the refused forms at M = 1, 10, 100, each an explicit function of its
# tokens.


def slope(function, x):
    return float(torch.linalg.matrix_norm(jacobian(function, x).reshape(-1, x.numel()), 2))


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def without_diagonal(size):
    mask = ~torch.eye(3, dtype=torch.bool)
    return slope(lambda x: l2_attention(x, x, x, attn_mask=mask), column(0, size, -size))


def across_sequences(size):
    memory = column(size, -size)
    return slope(lambda x: l2_attention(x, memory, memory), column(0))


def untied(size):
    return slope(lambda x: l2_attention(x, x / 2, x), column(4 * size, 6 * size, 10 * size))


def plain_values(size):
    x = torch.tensor([[0.5, size], [-0.5, -size]], dtype=torch.float64)
    return slope(lambda x: l2_attention(x[:, :1], x[:, :1], x), x)


def rotated(x, turns=1):
    """Rotate token i by i radians, as rotary positions do."""
    angle = turns * torch.arange(len(x), dtype=x.dtype)
    entries = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1)
    return torch.einsum("nij,nj->ni", entries.reshape(-1, 2, 2), x)


def rotary_tokens(size):
    """Two tokens whose rotated forms are one apart, at distance `size` from the origin."""
    return rotated(torch.tensor([[size, 0.0], [size, 1.0]], dtype=torch.float64), -1)


def rotary_without_values(size):
    return slope(lambda x: l2_attention(rotated(x), rotated(x), x), rotary_tokens(size))


def rotary_with_values(size):
    return slope(lambda x: rotated(l2_attention(*[rotated(x)] * 3), -1), rotary_tokens(size))


def weight_dropout(size):
    def dropped(x):
        torch.manual_seed(3)  # one fixed draw, which keeps some weights and drops others
        return l2_attention(x, x, x, dropout_p=0.5)

    return slope(dropped, column(size, size + 1, size - 1))


def null_keys(size):
    fixed = column(size, -size)
    return slope(lambda x: l2_attention(x, *[torch.cat([x, fixed])] * 2), column(0, size / 2))


def memory_with_self(size):
    def attend(x):
        keys = torch.cat([x[:1], x[1:]])
        return l2_attention(x[:1], keys, keys)

    return slope(attend, column(0, size, -size))


REFUSED = [
    (without_diagonal, {"keeps_itself": False}),
    (across_sequences, {"other_sequence_only": True}),
    (untied, {"tied": False}),
    (plain_values, {"plain_values": True}),
    (rotary_without_values, {"rotary_without_values": True}),
    (weight_dropout, {"drops_weights": True}),
]


@pytest.mark.parametrize(("form", "named"), REFUSED)
def test_refused_forms_have_growing_slopes(form, named):
    slopes = [form(size) for size in (1.0, 10.0, 100.0)]
    assert slopes[1] > 4 * slopes[0]
    assert slopes[2] > 4 * slopes[1]
    assert slopes[2] > 30
    reason = l2_attention_refusal(**named)
    assert reason
    assert len(reason) > 40


@pytest.mark.parametrize("form", [rotary_with_values, null_keys, memory_with_self])
def test_covered_forms_stay_bounded(form):
    assert max(form(size) for size in (1.0, 10.0, 100.0)) < 4


def test_all_reasons_are_given_together():
    reason = l2_attention_refusal(tied=False, plain_values=True, drops_weights=True)
    assert reason.count(";") >= 4
