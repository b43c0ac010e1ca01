"""The error bound of an inverse against inverses in a wider type, by the formulas: it holds, and is
not idle."""

import copy
import math

import pytest
import torch
from tests.support.close import within
from tests.support.layers import Mapped
from torch import nn

from wellposed.nn import (
    Inversion,
    InvertibleResidual,
    L2SelfAttention,
    ReversibleSequential,
    TransJectStack,
)
from wellposed.nn.invertible import with_error_bound

pytestmark = pytest.mark.slow  # the whole table

np = pytest.importorskip("numpy")
WIDE = np.longdouble
longer = pytest.mark.skipif(
    np.finfo(WIDE).eps > 1e-18, reason="long double is no wider than float64 here"
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def wide(x):
    return np.asarray(x.detach().double().numpy(), dtype=WIDE)


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def inverted(branch, y, x):
    """Picard's iteration far beyond float64, from an x that may be nearly right; slopes here are far
    below 1."""
    for _ in range(60):
        last = x
        x = y - branch(x)
        if not abs(x - last).max() > 1e-19 * abs(x).max():
            break
    return x


def size_in(error, norm):
    """One of the norms by its definition, largest over the batch."""
    if norm == "inf":
        return float(abs(error).max())
    return float(np.sqrt((error * error).sum(-1 if norm == "tok" else (-2, -1))).max())


def exact_inverse(stack, y, out):
    """Eq. 4 of the paper, layer by layer downwards, in 64 bits of mantissa, with weights, sigma and
    gates as stored."""
    x = wide(y)
    sigma = wide(out.sigma)
    sigma = sigma[:, None] if sigma.ndim == 2 else sigma
    for layer, gates in zip(reversed(stack.layers), reversed(out.gates), strict=True):
        scale = np.tanh(wide(layer.residual.weight)) / WIDE(len(stack.layers))
        tokenwise = layer.feedforward
        up, down = (wide(part.weight).T for part in (tokenwise.up_proj, tokenwise.down_proj))
        experts = layer.attention.experts
        maps = [(wide(expert.left.weight).T, wide(expert.right.weight).T) for expert in experts]
        shares = wide(gates)
        shares = shares if shares.ndim == 3 else shares[:, None]
        x = inverted(lambda t, r=scale, u=up, v=down: r * elu(elu(t @ u) @ v), x, x)

        def mixed(t, r=scale, pairs=maps, s=shares):
            outputs = (elu(((t @ u) * sigma) @ v) for u, v in pairs)
            return r * sum(s[..., i : i + 1] * output for i, output in enumerate(outputs))

        x = inverted(mixed, x, x)
    return x


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
    return size_in(wide(x) - exact_inverse(stack, y, out), "tok"), report.error_bound, report


STACKS = [(w, width, {}) for w in (0.3, 0.01, 0.001, 0.0) for width in (8, 128)]
STACKS += [(0.3, 32, {"is_causal": True}), (0.3, 32, {"spectrum": "random"})]


@longer
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("w", "width", "options"), STACKS, ids=str)
def test_the_bound_of_a_stack_holds(w, width, options, dtype):
    error, bound, report = ratio(w, dtype, width, **options)
    assert error <= bound == report.error_bound
    if w == 0:
        assert bound == 0
    else:
        # In float64 nothing is wider: the allowance for f counts too.
        assert bound <= (50 if dtype is torch.float64 or options else 10) * error


def contractive(norm="tok"):
    torch.manual_seed(0)
    return InvertibleResidual(L2SelfAttention(16, 2, contractive=0.9, max_tokens=32, norm=norm))


def size_of(error, norm):
    return size_in(wide(error), norm)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_map_that_stays_in_its_dtype_is_bounded_in_it(dtype):
    matrix = (0.5 * torch.linalg.qr(torch.randn(32, 32))[0]).to(dtype)
    slope = float(torch.linalg.matrix_norm(matrix.double(), 2))
    y = torch.randn(2, 5, 32).to(dtype)
    x, report = InvertibleResidual(Mapped(lambda x: x @ matrix), lipschitz=slope).inverse(y)
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


