"""Maps with an inverse, and stacks of them: reconstruction, a-posteriori bounds, iteration counts, gradients against
ordinary backpropagation, what is stored, refusals."""

import copy
import math
from functools import partial

import pytest
import torch
from tests.support.close import within
from torch import nn
from torch.testing import assert_close

from tests.support import layers
from wellposed.errors import ConfigError, ConvergenceError, NotContractiveError
from wellposed.nn import InvertibleResidual, L2SelfAttention, ReversibleSequential
from wellposed.nn.attention import UnitWeights


def attention(seed=0, width=16, heads=2, contractive=0.9, **options):
    torch.manual_seed(seed)
    return L2SelfAttention(width, heads, contractive=contractive, max_tokens=32, **options)


draw = partial(layers.draw, dtype=torch.float32)


class Linear(nn.Module):
    """`x -> x A` with `|A| = slope`, the symmetric A having eigenvalues all over (-slope,
    slope)."""

    def __init__(self, slope, width=32, dtype=torch.float32):
        super().__init__()
        matrix = draw(width, width, dtype=torch.float64)
        matrix = matrix + matrix.T
        matrix = slope * matrix / torch.linalg.matrix_norm(matrix, 2)
        self.register_buffer("matrix", matrix.to(dtype))

    def forward(self, x):
        return x @ self.get_buffer("matrix")


@pytest.mark.parametrize("norm", ["tok", "inf", 2])
@pytest.mark.parametrize("size", [1e-2, 1.0, 10.0])
def test_attention_blocks_are_inverted(norm, size):
    block = InvertibleResidual(attention(norm=norm))
    x = draw(3, 12, 16, size=size)
    again, report = block.inverse(block(x))
    assert (again - x).abs().max() <= 1e-5 * max(1.0, size)
    assert report.converged
    assert (report.norm, report.contraction) == (norm, 0.9)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"padded": True}, {"padded": True, "is_causal": True}]
)
def test_masks_are_passed_on(options):
    block = InvertibleResidual(attention()).double()
    x = draw(2, 6, 16, dtype=torch.float64)
    padding = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])
    keywords = {"is_causal": options.get("is_causal", False)}
    if "padded" in options:
        keywords["key_padding_mask"] = padding
    again, _ = block.inverse(block(x, **keywords), **keywords)
    assert (again - x).abs().max() <= 1e-12


