"""A contractive layer contracts as it runs: in its own dtype, at every size of weights and matmul
precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from wellposed.certification import certify
from wellposed.errors import NotLipschitzError
from wellposed.linalg import Norm, full_precision, l2_constants
from wellposed.nn import L2SelfAttention

D, N = 8, 5
NORMS: tuple[Norm, ...] = ("tok", "inf", 2)
SIZE: dict[Norm, Callable[[Tensor], Tensor]] = {
    "tok": lambda x: x.norm(dim=-1).amax(-1),
    "inf": lambda x: x.abs().amax((-2, -1)),
    2: lambda x: x.flatten(1).norm(dim=1),
}
SCALES = {
    torch.float64: (1e-30, 1e-19, 1e-5, 1.0, 1e15, 1e30),
    torch.float32: (1e-30, 1e-25, 1e-19, 1e-10, 1.0, 1e10, 1e15),
    torch.bfloat16: (1e-30, 1e-19, 1.0, 1e15),
    torch.float16: (1e-3, 1.0),
}
CASES = [(dtype, scale) for dtype, scales in SCALES.items() for scale in scales]


def build(dtype: torch.dtype, scale: float, heads: int = 2, **options: Any) -> L2SelfAttention:
    """A layer whose largest entries of every weight are `scale`, biases of order one."""
    torch.manual_seed(heads)
    layer = L2SelfAttention(D, heads, **{"contractive": 0.9, "max_tokens": N, **options})
    layer = layer.to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            entries = torch.randn(parameter.shape, dtype=torch.float64)
            size = scale if parameter.ndim > 1 else 1.0
            parameter.copy_(entries / entries.abs().max() * size)
    return layer


def slope(layer: L2SelfAttention, norm: Norm, tokens: int = N) -> float:
    """Largest `|f(x) - f(y)| / |x - y|` over pairs a good part of their size apart, each rounded to
    the dtype."""
    generator = torch.Generator().manual_seed(7)
    dtype, largest = layer.o_proj.weight.dtype, 0.0
    for size in (0.1, 1.0, 8.0):
        for step in (0.3, 2.0):
            x = size * torch.randn(48, tokens, D, generator=generator)
            y = x + step * size * torch.randn(48, tokens, D, generator=generator)
            x, y = x.to(dtype), y.to(dtype)
            with torch.no_grad():
                moved = layer(x).double() - layer(y).double()
            ratio = SIZE[norm](moved) / SIZE[norm](x.double() - y.double())
            assert ratio.isfinite().all()
            largest = max(largest, float(ratio.max()))
    return largest


@pytest.mark.parametrize(("dtype", "scale"), CASES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_a_contraction_contracts_in_its_own_dtype(
    norm: Norm, dtype: torch.dtype, scale: float
) -> None:
    for heads in (1, 2, 8):
        for values in ("paper", "free"):
            layer = build(dtype, scale, heads, norm=norm, values=values, bias=scale == 1.0)
            assert certify(layer, seq_len=N, norm=norm).total == 0.9
            assert 0.01 < slope(layer, norm) <= 0.9


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e14])
@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"max_tokens": None}, {"max_tokens": N}])
def test_a_contraction_contracts_at_any_length(scale: float, options: dict[str, Any]) -> None:
    layer = build(torch.float32, scale, bias=scale == 1.0, **options)
    for tokens in (1, 3, N):
        if options["max_tokens"] in (None, N) or tokens == 1:
            assert slope(layer, "tok", tokens) <= 0.9
            assert certify(layer, seq_len=tokens).total <= 0.9


@pytest.mark.parametrize("values", ["paper", "free"])
def test_heads_of_different_sizes(values: Any) -> None:
    layer = build(torch.float32, 1.0, 4, values=values, bias=False)
    sizes = torch.tensor([1e-15, 1.0, 1e-4, 1e12])
    with torch.no_grad():
        layer.q_proj.weight.mul_(sizes.repeat_interleave(D // 4)[:, None])
        layer.o_proj.weight.mul_((1 / sizes).repeat_interleave(D // 4))
    assert certify(layer, seq_len=N).total == 0.9
    assert slope(layer, "tok") <= 0.9


@pytest.mark.parametrize("name", ["v_proj.weight", "o_proj.weight"])
@pytest.mark.parametrize("power", [-80, -20, 20, 80])
def test_a_power_of_two_in_a_weight_changes_no_bit(name: str, power: int) -> None:
    layer, x = build(torch.float32, 1.0, bias=False), torch.randn(2, N, D)
    before = layer(x)
    with torch.no_grad():
        layer.get_parameter(name).mul_(2.0**power)
    assert torch.equal(layer(x), before)


OUT_OF_RANGE = [
    (torch.float32, 1e-41, "denormal"),
    (torch.float32, 1e19, "squares of distances overflow"),
    (torch.float32, 1e36, "squares of distances overflow"),
    (torch.bfloat16, 1e30, "squares of distances overflow"),
    (torch.float16, 1e-5, "denormal"),
    (torch.float16, 6e4, "squares of distances overflow"),
    (torch.float16, 1e3, "its division by the bound leaves"),
]


@pytest.mark.parametrize(("dtype", "scale", "reason"), OUT_OF_RANGE, ids=str)
def test_weights_outside_the_range_of_a_dtype_are_refused(
    dtype: torch.dtype, scale: float, reason: str
) -> None:
    layer = build(dtype, scale, bias=False)
    certificate = certify(layer, seq_len=N)
    assert certificate.total == math.inf
    assert reason in certificate.layers[0].reason
    with pytest.raises(NotLipschitzError, match=reason):
        layer.lipschitz_bound(N)


def test_biases_that_drown_the_tokens_are_refused() -> None:
    layer = build(torch.float32, 1e-9, bias=True)
    certificate = certify(layer, seq_len=N)
    assert certificate.total == math.inf
    assert "drown tokens of norm 1" in certificate.layers[0].reason
    assert certify(layer.double(), seq_len=N).total == 0.9


def test_certify_sees_an_edit_inside_frozen() -> None:
    layer, x = build(torch.float32, 1.0), torch.randn(1, N, D)
    with torch.no_grad(), layer.frozen():
        layer(x)
        assert certify(layer, seq_len=N).total == 0.9
        layer.o_proj.weight.data.mul_(3.0)
        assert slope(layer, "tok") > 0.9 / 3, "the kept factor is in use"
        certificate = certify(layer, seq_len=N)
        assert certificate.total == math.inf
        assert "edited inside frozen()" in certificate.layers[0].reason
        with pytest.raises(NotLipschitzError, match="frozen"):
            layer.lipschitz_bound(N)
    assert certify(layer, seq_len=N).total == 0.9


@pytest.mark.parametrize(
    "options", [{}, {"contractive": None}, {"max_tokens": None}, {"values": "free"}]
)
def test_the_token_at_zero_is_the_forward_pass_in_float64(options: dict[str, Any]) -> None:
    layer = build(torch.float64, 1.0, **options)
    for tokens in (1, N):
        expected = layer(torch.zeros(1, tokens, D, dtype=torch.float64))[0, 0]
        torch.testing.assert_close(layer.at_zero(tokens), expected, rtol=1e-12, atol=1e-12)
    low = build(torch.bfloat16, 1.0, **options)
    assert low.at_zero(N).dtype is torch.float64
    assert (
        low.at_zero(N) - low(torch.zeros(1, N, D).bfloat16())[0, 0]
    ).abs().max() <= 8 * D * 2.0**-8


@pytest.mark.parametrize("setting", ["highest", "high", "medium", "autocast"])
@pytest.mark.parametrize("values", ["paper", "free"])
def test_no_matmul_precision_moves_the_division(values: Any, setting: str) -> None:
    torch.manual_seed(0)
    layer = L2SelfAttention(192, 2, contractive=0.999, max_tokens=N, values=values, bias=False)
    noisy = torch.randn(192, 192)

    def read() -> list[Tensor]:
        by_call, exact = layer.bound_layers("cholesky")
        constants = l2_constants(N)
        bounds = [
            part.bound(constants, norm=norm).value.detach()
            for part in (by_call, exact)
            for norm in NORMS
        ]
        return [*bounds, by_call.paths.detach(), by_call.mixing.detach()]

    with full_precision():
        expected, product = read(), noisy @ noisy
    kept = torch.get_float32_matmul_precision()
    try:
        if setting != "autocast":
            torch.set_float32_matmul_precision(setting)
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            assert all(
                torch.equal(found, wanted) for found, wanted in zip(read(), expected, strict=True)
            )
            if setting == "autocast":
                assert not torch.equal((noisy @ noisy).float(), product), (
                    "an unguarded product would be noticed"
                )
    finally:
        torch.set_float32_matmul_precision(kept)


def test_a_compiled_contraction_is_the_same() -> None:
    layer, x = build(torch.float32, 1e-20, bias=False), torch.randn(2, N, D)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