def test_the_backward_pass_asks_for_no_bound():
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(0.5))
            self.dtypes_of_calls = []

        def forward(self, x):
            self.dtypes_of_calls.append(x.dtype)
            return self.weight * x.sin()

    f = Watched()
    stack = ReversibleSequential([InvertibleResidual(f, lipschitz=0.5)])
    stack(torch.randn(1, 2, 4)).sum().backward()
    assert torch.float64 not in f.dtypes_of_calls
    _, report = stack.inverse(torch.randn(1, 2, 4))
    assert f.dtypes_of_calls[-1] is torch.float64
    assert f.weight.dtype is torch.float32
    assert 0 < report.error_bound < 1e-5


def narrow(x):
    if x.dtype is torch.float64:
        raise RuntimeError("not implemented for 'Double'")
    return x


@torch.no_grad()
@pytest.mark.parametrize(
    ("last", "dtype"), [(nn.Identity(), torch.float64), (Mapped(narrow), torch.float32)]
)
def test_weights_are_left_as_they_were(last, dtype):
    twice = nn.Linear(4, 4)
    nn.init.constant_(twice.weight, 0.1)
    f = nn.Sequential(twice, twice, nn.BatchNorm1d(4), last).eval()
    before = [*f.parameters(), *f.buffers()]
    values = copy.deepcopy(f.state_dict())
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


# Large logits, against formulas in long double that form none.


def affine(part, x):
    return x @ wide(part.weight).T + wide(part.bias)


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def l2(f, scales, x, allowed=True):
    """Equation of the class, from differences of tokens: no logit is larger than its own size."""
    z = affine(f.q_proj, x)
    width = f.head_dim
    heads = []
    for start, scale in zip(range(0, f.embed_dim, width), scales, strict=True):
        part = slice(start, start + width)
        apart = z[..., None, :, part] - z[..., :, None, part]
        weights = softmax(
            np.where(allowed, -(apart * apart).sum(-1) / np.sqrt(WIDE(width)), -np.inf)
        )
        mixed = z[..., part] + (weights[..., None] * apart).sum(-2)
        value = f.v_proj
        mixing = wide(f.q_proj.weight[part]) @ wide(value.weight[part]).T / np.sqrt(WIDE(width))
        heads.append(mixed @ mixing * scale + wide(value.bias[part]))
    return affine(f.o_proj, np.concatenate(heads, -1))


def divisions(f):
    """Factor of each head's `W_h R_h` inside `frozen` after a call, without powers of two."""
    (factor,) = (f._frozen_scales).values()
    return np.ldexp(wide(factor).ravel(), -f._unit_weights().exponents.numpy())


@torch.no_grad()
def judged(f, x, **options):
    """True error of x as the inverse of its own image, and the report on it."""
    with f.frozen():
        y = x + f(x, **options)
        scales = divisions(f)
        bare = Inversion(1, 0.0, math.inf, (f.contractive), f.norm)
        report = with_error_bound(bare, f, x, y, options)
    tokens = np.arange(x.shape[1])
    allowed = tokens[:, None] >= tokens if options.get("is_causal") else True
    exact = inverted(lambda t: l2(f, scales, t, allowed), wide(y), wide(x))
    return size_in(wide(x) - exact, f.norm), report


def far_token(seed, size=1e6):
    torch.manual_seed(seed)
    f = L2SelfAttention(4, 2, contractive=0.5, max_tokens=4).double()
    x = torch.randn(1, 4, 4).double()
    x[:, 0] *= size / x[:, 0].norm()
    return f, x