@pytest.mark.parametrize("slope", [0.3, 0.9, 0.97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_maps_against_a_direct_solve(slope, dtype):
    f = Linear(slope, dtype=dtype)
    y = draw(2, 5, 32, dtype=dtype)
    x, report = InvertibleResidual(f, lipschitz=slope).inverse(y, max_iter=3000)
    system = torch.eye(32, dtype=torch.float64) + f.get_buffer("matrix").double()
    exact = y.double() @ torch.linalg.inv(system)
    error = (x.double() - exact).norm(dim=-1).max()
    assert error <= 8 * torch.finfo(dtype).eps / (1 - slope) * exact.norm(dim=-1).max()
    assert report.converged


@pytest.mark.parametrize("tol", [1e-1, 1e-3, 1e-6])
def test_the_error_bound_holds_and_follows_tol(tol):
    f = Linear(0.9, dtype=torch.float64)
    x = draw(2, 5, 32, dtype=torch.float64)
    block = InvertibleResidual(f, lipschitz=0.9)
    again, report = block.inverse(block(x), tol=tol)
    error = float((again - x).norm(dim=-1).max())
    assert error <= report.error_bound
    assert report.error_bound <= tol * 3 * float(x.norm(dim=-1).max())
    assert error > 0


class Scaled(nn.Module):
    def __init__(self, f, gain):
        super().__init__()
        self.f = f
        self.gain = gain

    def forward(self, x):
        return self.gain * self.f(x)


def test_samples_do_not_disturb_each_other():
    block = InvertibleResidual(attention()).double()
    y = draw(3, 8, 16, dtype=torch.float64)
    together, _ = block.inverse(y)
    for index in range(3):
        alone, _ = block.inverse(y[index : index + 1])
        within(together[index : index + 1], alone, 1e-13)


def test_the_bound_is_found_where_it_stands():
    small = attention(contractive=None)
    with torch.no_grad():
        small.o_proj.weight.mul_(0.02)
    bound = InvertibleResidual(small).contraction(8)
    assert 0 < bound < 1
    assert bound == pytest.approx(float(small.lipschitz_bound(8).detach()))
    assert InvertibleResidual(small, lipschitz=0.5).contraction(8) == 0.5
    assert InvertibleResidual(attention(contractive=0.3)).contraction(8) == 0.3
    x = draw(1, 8, 16)
    within(InvertibleResidual(small).inverse(x + small(x))[0], x, 1e-6)


def test_no_bound_below_one_is_refused_with_the_bound():
    y = draw(1, 4, 16)
    with pytest.raises(NotContractiveError, match=r"the bound for 4 tokens is \d"):
        InvertibleResidual(attention(contractive=None)).inverse(y)
    with pytest.raises(NotContractiveError, match="different projections"):
        InvertibleResidual(attention(contractive=None, tied=False)).inverse(y)
    with pytest.raises(
        NotContractiveError, match=r"no Lipschitz bound of Linear is known[\s\S]*lipschitz="
    ):
        InvertibleResidual(nn.Linear(16, 16)).inverse(y)
    for bound in (1.0, 1.3, -0.1):
        with pytest.raises(NotContractiveError, match="lipschitz="):
            InvertibleResidual(nn.Linear(16, 16), lipschitz=bound)


def test_bad_input_is_named():
    block = InvertibleResidual(attention())
    y = draw(2, 4, 16)
    y[1, 2, 3] = math.nan
    with pytest.raises(ConvergenceError, match="1 of 128 values of y are NaN"):
        block.inverse(y)
    with pytest.raises(ConvergenceError, match="max_iter=2"):
        block.inverse(draw(1, 4, 16), max_iter=2)
    with pytest.raises(ConfigError, match="tol"):
        block.inverse(draw(1, 4, 16), tol=0.0)
    broken = InvertibleResidual(Scaled(nn.Identity(), math.nan), lipschitz=0.5)
    with pytest.raises(ConvergenceError, match="f returned NaN"):
        broken.inverse(draw(1, 4, 16))


def test_active_dropout_is_refused():
    block = InvertibleResidual(nn.Sequential(nn.Dropout(0.1), Linear(0.5)), lipschitz=0.6)
    with pytest.raises(ConfigError, match=r"f\.0: dropout 0\.1"):
        block.inverse(draw(1, 4, 32))
    assert block.eval().inverse(draw(1, 4, 32))[1].converged


def test_a_wrong_promise_ends_in_an_error_not_in_a_wrong_answer():
    block = InvertibleResidual(Linear(1.4), lipschitz=0.9)
    with pytest.raises(ConvergenceError, match="max_iter=50"):
        block.inverse(draw(1, 4, 32), max_iter=50)


def test_zeros_one_token_and_two_dimensions():
    block = InvertibleResidual(attention())
    zero = torch.zeros(2, 3, 16)
    with torch.no_grad():
        block.get_parameter("f.q_proj.bias").fill_(0.5)
    again, _ = block.inverse(block(zero))
    assert again.abs().max() <= 1e-6
    one = draw(1, 1, 16)
    within(block.inverse(block(one))[0], one, 1e-6)
    flat = InvertibleResidual(Linear(0.8), lipschitz=0.8)
    rows = draw(7, 32)
    within(flat.inverse(flat(rows))[0], rows, 3e-5)
    nothing = InvertibleResidual(Linear(0.0), lipschitz=0.0)
    assert torch.equal(nothing.inverse(rows)[0], rows)


def test_autocast_inverts_the_map_that_was_run():
    block = InvertibleResidual(attention(contractive=0.5))
    x = draw(2, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x)
        again, _ = block.inverse(y)
    assert (again - x).abs().max() <= 4 * 2.0**-8


class Short(nn.Module):
    """0.5 x with an error relative to x, which limits every iteration."""

    error = 2.0**-9

    def forward(self, x):
        return 0.5 * x * (1 + self.error * torch.sin(1e5 * x))


def test_products_in_fewer_digits_set_the_floor():
    block = InvertibleResidual(Short(), lipschitz=0.5)
    y = draw(2, 8, 16)
    with pytest.raises(ConvergenceError, match="sets a floor"):
        block.inverse(y, max_iter=100)
    torch.set_float32_matmul_precision("medium")
    try:
        within(block.inverse(y, max_iter=100)[0], y / 1.5, 2.0**-6)
        block.f.error = 0.0  # products that do not round: every digit is found
        within(block.inverse(y)[0], y / 1.5, 1e-6)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_bound_is_computed_once_per_inverse(monkeypatch):
    layer = attention()
    calls = []
    original = UnitWeights.layer

    def counted(self, *arguments):
        calls.append(arguments)
        return original(self, *arguments)

    monkeypatch.setattr(UnitWeights, "layer", counted)
    report = InvertibleResidual(layer).inverse(draw(1, 4, 16))[1]
    assert report.iterations > 2
    assert len(calls) == 1
    # Outside, a change of the weights counts at once, however it is made.
    with torch.no_grad():
        before = layer(draw(1, 4, 16))
        layer.o_proj.weight.data.mul_(5.0)
        assert_close(layer(draw(1, 4, 16)), before)


D = 16
N = 8


def residual_blocks(count):
    torch.manual_seed(0)
    branches = [L2SelfAttention(D, 2, contractive=0.9, max_tokens=N) for _ in range(count)]
    return [InvertibleResidual(f) for f in branches]


def plain_forward(stack, x, **options):
    for block in stack.blocks:
        x = block(x, **options)
    return x


def gradients(stack, x, *, plain, **options):
    x = x.clone().requires_grad_()
    y = plain_forward(stack, x, **options) if plain else stack(x, **options)
    weight = draw(*x.shape, seed=9, dtype=x.dtype)
    return torch.autograd.grad((y * weight).sum(), [x, *stack.parameters()], allow_unused=True)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"padded": True}])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_gradients_equal_ordinary_backpropagation(options, dtype, tolerance):
    stack = ReversibleSequential(residual_blocks(5)).to(dtype)
    x = draw(2, N, D, dtype=dtype)
    keywords = {"is_causal": True} if "is_causal" in options else {}
    if "padded" in options:
        keywords["key_padding_mask"] = torch.tensor([[False] * 5 + [True] * 3, [False] * N])
    within(stack(x, **keywords), plain_forward(stack, x, **keywords), 0)
    expected = gradients(stack, x, plain=True, **keywords)
    computed = gradients(stack, x, plain=False, **keywords)
    largest = max(float(gradient.norm()) for gradient in expected)
    for ours, theirs in zip(computed, expected, strict=True):
        # Relative to each gradient, or to a thousandth of the largest if it is nearly zero.
        assert (ours - theirs).norm() <= tolerance * max(float(theirs.norm()), 1e-3 * largest)


