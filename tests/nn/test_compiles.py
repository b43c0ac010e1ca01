"""Every building block but a contractive one is one graph under `torch.compile`, with the values and
gradients of a plain call."""

import pytest
import torch
from tests.support.layers import plain_stack

import wellposed.nn as wn

# Raised by torch if one graph begins after another.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
D = 8
H = 2
N = 5
PADDING = torch.tensor([[False] * N, [False] * 3 + [True] * 2])


def l2(**options):
    return lambda: wn.L2SelfAttention(D, H, **options)


SELF = {
    "dot product": lambda: wn.DotProductAttention(D, H),
    "inverse d": lambda: wn.InverseDAttention(D, H),
    "l2": l2(),
    "l2 untied": l2(tied=False),
    "l2 contractive": l2(contractive=0.9, max_tokens=16),
    "l2 contractive, own lengths": l2(contractive=0.9, norm="inf"),
    "cosine": lambda: wn.CosineSelfAttention(D, H),
    "ball": lambda: wn.BallAttention(D, H),
}
CROSS = {
    "cross": wn.CrossAttention,
    "cosine cross": wn.CosineCrossAttention,
    "ball cross": wn.BallCrossAttention,
}
TOKENWISE = {
    "mlp": lambda: wn.MLP(D, 16),
    "maxmin": lambda: wn.MaxMinFeedForward(D, 16),
    "ball projection": lambda: wn.BallProjection(D),
    "dynamic tanh": lambda: wn.DynamicTanh(D),
    "dynamic erf": lambda: wn.DynamicErf(D),
    "ngpt feedforward": lambda: wn.NGPTFeedForward(D, 16),
    "learned scale": lambda: wn.LearnedScale(D),
    "orthogonal linear": lambda: wn.OrthogonalLinear(D),
    "orthogonal feedforward": lambda: wn.OrthogonalFeedForward(D),
    "stack": lambda: plain_stack(norm="pre", residual="rezero", qk_norm=True),
    "transject": lambda: wn.TransJectStack(D, 2, num_experts=2),
    "invertible": lambda: wn.InvertibleResidual(l2(contractive=0.9, max_tokens=N)()),
    "reversible": lambda: wn.ReversibleSequential(
        [wn.InvertibleResidual(l2(contractive=0.9, max_tokens=N)()) for _ in range(2)]
    ),
}
TABLES = {
    "unit embedding": lambda: wn.UnitEmbedding(7, D),
    "ball embedding": lambda: wn.BallEmbedding(7, D),
    "injective embedding": lambda: wn.InjectiveEmbedding(7, D),
    "learned positions": lambda: wn.LearnedPositions(7, D),
    "sinusoidal positions": lambda: wn.SinusoidalPositions(7, D),
}
RESIDUALS = {
    "plain": wn.PlainResidual,
    "rezero": wn.ReZeroResidual,
    "convex": wn.ConvexResidual,
    "budget": lambda: wn.BudgetResidual(2.0),
}


def check(layer, *inputs, **keywords):
    """Compare a compiled call with a plain one."""
    torch._dynamo.reset()
    results = []
    # The division of a contractive layer is never compiled.
    fullgraph = not any(getattr(part, "contractive", None) for part in layer.modules())
    for call in (torch.compile(layer, fullgraph=fullgraph, backend="aot_eager"), layer):
        layer.zero_grad()
        out = call(*inputs, **keywords)
        out = getattr(out, "last_hidden_state", out)
        if out.requires_grad:
            out.square().sum().backward()
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        results.append([out.detach(), *(gradient.clone() for gradient in gradients)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SELF)
def test_self_attention(name):
    layer = SELF[name]()
    for keywords in ({}, {"key_padding_mask": PADDING}, {"is_causal": True}):
        check(layer, torch.randn(2, N, D), **keywords)


@pytest.mark.slow
@pytest.mark.parametrize("name", CROSS)
def test_cross_attention(name):
    check(CROSS[name](D, H), torch.randn(2, 3, D), torch.randn(2, N, D), key_padding_mask=PADDING)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENWISE)
def test_maps_of_tokens(name):
    keywords = {"key_padding_mask": PADDING} if name == "transject" else {}
    check(TOKENWISE[name](), torch.randn(2, N, D), **keywords)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_tables(name):
    check(TABLES[name](), torch.randint(0, 7, (2, N)))


@pytest.mark.slow
@pytest.mark.parametrize("name", RESIDUALS)
def test_residuals(name):
    check(RESIDUALS[name](), torch.randn(2, N, D), torch.randn(2, N, D))
