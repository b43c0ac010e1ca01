"""Bounds of attention with known norms: each head reads and writes two coordinates."""

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from tests.support.certificates import rows as parts_of
from torch import nn

from wellposed.certification import (
    AttentionWeights,
    certify,
    cosine_attention_bound,
    dot_product_ball_bound,
)
from wellposed.errors import ConfigError
from wellposed.nn import BallAttention, CosineSelfAttention, DotProductAttention

D = 4
HEADS = 2
HEAD_DIM = 2
N = 3
R = 0.7
# Singular values of head 0 and of head 1; the smaller one of each head is half of it.
Q = (2.0, 0.5)
K = (1.5, 3.0)
V = (0.6, 2.5)
OUT = (1.2, 0.4)
# Biases of queries (the first coordinate of each head), of values and of the output.
BQ = (0.3, 0.8)
BV = (0.2, 0.1)
BO = 0.05
ROOT = math.sqrt(HEAD_DIM)


def by_heads(sizes):
    """A diagonal weight: head h scales its own two coordinates by its size and by half of it."""
    entries = [part for size in sizes for part in (size, size / 2)]
    return torch.diag(torch.tensor(entries, dtype=torch.float64))


def fill(module):
    with torch.no_grad():
        projections = (module.q_proj, module.k_proj, module.v_proj, module.o_proj)
        for projection, sizes in zip(projections, (Q, K, V, OUT), strict=True):
            projection.weight.copy_(by_heads(sizes))
        module.q_proj.bias.copy_(torch.tensor([BQ[0], 0.0, BQ[1], 0.0]))
        module.k_proj.bias.copy_(torch.tensor([5.0, 0.0, 0.0, 7.0]))  # cancels in the softmax
        module.v_proj.bias.copy_(torch.tensor([BV[0], 0.0, BV[1], 0.0]))
        module.o_proj.bias.copy_(torch.tensor([BO, 0.0, 0.0, 0.0]))
    return module


def attention(**options):
    return fill(DotProductAttention(D, HEADS, **options).double().eval())


def joined(per_head, out=OUT):
    """Join heads with these constants per unit of |V_h W_O,h|: they write to orthogonal outputs."""
    return math.hypot(*(v * o * constant for v, o, constant in zip(V, out, per_head, strict=True)))


def with_queries(averages, query):
    """Add what a move of one query does, which every head reads: head by head, or all at once."""
    apart = joined([a + b for a, b in zip(averages, query, strict=True)])
    steepest = max(v * o * term for v, o, term in zip(V, OUT, query, strict=True))
    return min(apart, joined(averages) + steepest)


def mass(mask, spread, tokens=N):
    """Return the root of the bound of column sums: n_i keys share a row, logits differ by at most 2
    spread."""
    keys = {"full": [tokens] * tokens, "causal": range(1, tokens + 1), "any": [1] * tokens}[mask]
    return math.sqrt(min(tokens, sum(1 / (1 + (n - 1) * math.exp(-2 * spread)) for n in keys)))


def terms(radius):
    """Return the terms of queries and keys for each head: a R^2, and a R^2 + beta R."""
    query = [q * k / ROOT * radius**2 for q, k in zip(Q, K, strict=True)]
    return query, [size + k * b / ROOT * radius for size, k, b in zip(query, K, BQ, strict=True)]


def norm_two(query, key, masses, sizes_q, sizes_k, radius, tokens):
    """Return the smaller bound, head by head or of all heads at once, on the ball."""
    key_masses = [min(value, math.sqrt(tokens / 2)) for value in masses]
    averages = [
        min(m + c * b, m * math.hypot(1, b))
        for m, c, b in zip(masses, key_masses, key, strict=True)
    ]
    keys = max(v * size for v, size in zip(V, sizes_k, strict=True))
    queries = max(v * size for v, size in zip(V, sizes_q, strict=True))
    of_both = keys * max(Q) + max(key_masses) * queries * max(K)
    return min(
        with_queries(averages, query), max(OUT) * (max(masses) * max(V) + radius / ROOT * of_both)
    )


@pytest.mark.parametrize("radius", [R, 0.1])
def test_dot_product_attention_in_norms_of_tokens(radius):
    query, key = terms(radius)
    expected = with_queries([math.hypot(1, b) for b in key], query)
    assert certify(attention(), seq_len=N, radius=radius).total == pytest.approx(expected, rel=1e-5)
    by_entry = certify(attention(), seq_len=N, radius=radius, norm="inf").total
    assert by_entry == pytest.approx(expected * math.sqrt(D), rel=1e-5)


@pytest.mark.parametrize("mask", ["full", "causal", "any"])
@pytest.mark.parametrize("radius", [0.7, 0.2, 0.05])
@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_dot_product_attention_in_norm_two(mask, radius, tokens):
    query, key = terms(radius)
    # The logits of a row differ by twice |q| |k|: a R^2 + beta R.
    masses = [mass(mask, spread, tokens) for spread in key]
    sizes_q = [q * radius + b for q, b in zip(Q, BQ, strict=True)]
    in_two = norm_two(query, key, masses, sizes_q, [k * radius for k in K], radius, tokens)
    by_token = math.sqrt(tokens) * with_queries([math.hypot(1, b) for b in key], query)
    expected = min(in_two, by_token)
    certificate = certify(attention(), seq_len=tokens, radius=radius, norm=2, mask=mask)
    assert certificate.total == pytest.approx(expected, rel=1e-5)


