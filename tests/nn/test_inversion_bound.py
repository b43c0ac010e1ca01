"""The error bound of an inverse against inverses in a wider type, by the formulas: it holds, and is
not idle."""

import copy
import math

import pytest
import torch
from tests.support.close import within
from torch import nn

from wellposed.nn import (
    AdditiveCoupling,
    Inversion,
    InvertibleResidual,
    L2SelfAttention,
    ReversibleSequential,
    TransJectStack,
)
from wellposed.nn.invertible.inversion_bound import evaluated

np = pytest.importorskip("numpy")
WIDE = np.longdouble
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def wide(x):
    return np.asarray(x.detach().double().numpy(), dtype=WIDE)


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def fixed_point(branch, y):
    """Picard's iteration far beyond float64; branches here have slopes below 0.2."""
    x = y
    for _ in range(40):
        moved = y - branch(x)
        if not (abs(moved - x) > 1e-19 * abs(y).max()).any():
            break
        x = moved
    return x


def exact_inverse(stack, y, out):
    """Eq. 4 of the paper, layer by layer downwards, in 64 bits of mantissa, with weights, sigma and
    gates as stored."""
    x = wide(y)
    sigma = wide(out.sigma)
    sigma = sigma[:, None] if sigma.ndim == 2 else sigma
    for layer, gates in zip(reversed(stack.layers), reversed(out.gates), strict=True):
        part = layer
        scale = np.tanh(wide(part.residual.weight)) / WIDE(len(stack.layers))
        up, down = (
            wide(part.feedforward.up_proj.weight).T,
            wide(part.feedforward.down_proj.weight).T,
        )
        maps = [
            (wide(expert.left.weight).T, wide(expert.right.weight).T)
            for expert in part.attention.experts
        ]
        shares = wide(gates)
        shares = shares if shares.ndim == 3 else shares[:, None]
        x = fixed_point(lambda t, r=scale, u=up, v=down: r * elu(elu(t @ u) @ v), x)
        x = fixed_point(
            lambda t, r=scale, pairs=maps, s=shares: (
                r
                * sum(
                    s[..., i : i + 1] * elu(((t @ u) * sigma) @ v) for i, (u, v) in enumerate(pairs)
                )
            ),
            x,
        )
    return x


def largest(x):
    return float(np.sqrt((x * x).sum(-1)).max())


@torch.no_grad()
def ratio(w, dtype, width, **options):
    """True error, bound and report of a stack of six layers with residual weights w, one sample
    padded."""
    torch.manual_seed(width)
    stack = TransJectStack(width, 6, num_experts=2, **options).eval()
    for layer in stack.layers:
        layer.residual.weight.fill_(w)
    stack = stack.to(dtype)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    out = stack(torch.randn(2, 6, width).to(dtype), key_padding_mask=padding)
    y = out.last_hidden_state
    x, report = stack.inverse(y, out.sigma, out.gates)
    assert all(block.measured_in is torch.float64 for block in report.blocks)
    return largest(wide(x) - exact_inverse(stack, y, out)), report.error_bound, report


@pytest.mark.skipif(np.finfo(WIDE).eps > 1e-18, reason="long double is no wider than float64 here")
@pytest.mark.parametrize("width", [8, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w", [0.3, 0.01, 0.001, 0.0])
def test_the_bound_of_a_stack_holds(w, dtype, width):
    error, bound, report = ratio(w, dtype, width)
    assert error <= bound == report.error_bound
    if w == 0:
        assert bound == 0
    else:
        # In float64 nothing is wider: the allowance for f counts too.
        assert bound <= (50 if dtype is torch.float64 else 10) * error


@pytest.mark.skipif(np.finfo(WIDE).eps > 1e-18, reason="long double is no wider than float64 here")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"is_causal": True}, {"spectrum": "random"}], ids=str)
def test_the_bound_of_other_stacks_holds(dtype, options):
    error, bound, _ = ratio(0.3, dtype, 32, **options)
    assert 0 < error <= bound <= 50 * error


def contractive(norm="tok"):
    torch.manual_seed(0)
    return InvertibleResidual(L2SelfAttention(16, 2, contractive=0.9, max_tokens=32, norm=norm))


