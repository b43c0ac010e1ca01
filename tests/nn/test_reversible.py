"""Reversible stacks: inverse of the whole, gradients against ordinary backpropagation, and what is
stored."""

import copy
import math
from functools import partial

import pytest
import torch
from tests.support import layers
from tests.support.close import within
from tests.support.refusal import bad_config, bad_shape
from torch import nn
from torch.testing import assert_close

from wellposed.errors import ConvergenceError, NotContractiveError
from wellposed.nn import AdditiveCoupling, InvertibleResidual, L2SelfAttention, ReversibleSequential

D, N = 16, 8


draw = partial(layers.draw, dtype=torch.float32)


def residual_blocks(count, contractive=0.9):
    torch.manual_seed(0)
    return [
        InvertibleResidual(L2SelfAttention(D, 2, contractive=contractive, max_tokens=N))
        for _ in range(count)
    ]


class FeedForward(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D // 2, D), nn.GELU(), nn.Linear(D, D // 2))


def coupling_blocks(count):
    torch.manual_seed(0)
    return [AdditiveCoupling(L2SelfAttention(D // 2, 2), FeedForward()) for _ in range(count)]


BLOCKS = {"residual": residual_blocks, "coupling": coupling_blocks}


def plain_forward(stack, x, **options):
    for block in stack.blocks:
        x = block(x, **options)
    return x


def gradients(stack, x, *, plain, **options):
    x = x.clone().requires_grad_()
    y = plain_forward(stack, x, **options) if plain else stack(x, **options)
    weight = draw(*x.shape, seed=9, dtype=x.dtype)
    return list(
        torch.autograd.grad((y * weight).sum(), [x, *stack.parameters()], allow_unused=True)
    )


@pytest.mark.parametrize("kind", list(BLOCKS))
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"padded": True}])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_gradients_equal_ordinary_backpropagation(kind, options, dtype, tolerance):
    stack = ReversibleSequential(BLOCKS[kind](5)).to(dtype)
    x = draw(2, N, D, dtype=dtype)
    keywords = {"is_causal": True} if "is_causal" in options else {}
    if "padded" in options:
        keywords["key_padding_mask"] = torch.tensor([[False] * 5 + [True] * 3, [False] * N])
    within(stack(x, **keywords), plain_forward(stack, x, **keywords), 0)
    expected = gradients(stack, x, plain=True, **keywords)
    found = gradients(stack, x, plain=False, **keywords)
    largest = max(float(gradient.norm()) for gradient in expected)
    for ours, theirs in zip(found, expected, strict=True):
        # Relative to each gradient, or to a thousandth of the largest where one is nearly zero.
        assert (ours - theirs).norm() <= tolerance * max(float(theirs.norm()), 1e-3 * largest)


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_twelve_blocks_are_inverted(kind):
    stack = ReversibleSequential(BLOCKS[kind](12))
    x = draw(2, N, D)
    again, report = stack.inverse(stack(x))
    assert (again - x).abs().max() <= 1e-4
    assert len(report.blocks) == 12
    assert report.iterations == sum(block.iterations for block in report.blocks)
    if kind == "residual":
        exact = ReversibleSequential(residual_blocks(3)).double()
        x = x.double()
        again, report = exact.inverse(exact(x), tol=1e-6)
        assert 0 < float((again - x).norm(dim=-1).max()) <= report.error_bound < 1e-2
    else:
        assert math.isinf(report.error_bound)


def saved_bytes(stack, x, *, plain):
    """Bytes of all distinct tensors, parameters aside, that the graph keeps for backward."""
    known = {parameter.data_ptr() for parameter in stack.parameters()}
    storages = {}

    def record(tensor):
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in known:
            storages[pointer] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        y = plain_forward(stack, x) if plain else stack(x)
    assert y.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_stored_activations_do_not_grow_with_depth(kind):
    x = draw(2, N, D).requires_grad_()
    shallow, deep = (ReversibleSequential(BLOCKS[kind](count)) for count in (2, 16))
    assert saved_bytes(deep, x, plain=False) <= 1.25 * saved_bytes(shallow, x, plain=False)
    assert saved_bytes(deep, x, plain=False) == 2 * x.numel() * 4
    assert saved_bytes(deep, x, plain=True) > 6 * saved_bytes(shallow, x, plain=True)


def test_shared_and_frozen_weights():
    block = residual_blocks(1)[0].double()
    stack = ReversibleSequential([block, block, copy.deepcopy(block)])
    stack.blocks[2].get_parameter("f.q_proj.weight").requires_grad_(False)
    x = draw(1, N, D, dtype=torch.float64)
    trainable = [p for p in stack.parameters() if p.requires_grad]
    found = torch.autograd.grad(stack(x).square().sum(), trainable)
    expected = torch.autograd.grad(plain_forward(stack, x).square().sum(), trainable)
    assert_close(found, expected, atol=1e-11, rtol=1e-9)


def test_autocast_runs_in_the_dtype_of_x():
    stack, x = ReversibleSequential(residual_blocks(4)), draw(2, N, D)
    expected = gradients(stack, x, plain=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(stack, x, plain=False)
    assert_close(found, expected)


class Biased(InvertibleResidual):
    """Claims an inverse that is a little off."""

    def inverse(self, y, **options):
        x, report = super().inverse(y, **options)
        return x + 0.01, report


def test_a_wrong_inverse_is_noticed():
    blocks = [Biased(block.f) for block in residual_blocks(2)]
    x = draw(2, N, D).requires_grad_()
    with pytest.raises(ConvergenceError, match=r"off by 0\.0\d+ of its size"):
        ReversibleSequential(blocks)(x).sum().backward()
    ReversibleSequential(blocks, drift=0.5)(x).sum().backward()
    assert x.grad is not None


def test_bad_input_is_named():
    with bad_config(match=r"without inverse:[\s\S]*1: Linear"):
        ReversibleSequential([residual_blocks(1)[0], nn.Linear(2, 2)])
    with bad_config(match="0 blocks"):
        ReversibleSequential([])
    with bad_config(match="drift"):
        ReversibleSequential(residual_blocks(1), drift=0.0)
    x = draw(2, N, D).requires_grad_()
    dropping = AdditiveCoupling(L2SelfAttention(D // 2, 2, dropout=0.1), FeedForward())
    with bad_config(match=r"blocks\.0\.f: dropout 0\.1"):
        ReversibleSequential([dropping])(x)
    assert ReversibleSequential([dropping]).eval()(x).isfinite().all()
    free = InvertibleResidual(L2SelfAttention(D, 2))
    with pytest.raises(NotContractiveError, match="the bound for"):
        ReversibleSequential([free])(x).sum().backward()
    with bad_config(match="scale require gradient"):
        ReversibleSequential(residual_blocks(1))(x, scale=torch.ones((), requires_grad=True))
    with bad_shape(match="width 7 is odd"):
        AdditiveCoupling(nn.Identity(), nn.Identity())(torch.zeros(2, 7))
    with pytest.raises(ConvergenceError, match="NaN"):
        AdditiveCoupling(nn.Identity(), nn.Identity()).inverse(torch.full((2, 8), math.nan))


@pytest.mark.parametrize("option", [{"tol": 1e-2}, {"max_iter": 1}])
def test_solver_options_reach_the_blocks(option):
    x = draw(2, N, D).requires_grad_()
    stack = ReversibleSequential(residual_blocks(2), **option)
    if "tol" in option:
        coarse, fine = (
            stack.inverse(stack(x).detach())[1],
            stack.inverse(stack(x).detach(), tol=1e-4)[1],
        )
        assert coarse.iterations < fine.iterations
    else:
        with pytest.raises(ConvergenceError, match="max_iter=1"):
            stack(x).sum().backward()


def test_g_gets_the_options_when_asked():
    block = AdditiveCoupling(
        L2SelfAttention(D // 2, 2), L2SelfAttention(D // 2, 2), g_options=True
    ).double()
    x = draw(2, N, D, dtype=torch.float64)
    assert not torch.allclose(block(x, is_causal=True), block(x))
    within(block.inverse(block(x, is_causal=True), is_causal=True)[0], x, 1e-12)
