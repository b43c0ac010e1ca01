"""Cosine attention modules against explicit float64 sums, and their Lipschitz bound against
Jacobians."""

import math

import pytest
import torch
from tests.support.close import within
from tests.support.layers import built, draw, gradients_are_right, heads_of, stack_config
from tests.support.refusal import bad_config, bad_shape
from torch.autograd.functional import jacobian
from torch.testing import assert_close

from wellposed.nn import ATTENTIONS, AttentionMask, CosineCrossAttention, CosineSelfAttention

D, H = 8, 2


def normalized(tokens, eps):
    return tokens / (tokens.square().sum(-1, keepdim=True) + eps).sqrt()


def reference(layer, x, memory, allowed):
    state = {name: weight.detach().double() for name, weight in layer.state_dict().items()}
    parts = heads_of(layer, x, memory)
    heads = []
    for h in range(layer.num_heads):
        q, k, v = (normalized(part[h], layer.eps) for part in parts)
        logits = float(state["log_tau"][h].exp()) * q @ k.transpose(-1, -2)
        heads.append(state["nu"][h] * logits.masked_fill(~allowed, -math.inf).softmax(-1) @ v)
    return torch.cat(heads, -1) @ state["o_proj.weight"].T + state.get("o_proj.bias", 0)


def build(kind, **options):
    return built(kind, D, H, **options)


OPTIONS = [{}, {"eps": 1.0}, {"tau": 0.5, "nu": 2.0}, {"learn_scales": False}, {"bias": False}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_self_attention_matches_reference(options, size):
    layer, x = build(CosineSelfAttention, **options), draw(2, 6, D, size=size)
    full, causal = torch.ones(6, 6).bool(), torch.ones(6, 6).tril().bool()
    within(layer(x), reference(layer, x, x, full), 1e-11)
    within(layer(x, is_causal=True), reference(layer, x, x, causal), 1e-11)


@pytest.mark.parametrize("options", [*OPTIONS, {"memory_dim": 5}])
def test_cross_attention_matches_reference(options):
    layer = build(CosineCrossAttention, **options)
    x, memory = draw(2, 4, D), draw(2, 7, options.get("memory_dim", D), seed=2)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    expected = reference(layer, x, memory, ~padding[:, None, :])
    within(layer(x, memory, key_padding_mask=padding), expected, 1e-11)
    shorter = layer(x[:1], memory[:1, :5])
    within(layer(x, memory, key_padding_mask=padding)[:1], shorter, 1e-12)


def test_a_memory_of_padding_only_is_finite_in_both_directions():
    layer, x = build(CosineCrossAttention), draw(1, 3, D).requires_grad_()
    out = layer(x, draw(1, 4, D), key_padding_mask=torch.ones(1, 4, dtype=torch.bool))
    out.square().sum().backward()
    assert_close(out[0, 0], layer.o_proj.bias)
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options):
    layer, x = build(CosineCrossAttention, **options), draw(1, 3, D).requires_grad_()
    memory = draw(1, 4, D, seed=2).requires_grad_()
    assert gradients_are_right(layer, x, memory)


def tok_norm(matrix):
    """Lower bound of the tok norm of a Jacobian (N, D, M, E), by alternating directions."""
    direction = torch.randn(
        matrix.shape[:2], generator=torch.Generator().manual_seed(0), dtype=matrix.dtype
    )
    for _ in range(15):
        change = torch.nn.functional.normalize(
            torch.einsum("ia,iajb->ijb", direction, matrix), dim=-1
        )
        pushed = torch.einsum("iajb,ijb->ia", matrix, change)
        direction = torch.nn.functional.normalize(pushed, dim=-1)
    return pushed.norm(dim=-1).max()


def pair_jacobian(layer, x, memory):
    return jacobian(lambda x, y: layer(x[None], y[None])[0], (x, memory))


@pytest.mark.parametrize("size", [1e-2, 1.0, 1e2])
@pytest.mark.parametrize("eps", [0.01, 1.0])
def test_the_stated_bounds_hold(size, eps):
    for seed in range(3):
        torch.manual_seed(seed)
        layer = CosineCrossAttention(4, 1, eps=eps, tau=3.0, nu=2.0).double()
        x, memory = draw(3, 4, seed=seed, size=size), draw(5, 4, seed=seed + 9, size=size)
        by_x, by_memory = pair_jacobian(layer, x, memory)
        q, k, v, o = (
            torch.linalg.matrix_norm(p.weight.detach(), 2)
            for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)
        )
        front = 2.0 * eps**-0.5 * o
        assert tok_norm(by_x) <= front * 3.0 * q * (1 + 1e-9)
        assert tok_norm(by_memory) <= front * (v + 3.0 * k) * (1 + 1e-9)
    # Without the diagonal as well, which L2 attention cannot do.
    hollow = AttentionMask(~torch.eye(3, dtype=torch.bool)[None, None], False)
    layer = CosineSelfAttention(4, 1, eps=eps).double()
    matrix = jacobian(lambda x: layer(x[None], key_padding_mask=hollow)[0], x)
    weights = [
        torch.linalg.matrix_norm(p.weight.detach(), 2)
        for p in (layer.v_proj, layer.q_proj, layer.k_proj)
    ]
    bound = 2 * eps**-0.5 * (weights[0] + 2 * weights[1] + 2 * weights[2])
    assert tok_norm(matrix) <= bound * torch.linalg.matrix_norm(layer.o_proj.weight.detach(), 2)


@pytest.mark.parametrize("options", [*OPTIONS, {"dropout": 0.3}])
def test_save_and_load_and_arguments_matter(options, tmp_path):
    layer, x = build(CosineSelfAttention, **options).eval(), draw(2, 4, D)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    fresh = CosineSelfAttention(D, H, **options).double().eval()
    fresh.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(fresh(x), layer(x))
    if "learn_scales" in options:
        assert not any("tau" in name for name, _ in layer.named_parameters())
    elif options:
        torch.manual_seed(0)
        plain = CosineSelfAttention(D, H)
        torch.manual_seed(0)
        changed = CosineSelfAttention(D, H, **options)
        assert not torch.allclose(plain(x.float()), changed(x.float()), rtol=1e-3)


def test_builder_and_bad_options():
    layer = ATTENTIONS.get("cosine")(stack_config(attention_dropout=0.1))
    assert isinstance(layer, CosineSelfAttention)
    assert (layer.dropout, layer.eps) == (0.1, 0.01)
    with bad_config(match="qk_norm"):
        ATTENTIONS.get("cosine")(stack_config(qk_norm=True))
    with bad_shape(match="key_padding_mask"):
        CosineCrossAttention(8, 2)(
            torch.zeros(1, 2, 8),
            torch.zeros(1, 3, 8),
            key_padding_mask=torch.zeros(1, 2, dtype=torch.bool),
        )