def size_of(error, norm):
    """One of the norms by its definition, largest over the batch."""
    flat = error.double().flatten(1)
    return float(
        {"tok": error.double().norm(dim=-1), "inf": flat.abs(), 2: flat.norm(dim=-1)}[norm].max()
    )


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("norm", ["tok", "inf", 2])
def test_the_bound_of_attention_holds_in_every_norm(norm, dtype):
    block = contractive(norm).to(dtype)
    padding = torch.tensor([[False] * 10, [False] * 7 + [True] * 3])
    y = torch.randn(2, 10, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    for tol in (None, 1e-1):
        x, report = block.inverse(y, key_padding_mask=padding, tol=tol)
        layer = block.f
        with layer.frozen():
            layer(y, key_padding_mask=padding)  # the divisor, as the layer computes it
            wider = copy.deepcopy(layer).double()
            assert wider._frozen_scales
            last = exact = y.double()
            for _ in range(60):
                last, exact = exact, y.double() - wider(exact, key_padding_mask=padding)
        assert size_of(exact - last, norm) < 1e-12
        error = size_of(x.double() - exact, norm)
        assert 0 < error <= report.error_bound <= 200 * error
        assert report.measured_in is torch.float64


class Turn(nn.Module):
    """`x A`, A held as a plain tensor, out of reach of a cast."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix

    def forward(self, x):
        return x @ self.matrix


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_map_that_stays_in_its_dtype_is_bounded_in_it(dtype):
    torch.manual_seed(2)
    matrix = (0.5 * torch.linalg.qr(torch.randn(32, 32))[0]).to(dtype)
    slope = float(torch.linalg.matrix_norm(matrix.double(), 2))
    y = torch.randn(2, 5, 32).to(dtype)
    x, report = InvertibleResidual(Turn(matrix), lipschitz=slope).inverse(y)
    exact = torch.linalg.solve(torch.eye(32) + matrix.double(), y.double(), left=False)
    assert report.measured_in is dtype
    error = size_of(x.double() - exact, "tok")
    assert 0 < error <= report.error_bound <= 200 * error


@torch.no_grad()
def test_under_autocast_the_bound_is_for_the_exact_map():
    block = contractive()
    y = torch.randn(2, 8, 16)
    exact = copy.deepcopy(block).double().inverse(y.double())[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x, report = block.inverse(y)
    assert 1e-4 < size_of(x.double() - exact, "tok") <= report.error_bound


@torch.no_grad()
@pytest.mark.parametrize("width", [8, 128])
def test_maps_lose_less_than_a_tenth_of_what_they_are_allowed(width):
    torch.manual_seed(width)
    attention = InvertibleResidual(L2SelfAttention(width, 2, contractive=0.9, max_tokens=16))
    stack = TransJectStack(width, 3, num_experts=2, residual="sigmoid")
    x = torch.randn(2, 16, width)
    out = stack(x)
    halves = stack.layers[1].sublayers(out.sigma, out.gates[1])
    eps = torch.finfo(torch.float32).eps
    for block in (attention, *halves):
        for size in (0.01, 1.0, 10.0):
            wider, moved, f = (size * x).double(), size * x, block.f
            freeze = f.frozen() if isinstance(f, L2SelfAttention) else torch.no_grad()
            with freeze:
                narrow = f(moved)
                exact, measured_in, _ = evaluated(f, moved, {}, "tok")
            assert measured_in is torch.float64
            allowed = (
                (math.sqrt(width) + 8)
                * eps
                * (block.contraction(16) * wider.norm(dim=-1) + exact.norm(dim=-1))
            )
            lost = (narrow - exact).norm(dim=-1)
            assert float(lost.max()) > 0
            # Per sample, as the norm of the contraction counts.
            assert (10 * lost.amax(-1) <= allowed.amax(-1)).all()


def test_a_coupling_has_no_bound():
    stack = ReversibleSequential([AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4)), Squeeze()])
    x = torch.randn(1, 3, 8)
    assert math.isinf(stack.blocks[0].inverse(x)[1].error_bound)
    assert math.isinf(stack.inverse(x)[1].error_bound)


class Squeeze(InvertibleResidual):
    def __init__(self):
        super().__init__(nn.Identity(), lipschitz=0.0)

    def forward(self, x):
        return x

    def inverse(self, y, **options):
        return y, Inversion(0, 0.0, 0.0, 0.0, "tok")


def test_the_backward_pass_asks_for_no_bound():
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.5))
            self.seen = []

        def forward(self, x):
            self.seen.append(x.dtype)
            return self.weight * x.sin()

    f = Watched()
    stack = ReversibleSequential([InvertibleResidual(f, lipschitz=0.5)])
    stack(torch.randn(1, 2, 4)).sum().backward()
    assert torch.float64 not in f.seen
    _, report = stack.inverse(torch.randn(1, 2, 4))
    assert f.seen[-1] is torch.float64
    assert f.weight.dtype is torch.float32
    assert 0 < report.error_bound < 1e-5


class Narrow(nn.Module):
    def forward(self, x):
        if x.dtype is torch.float64:
            raise RuntimeError("not implemented for 'Double'")
        return x


@torch.no_grad()
@pytest.mark.parametrize(("last", "dtype"), [(nn.Identity, torch.float64), (Narrow, torch.float32)])
def test_weights_are_left_as_they_were(last, dtype):
    twice = nn.Linear(4, 4)
    nn.init.constant_(twice.weight, 0.1)
    f = nn.Sequential(twice, twice, nn.BatchNorm1d(4), last()).eval()
    before, values = [*f.parameters(), *f.buffers()], copy.deepcopy(f.state_dict())
    assert InvertibleResidual(f, lipschitz=0.5).inverse(torch.ones(2, 4))[1].measured_in is dtype
    assert all(a is b for a, b in zip(before, [*f.parameters(), *f.buffers()], strict=True))
    within(f.state_dict(), values, 0)


def test_a_slope_of_one_to_rounding_has_no_bound():
    f = nn.Linear(4, 4, bias=False)
    nn.init.constant_(f.weight, 0.1)
    block = InvertibleResidual(f, lipschitz=1 - 1e-8)
    assert math.isinf(block.inverse(torch.ones(1, 4), tol=1e-1, max_iter=10**4)[1].error_bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_eps_is_the_same_map_in_float64(dtype):
    """Its eps is that of float32, 1.2e-7, in both: in float64 another map would be measured."""
    f = nn.RMSNorm(4, dtype=dtype)
    nn.init.constant_(f.weight, 1e-5)
    y = 1e-4 * torch.randn(2, 3, 4).to(dtype)
    _, report = InvertibleResidual(f, lipschitz=0.5).inverse(y)
    assert report.residual < 1e-3 * torch.finfo(dtype).eps
    assert f.eps is None