def test_what_comes_out_of_a_ball():
    """Averages of values: |x V W_O| <= sqrt(sum (v o)^2) R, plus their constant part."""
    constant = math.hypot(BV[0] * OUT[0] + BO, BV[1] * OUT[1])
    spread = joined([1, 1])
    model = nn.Sequential(attention(), nn.Linear(D, D).double())
    for norm in ("tok", 2, "inf"):
        after = parts_of(model, N, radius=R, norm=norm)["1"]
        assert after.radius == pytest.approx(spread * R + constant, rel=1e-5)


def test_head_norms_bound_queries_and_keys_whatever_comes_in():
    """s = sqrt d max|gamma| is the size of queries and keys, l = |W| max|gamma| / sqrt eps their
    slope."""
    module = attention(qk_norm=True, eps=0.04)
    gain_q = 1.5
    gain_k = 0.5
    with torch.no_grad():
        module.q_norm.weight.copy_(torch.tensor([-gain_q, 1.0]))
        module.k_norm.weight.copy_(torch.tensor([0.25, gain_k]))
    size_q = gain_q * ROOT
    size_k = gain_k * ROOT
    query = [R / ROOT * size_k * q * gain_q / 0.2 for q in Q]
    key = [R / ROOT * size_q * k * gain_k / 0.2 for k in K]
    expected = joined([1 + a + b for a, b in zip(query, key, strict=True)])
    assert certify(module, seq_len=N, radius=R).total == pytest.approx(expected, rel=1e-5)
    for mask in ("full", "causal", "any"):
        row_mass = mass(mask, size_q * size_k / ROOT, 12)
        keys = [min(row_mass, math.sqrt(6)) * b for b in key]
        in_two = joined([row_mass + a + b for a, b in zip(query, keys, strict=True)])
        total = certify(module, seq_len=12, radius=R, norm=2, mask=mask).total
        assert total == pytest.approx(min(in_two, math.sqrt(12) * expected), rel=1e-5)


def test_values_and_outputs_that_cancel_are_no_constant():
    """W_V W_O of 1.2e-17 was once bounded by 0, which gives an infinite radius."""
    none = torch.zeros(1, 1, 2, dtype=torch.float64)
    for a, b, c in (1 + 1e-10 * torch.rand(20, 3, dtype=torch.float64)).tolist():
        d = -a * b / c
        value = none.new_tensor([[[a, c]]])
        output = none.new_tensor([[[b], [d]]])
        weights = AttentionWeights(none, none, value, output, *[none[0]] * 3, none[0, 0, :1])
        exact = abs(Fraction(a) * Fraction(b) + Fraction(c) * Fraction(d))
        bound = dot_product_ball_bound(weights, radius=1.0, seq_len=2).value
        assert exact <= Fraction(float(bound)) < 1e-12


BY_ONE = partial(nn.MultiheadAttention, batch_first=True)


@pytest.mark.parametrize(("kind", "factor"), [(CosineSelfAttention, 1), (BallAttention, 4)])
def test_the_scales_of_one_head_serve_all_that_the_call_cuts(kind, factor):
    """Each of four heads then has the scale of the single head, four times its usual share."""
    module = kind(8, 1)
    fresh = kind(8, 4)
    module.num_heads = 4
    for name, part in fresh.named_parameters():
        part.data.copy_(module.get_parameter(name))
    options = {"radius": 2.0, "cross_check": False}
    both = (nn.Sequential(attention, BY_ONE(8, 2)) for attention in (module, fresh))
    bounds, expected = (parts_of(attention, **options) for attention in both)
    assert bounds["0"].lipschitz == pytest.approx(factor * expected["0"].lipschitz)
    assert bounds["1"].radius == pytest.approx(factor * expected["1"].radius)


def test_cosine_attention_needs_eps():
    w = torch.eye(2)[None]
    with pytest.raises(ConfigError, match="eps > 0"):
        cosine_attention_bound(w, w, w, w, eps=0.0, temperature=1.0, seq_len=3)


def split(sizes):
    return by_heads(sizes).T.unflatten(1, (HEADS, HEAD_DIM)).movedim(1, 0)


def normalised(per_head):
    """Join heads with normalised values, which write to orthogonal outputs."""
    return math.hypot(*(slope * o for slope, o in zip(per_head, OUT, strict=True)))


@pytest.mark.parametrize("mask", ["full", "causal", "any"])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_cosine_attention(mask, tokens):
    eps = 0.25
    tau = torch.tensor([-0.5, 2.0])
    nu = torch.tensor([3.0, -0.75])
    weights = (split(Q), split(K), split(V), split(OUT).mT.contiguous())
    options = {"eps": eps, "temperature": tau, "value_scale": nu}
    slope = [abs(float(scale)) / math.sqrt(eps) for scale in nu]
    sharp = [abs(float(scale)) for scale in tau]
    heads = list(zip(slope, sharp, Q, K, V, strict=True))
    by_token = normalised([s * math.hypot(v, t * max(q, k)) for s, t, q, k, v in heads])
    rows = mass(mask, max(sharp), tokens)
    columns = min(rows, math.sqrt(tokens / 2))
    split_up = [rows * v + t * math.hypot(q, columns * k) for _, t, q, k, v in heads]
    at_once = [math.hypot(rows * v, t * q, rows * t * k) for _, t, q, k, v in heads]
    smaller = [s * min(pair) for s, *pair in zip(slope, split_up, at_once, strict=True)]
    every_head = max(at_once) * max(s * o for s, o in zip(slope, OUT, strict=True))
    in_two = min(normalised(smaller), every_head)
    expected = {"tok": by_token, "inf": math.sqrt(D) * by_token, 2: in_two}
    for norm, value in expected.items():
        bound = cosine_attention_bound(*weights, **options, seq_len=tokens, norm=norm, mask=mask)
        assert float(bound.value) == pytest.approx(value, rel=1e-5), norm
