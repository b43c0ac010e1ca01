"""The Lipschitz bound of cosine attention against Jacobians, and its builder."""

import pytest
import torch
from tests.support.layers import draw, stack_config
from tests.support.refusal import bad_config
from torch.autograd.functional import jacobian

from wellposed.nn import ATTENTIONS, AttentionMask, CosineCrossAttention, CosineSelfAttention


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


def test_builder_and_bad_options():
    layer = ATTENTIONS.get("cosine")(stack_config(attention_dropout=0.1))
    assert isinstance(layer, CosineSelfAttention)
    assert (layer.dropout, layer.eps) == (0.1, 0.01)
    with bad_config(match="qk_norm"):
        ATTENTIONS.get("cosine")(stack_config(qk_norm=True))
    fixed = CosineSelfAttention(8, 2, learn_scales=False)
    assert not any("tau" in name for name, _ in fixed.named_parameters())