def test_twelve_blocks_are_inverted():
    stack = ReversibleSequential(residual_blocks(12))
    x = draw(2, N, D)
    again, report = stack.inverse(stack(x))
    assert (again - x).abs().max() <= 1e-4
    assert len(report.blocks) == 12
    assert report.iterations == sum(block.iterations for block in report.blocks)
    exact = ReversibleSequential(residual_blocks(3)).double()
    x = x.double()
    again, report = exact.inverse(exact(x), tol=1e-6)
    assert 0 < float((again - x).norm(dim=-1).max()) <= report.error_bound < 1e-2


def saved_bytes(stack, x, *, plain):
    """Bytes of all distinct tensors, parameters aside, that the graph keeps for backward."""
    parameter_pointers = {parameter.data_ptr() for parameter in stack.parameters()}
    storages = {}

    def record(tensor):
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in parameter_pointers:
            storages[pointer] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        y = plain_forward(stack, x) if plain else stack(x)
    assert y.requires_grad
    return sum(storages.values())


def test_stored_activations_do_not_grow_with_depth():
    x = draw(2, N, D).requires_grad_()
    shallow, deep = (ReversibleSequential(residual_blocks(count)) for count in (2, 16))
    assert saved_bytes(deep, x, plain=False) <= 1.25 * saved_bytes(shallow, x, plain=False)
    assert saved_bytes(deep, x, plain=False) == 2 * x.numel() * 4
    assert saved_bytes(deep, x, plain=True) > 6 * saved_bytes(shallow, x, plain=True)


