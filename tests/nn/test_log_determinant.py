"""log |det J| of invertible blocks: against dense Jacobians in float64, truncation bounds, probes,
gradients, stacks, refusals."""

import math

import pytest
import torch
from tests.support.close import within
from tests.support.layers import Mapped, draw
from torch import nn
from torch.testing import assert_close

from wellposed.errors import ConfigError, NotContractiveError, ShapeError
from wellposed.nn import InvertibleResidual, L2SelfAttention, ReversibleSequential

X = draw(3, 4, 6)
PADDING = torch.tensor([[False] * 4, [False] * 3 + [True], [False, False, True, True]])


def attention_block(c, seed=0, **options):
    torch.manual_seed(seed)
    f = L2SelfAttention(6, 2, contractive=c, max_tokens=8, **options)
    return InvertibleResidual(f.double())


def reference(module, x, **options):
    """Logarithms of the singular values of each example's Jacobian, which is built row by row."""
    x = x.detach().requires_grad_()
    values = []
    for index, outputs in enumerate(module(x, **options).flatten(1)):
        rows = [torch.autograd.grad(y, x, retain_graph=True)[0][index].flatten() for y in outputs]
        values.append(torch.linalg.svdvals(torch.stack(rows)).log().sum())
    return torch.stack(values)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"key_padding_mask": PADDING}])
@pytest.mark.parametrize(("slope", "norm"), [(0.3, "tok"), (0.7, "inf"), (0.95, 2), (0.95, "tok")])
def test_both_routes_agree_with_dense_jacobians(slope, norm, options):
    block = attention_block(slope, norm=norm)
    expected = reference(block, X, **options)
    exact = block.log_abs_det(X, method="exact", **options)
    within(exact.value, expected, 1e-12)
    assert (exact.truncation_bound, float(exact.standard_error.max())) == (0.0, 0.0)
    for terms in (1, 3, 10, 40):
        series = block.log_abs_det(X, terms=terms, **options)
        within(series.value, expected, series.truncation_bound + 1e-12)


@pytest.mark.parametrize("slope", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("terms", [1, 2, 5, 30])
def test_the_truncation_bound_is_nearly_attained(slope, terms):
    block = InvertibleResidual(Mapped(lambda x: -slope * x), lipschitz=slope)
    value, bound, _ = block.log_abs_det(X, terms=terms)
    assert bound == pytest.approx(24 * slope ** (terms + 1) / ((terms + 1) * (1 - slope)))
    # The rest adds up slope^k / k; Jensen's inequality at the mean of k, n + 1 + slope / (1 - slope).
    near = (terms + 1) / (terms + 1 + slope / (1 - slope))
    rest = float(value.max()) - 24 * math.log(1 - slope)
    assert near * bound - 1e-12 <= rest <= bound + 1e-12


@pytest.mark.slow
def test_probes_estimate_the_series_with_their_standard_error():
    block = attention_block(0.9)
    expected, many = (block.log_abs_det(X, probes=count) for count in (None, 1600))
    assert ((many.value - expected.value).abs() <= 4 * many.standard_error).all()
    few = [block.log_abs_det(X, probes=4, seed=seed).value.detach() for seed in range(100)]
    assert_close(torch.stack(few).std(0) / 20, many.standard_error, rtol=0.25, atol=0)
    assert block.log_abs_det(X, probes=1).standard_error.isinf().all()


@pytest.mark.slow
def test_gradients_equal_those_of_the_exact_route():
    block = attention_block(0.5)
    x = X.clone().requires_grad_()
    inputs = [x, block.get_parameter("f.q_proj.weight"), block.get_parameter("f.o_proj.weight")]
    both = (block.log_abs_det(x, method=m, terms=60).value.sum() for m in ("exact", "series"))
    exact, series = (torch.autograd.grad(value, inputs) for value in both)
    assert_close(series, exact, atol=1e-11, rtol=1e-9)
    assert min(float(gradient.norm()) for gradient in exact) > 1e-4
    assert torch.autograd.gradcheck(lambda x: block.log_abs_det(x, probes=2, terms=4).value, x)


def test_a_stack_sums_over_its_blocks():
    stack = ReversibleSequential([attention_block(0.6, seed) for seed in range(3)])
    exact = stack.log_abs_det(X, method="exact", is_causal=True)
    within(exact.value, reference(stack.run, X, options={"is_causal": True}), 1e-11)
    series, alone = (part.log_abs_det(X, terms=5) for part in (stack, attention_block(0.6)))
    assert series.truncation_bound == pytest.approx(3 * alone.truncation_bound)
    linear = InvertibleResidual(Mapped(lambda x: x.cumsum(-1) / 12), lipschitz=0.5, norm="inf")
    one, four = (ReversibleSequential([linear] * n).log_abs_det(X, probes=1600) for n in (1, 4))
    assert_close(four.standard_error, 2 * one.standard_error, rtol=0.1, atol=0)
    assert ((four.value - 4 * one.value).abs() > 1e-6).all()  # each block has its own probes


def test_float32_autocast_and_rows():
    block = attention_block(0.8)
    expected = block.log_abs_det(X).value
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        within(block.float().log_abs_det(X.float()).value, expected.detach(), 1e-5)
    rows = InvertibleResidual(Mapped(lambda x: x.tanh() / 2), lipschitz=0.5)
    exact = rows.log_abs_det(X[:, 0], method="exact").value
    within(exact, (1.5 - X[:, 0].tanh().square() / 2).log().sum(-1), 1e-13)


def test_refusals_are_those_of_the_inverse_or_name_the_size():
    block = attention_block(0.5)
    large = torch.zeros(64, 200, 8)
    drops = InvertibleResidual(nn.Sequential(nn.Dropout(0.1), nn.Tanh()), lipschitz=0.6)
    same = InvertibleResidual(nn.Identity(), lipschitz=0.5)
    turned = InvertibleResidual(nn.Linear(6, 6, dtype=torch.cfloat), lipschitz=0.5)
    with pytest.raises(
        (ConfigError, NotContractiveError, ShapeError), match="no Lipschitz bound of Linear"
    ):
        InvertibleResidual(nn.Linear(6, 6)).log_abs_det(X)
    with pytest.raises((ConfigError, NotContractiveError, ShapeError), match="4 tokens is"):
        InvertibleResidual(L2SelfAttention(6, 2)).log_abs_det(X)
    with pytest.raises(
        (ConfigError, NotContractiveError, ShapeError),
        match=r"log_abs_det needs[\s\S]*blocks[.]0[.]f[.]0",
    ):
        ReversibleSequential([drops]).log_abs_det(X)
    with pytest.raises(
        (ConfigError, NotContractiveError, ShapeError), match=r"complex numbers [(]x[)]"
    ):
        block.log_abs_det(x=X + 0j)
    with pytest.raises(
        (ConfigError, NotContractiveError, ShapeError), match=r"complex numbers [(]weights of"
    ):
        turned.log_abs_det(X)
    with pytest.raises(
        (ConfigError, NotContractiveError, ShapeError),
        match=r"1600 coordinates need 3.66 GiB.*probes=",
    ):
        same.log_abs_det(large, method="exact")
    with pytest.raises(
        (ConfigError, NotContractiveError, ShapeError),
        match=r"x has shape \(6,\); expected \(batch",
    ):
        same.log_abs_det(X[0, 0])
