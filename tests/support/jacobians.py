"""Slow, obvious references: attention written out, its Jacobian, and the three norms of a
Jacobian."""

import math
from types import SimpleNamespace

import pytest
import torch


def l2_attention(x, w, r, o, bias, tau=1.0):
    """sum_h softmax(-tau |z_i - z_j|^2 + b_ij) z_h R_h W_O,h with z_h = x W_h; x (N, D), bias (N,
    N), -inf = masked."""
    z = torch.einsum("nD,hDd->hnd", x, w)
    square = (z[:, :, None] - z[:, None]).square().sum(-1)
    p = (bias - tau * square).softmax(-1)
    return torch.einsum("hij,hjd,hde,hef->if", p, z, r, o)


def dot_product_attention(x, q, k, v, o, bias, query_bias=None):
    queries = torch.einsum("nD,hDd->hnd", x, q)
    if query_bias is not None:
        queries = queries + query_bias[:, None]
    keys = torch.einsum("nD,hDd->hnd", x, k)
    p = (bias + queries @ keys.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return torch.einsum("hij,jD,hDd,hde->ie", p, x, v, o)


def cosine_attention(x, q, k, v, o, bias, eps, tau, nu=1.0):
    def unit(a):
        return a / (a.square().sum(-1, keepdim=True) + eps).sqrt()

    queries, keys, values = (unit(torch.einsum("nD,hDd->hnd", x, m)) for m in (q, k, v))
    p = (bias + tau * queries @ keys.mT).softmax(-1)
    return nu * torch.einsum("hij,hjd,hde->ie", p, values, o)


def jacobians(function, *batched):
    """d function / d first argument for a batch: (B, N_out, E, N, D)."""
    return torch.func.vmap(torch.func.jacrev(function))(*batched)


def norm_two(jacobian):
    batch = jacobian.shape[0]
    size = jacobian.shape[1] * jacobian.shape[2]
    return torch.linalg.svdvals(jacobian.reshape(batch, size, -1))[:, 0]


def norm_inf(jacobian):
    return jacobian.abs().sum((-1, -2)).flatten(1).amax(1)


def norm_tok(jacobian, rounds=10):
    """Largest |sum_j J_ij delta_j| with every |delta_j| <= 1, by alternating maximisation (from
    below)."""
    with torch.no_grad():
        left = torch.linalg.svd(jacobian.flatten(3), full_matrices=False).U[..., 0]
        for _ in range(rounds):
            pulled = torch.einsum("btf,btfij->btij", left, jacobian)
            delta = pulled / pulled.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            pushed = torch.einsum("btij,btfij->btf", delta, jacobian)
            left = pushed / pushed.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("btij,btfij->btf", delta, jacobian).norm(dim=-1).amax(1)


OPERATOR_NORMS = {2: norm_two, "inf": norm_inf, "tok": norm_tok}


def mask_bias(kind, n, generator=None):
    """0 if a query may attend to a key, else -inf; the diagonal is always open."""
    if kind == "full":
        allowed = torch.ones(n, n, dtype=torch.bool)
    elif kind == "causal":
        allowed = torch.ones(n, n, dtype=torch.bool).tril()
    else:
        allowed = (torch.rand(n, n, generator=generator) < 0.5) | torch.eye(n, dtype=torch.bool)
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(~allowed, -math.inf)


@pytest.fixture(scope="session")
def reference():
    return SimpleNamespace(
        l2_attention=l2_attention,
        dot_product_attention=dot_product_attention,
        cosine_attention=cosine_attention,
        jacobians=jacobians,
        norms=OPERATOR_NORMS,
        mask_bias=mask_bias,
    )