def test_shared_and_frozen_weights():
    block = residual_blocks(1)[0].double()
    stack = ReversibleSequential([block, block, copy.deepcopy(block)])
    stack.blocks[2].get_parameter("f.q_proj.weight").requires_grad_(False)
    x = draw(1, N, D, dtype=torch.float64)
    trainable = [p for p in stack.parameters() if p.requires_grad]
    computed = torch.autograd.grad(stack(x).square().sum(), trainable)
    expected = torch.autograd.grad(plain_forward(stack, x).square().sum(), trainable)
    assert_close(computed, expected, atol=1e-11, rtol=1e-9)


def test_autocast_runs_in_the_dtype_of_x():
    stack = ReversibleSequential(residual_blocks(4))
    x = draw(2, N, D)
    expected = gradients(stack, x, plain=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        computed = gradients(stack, x, plain=False)
    assert_close(computed, expected)


class Biased(InvertibleResidual):
    """Claims an inverse that is slightly wrong."""

    def inverse(self, y, **options):
        x, report = super().inverse(y, **options)
        return x + 0.01, report


def test_a_wrong_inverse_is_noticed():
    blocks = [Biased(block.f) for block in residual_blocks(2)]
    x = draw(2, N, D).requires_grad_()
    with pytest.raises(ConvergenceError, match=r"off by 0[.]0\d+ of its size"):
        ReversibleSequential(blocks)(x).sum().backward()
    ReversibleSequential(blocks, drift=0.5)(x).sum().backward()
    assert x.grad is not None


def test_what_no_stack_takes_is_named():
    with pytest.raises(ConfigError, match=r"without inverse:[\s\S]*1: Linear"):
        ReversibleSequential([residual_blocks(1)[0], nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="0 blocks"):
        ReversibleSequential([])
    with pytest.raises(ConfigError, match="drift"):
        ReversibleSequential(residual_blocks(1), drift=0.0)
    x = draw(2, N, D).requires_grad_()
    dropping = InvertibleResidual(nn.Sequential(nn.Dropout(0.1), Linear(0.5)), lipschitz=0.6)
    with pytest.raises(ConfigError, match=r"blocks\.0\.f\.0: dropout 0\.1"):
        ReversibleSequential([dropping])(x)
    free = InvertibleResidual(L2SelfAttention(D, 2))
    with pytest.raises(NotContractiveError, match="the bound for"):
        ReversibleSequential([free])(x).sum().backward()
    with pytest.raises(ConfigError, match="scale require gradient"):
        ReversibleSequential(residual_blocks(1))(x, scale=torch.ones((), requires_grad=True))


@pytest.mark.parametrize("option", [{"tol": 1e-2}, {"max_iter": 1}])
def test_solver_options_reach_the_blocks(option):
    x = draw(2, N, D).requires_grad_()
    stack = ReversibleSequential(residual_blocks(2), **option)
    if "tol" in option:
        y = stack(x).detach()
        coarse, fine = (stack.inverse(y, **options)[1] for options in ({}, {"tol": 1e-4}))
        assert coarse.iterations < fine.iterations
    else:
        with pytest.raises(ConvergenceError, match="max_iter=1"):
            stack(x).sum().backward()