def steep_projection(seed):
    """Two clusters, whose tokens are so near that the steep projection separates them by about
    one."""
    torch.manual_seed(seed)
    f = L2SelfAttention(8, 2, contractive=0.5, max_tokens=4).double()
    f.q_proj.weight.data.mul_(1e6)
    return f, (torch.randn(2, 8).repeat(1, 2, 1) + 1e-6 * torch.randn(1, 4, 8)).double()


def without_logits(f, x, report):
    """The bound that takes the map to round like a linear one."""
    eps = torch.finfo(torch.float64).eps
    width = x.shape[-1]
    with torch.no_grad():
        image = float(f(x).norm(dim=-1).max())
    lost = (math.sqrt(width) + 8) * eps * (0.5 * float(x.norm(dim=-1).max()) + image)
    return (report.residual + lost) / 0.5


@longer
@pytest.mark.parametrize("make", [far_token, steep_projection])
def test_large_logits_break_the_bound_without_them_and_not_ours(make):
    broken = 0.0
    for seed in range(12):
        f, x = make(seed)
        error, report = judged(f, x)
        assert 0 < error <= report.error_bound < math.inf
        broken = max(broken, error / without_logits(f, x, report))
    assert broken > 5


@longer
@pytest.mark.parametrize("size", [1e-2, 1.0])
def test_ordinary_tokens_pay_little_for_it(size):
    for width, heads in ((16, 2), (64, 1), (64, 8)):
        torch.manual_seed(width)
        f = L2SelfAttention(width, heads, contractive=0.5, max_tokens=32).double()
        x = size * torch.randn(2, 32, width).double()
        error, report = judged(f, x)
        assert 0 < error <= report.error_bound <= 10 * without_logits(f, x, report)


@longer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["tok", "inf", 2])
def test_the_bound_holds_over_scales_heads_and_lengths(norm, dtype):
    cases = [
        (scale, weight, factor)
        for scale in (1e-3, 1.0, 1e3, 1e6)
        for weight in ("q_proj", "v_proj", "o_proj")
        for factor in (1e-3, 1e3, 1e6)
    ]
    finite = 0
    for index, (scale, weight, factor) in enumerate(cases):
        torch.manual_seed(index)
        heads = (1, 2, 4, 8)[index % 4]
        tokens = (1, 2, 5, 16)[index // 4 % 4]
        f = L2SelfAttention(8, heads, contractive=(0.3, 0.9)[index % 2], max_tokens=16, norm=norm)
        f.get_parameter(f"{weight}.weight").data.mul_(factor)
        x = scale * torch.randn(1, tokens, 8)
        x[:, : index % 3] *= 100
        error, report = judged(f.to(dtype), x.to(dtype), is_causal=index % 5 == 0)
        assert error <= report.error_bound, (scale, weight, factor)
        assert (report.error_bound == math.inf) == bool(report.reason)
        finite += report.error_bound < math.inf
    assert finite >= 0.7 * len(cases)


@torch.no_grad()
def test_undetermined_weights_are_refused_in_words():
    f, x = far_token(0, size=1e9)
    _, report = judged(f, x)
    assert report.error_bound == math.inf
    assert "leaves the attention weights undetermined" in report.reason
    heads = nn.MultiheadAttention(4, 2, batch_first=True)

    hidden = Mapped(lambda x: 1e-3 * heads(x, x, x)[0])
    _, report = InvertibleResidual(hidden, lipschitz=0.5).inverse(torch.randn(1, 3, 4))
    assert report.error_bound == math.inf
    assert "hides its logits" in report.reason


@torch.no_grad()
def test_logits_that_come_ready_made_count():
    def averages(sharpness):
        def run(x):
            weights = (sharpness * x.sum(-1)).softmax(-1)
            return (0.1 * weights[..., None] * x).sum(-2, keepdim=True).expand_as(x)

        return InvertibleResidual(Mapped(run), lipschitz=0.5)

    bounds = [averages(sharpness).inverse(torch.ones(1, 3, 4))[1] for sharpness in (1, 1e18)]
    assert bounds[0].error_bound < 1e-6
    assert bounds[1].reason
