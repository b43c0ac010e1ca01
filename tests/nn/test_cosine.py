"""Cosine attention modules against explicit float64 sums, and their Lipschitz bound against
Jacobians."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from wellposed.errors import ConfigError, ShapeError
from wellposed.nn import ATTENTIONS, AttentionMask, CosineCrossAttention, CosineSelfAttention

D, H = 8, 2


def normalized(tokens: Tensor, eps: float) -> Tensor:
    return tokens / (tokens.square().sum(-1, keepdim=True) + eps).sqrt()


def reference(layer: Any, x: Tensor, memory: Tensor, allowed: Tensor) -> Tensor:
    state = {name: weight.detach().double() for name, weight in layer.state_dict().items()}
    parts = [
        (tokens.double() @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)).chunk(
            layer.num_heads, -1
        )
        for name, tokens in (("q_proj", x), ("k_proj", memory), ("v_proj", memory))
    ]
    heads = []
    for h in range(layer.num_heads):
        q, k, v = (normalized(part[h], layer.eps) for part in parts)
        logits = float(state["log_tau"][h].exp()) * q @ k.transpose(-1, -2)
        heads.append(state["nu"][h] * logits.masked_fill(~allowed, -math.inf).softmax(-1) @ v)
    return torch.cat(heads, -1) @ state["o_proj.weight"].T + state.get("o_proj.bias", 0)


def draw(*shape: int, seed: int = 1, size: float = 1.0) -> Tensor:
    return size * torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def build(kind: type, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(D, H, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


OPTIONS = [{}, {"eps": 1.0}, {"tau": 0.5, "nu": 2.0}, {"learn_scales": False}, {"bias": False}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_self_attention_matches_reference(options: dict[str, Any], size: float) -> None:
    layer, x = build(CosineSelfAttention, **options), draw(2, 6, D, size=size)
    full, causal = torch.ones(6, 6).bool(), torch.ones(6, 6).tril().bool()
    torch.testing.assert_close(layer(x), reference(layer, x, x, full), atol=1e-11, rtol=0)
    torch.testing.assert_close(
        layer(x, is_causal=True), reference(layer, x, x, causal), atol=1e-11, rtol=0
    )


@pytest.mark.parametrize("options", [*OPTIONS, {"memory_dim": 5}])
def test_cross_attention_matches_reference(options: dict[str, Any]) -> None:
    layer = build(CosineCrossAttention, **options)
    x, memory = draw(2, 4, D), draw(2, 7, options.get("memory_dim", D), seed=2)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    expected = reference(layer, x, memory, ~padding[:, None, :])
    torch.testing.assert_close(
        layer(x, memory, key_padding_mask=padding), expected, atol=1e-11, rtol=0
    )
    shorter = layer(x[:1], memory[:1, :5])
    torch.testing.assert_close(
        layer(x, memory, key_padding_mask=padding)[:1], shorter, atol=1e-12, rtol=0
    )


def test_a_memory_of_padding_only_is_finite_in_both_directions() -> None:
    layer, x = build(CosineCrossAttention), draw(1, 3, D).requires_grad_()
    out = layer(x, draw(1, 4, D), key_padding_mask=torch.ones(1, 4, dtype=torch.bool))
    out.square().sum().backward()
    torch.testing.assert_close(out[0, 0], layer.o_proj.bias)
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: dict[str, Any]) -> None:
    layer, x = build(CosineCrossAttention, **options), draw(1, 3, D).requires_grad_()
    memory = draw(1, 4, D, seed=2).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    parameters = [p.detach().requires_grad_() for p in layer.parameters()]

    def call(x: Tensor, memory: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(
            layer, dict(zip(names, parameters, strict=True)), (x, memory)
        )

    assert torch.autograd.gradcheck(call, (x, memory, *parameters), fast_mode=True)


def tok_norm(matrix: Tensor) -> Tensor:
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


def pair_jacobian(layer: CosineCrossAttention, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    return jacobian(lambda x, y: layer(x[None], y[None])[0], (x, memory))


@pytest.mark.parametrize("size", [1e-2, 1.0, 1e2])
@pytest.mark.parametrize("eps", [0.01, 1.0])
def test_the_stated_bounds_hold(size: float, eps: float) -> None:
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
def test_save_and_load_and_arguments_matter(options: dict[str, Any], tmp_path: Any) -> None:
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


def test_builder_and_bad_options() -> None:
    config = SimpleNamespace(
        hidden_size=8, num_attention_heads=2, attention_dropout=0.1, qk_norm=False
    )
    built = ATTENTIONS.get("cosine")(config)
    assert isinstance(built, CosineSelfAttention)
    assert (built.dropout, built.eps) == (0.1, 0.01)
    config.qk_norm = True
    with pytest.raises(ConfigError, match="qk_norm"):
        ATTENTIONS.get("cosine")(config)
    with pytest.raises(ShapeError, match="key_padding_mask"):
        CosineCrossAttention(8, 2)(
            torch.zeros(1, 2, 8),
            torch.zeros(1, 3, 8),
            key_padding_mask=torch.zeros(1, 2, dtype=torch.bool),
        )
