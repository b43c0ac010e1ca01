"""The error bound of an inverse where logits are large: against formulas in long double, which form
no large logit."""

import math

import pytest
import torch
from torch import nn

from wellposed.nn import CosineSelfAttention, Inversion, InvertibleResidual, L2SelfAttention
from wellposed.nn.invertible.inversion_bound import with_error_bound

np = pytest.importorskip("numpy")
WIDE = np.longdouble
pytestmark = pytest.mark.skipif(
    np.finfo(WIDE).eps > 1e-18, reason="long double is no wider than float64 here"
)


def wide(x):
    return np.asarray(x.detach().double().numpy(), dtype=WIDE)


def affine(part, x):
    return x @ wide(part.weight).T + wide(part.bias)


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def l2(f, scales, x, allowed=True):
    """Equation of the class, from differences of tokens: no logit is larger than its own size."""
    z, width = affine(f.q_proj, x), f.head_dim
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
    """What each head of `W_h R_h` is multiplied by inside `frozen`, after a first call: powers of
    two are apart."""
    (factor,) = (f._frozen_scales).values()
    return np.ldexp(wide(factor).ravel(), -f._unit_weights().exponents.numpy())


def cosine(f, x):
    heads = []
    for head, start in enumerate(range(0, f.embed_dim, f.head_dim)):
        query, key, value = (
            part / np.sqrt((part * part).sum(-1, keepdims=True) + WIDE(f.eps))
            for part in (
                affine(p, x)[..., start : start + f.head_dim]
                for p in (f.q_proj, f.k_proj, f.v_proj)
            )
        )
        weights = softmax(wide(f.temperature)[head] * (query @ np.swapaxes(key, -1, -2)))
        heads.append(wide(f.nu)[head] * (weights @ value))
    return affine(f.o_proj, np.concatenate(heads, -1))


def size_of(error, norm):
    if norm == "inf":
        return float(abs(error).max())
    return float(np.sqrt((error * error).sum(-1 if norm == "tok" else (-2, -1))).max())


def inverted(exact, y, x):
    """Picard's iteration in long double from an x that is nearly right; slopes here are far below
    c."""
    for _ in range(60):
        last, x = x, y - exact(x)
        if not abs(x - last).max() > 1e-18 * abs(x).max():
            break
    return x


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
    return size_of(wide(x) - exact, f.norm), report


def far_token(seed, size=1e6):
    torch.manual_seed(seed)
    f, x = (
        L2SelfAttention(4, 2, contractive=0.5, max_tokens=4).double(),
        torch.randn(1, 4, 4).double(),
    )
    x[:, 0] *= size / x[:, 0].norm()
    return f, x


def steep_projection(seed):
    """Two clusters, whose tokens are so near that the steep projection tells them apart by about
    one."""
    torch.manual_seed(seed)
    f = L2SelfAttention(8, 2, contractive=0.5, max_tokens=4).double()
    f.q_proj.weight.data.mul_(1e6)
    return f, (torch.randn(2, 8).repeat(1, 2, 1) + 1e-6 * torch.randn(1, 4, 8)).double()


def without_logits(f, x, report):
    """The bound that takes the map to round like a linear one."""
    eps, width = torch.finfo(torch.float64).eps, x.shape[-1]
    with torch.no_grad():
        image = float(f(x).norm(dim=-1).max())
    lost = (math.sqrt(width) + 8) * eps * (0.5 * float(x.norm(dim=-1).max()) + image)
    return (report.residual + lost) / 0.5


@pytest.mark.parametrize("make", [far_token, steep_projection])
def test_large_logits_break_the_bound_without_them_and_not_ours(make):
    broken = 0.0
    for seed in range(12):
        f, x = make(seed)
        error, report = judged(f, x)
        assert 0 < error <= report.error_bound < math.inf
        broken = max(broken, error / without_logits(f, x, report))
    assert broken > 5


@pytest.mark.parametrize("size", [1e-2, 1.0])
def test_ordinary_tokens_pay_little_for_it(size):
    for width, heads in ((16, 2), (64, 1), (64, 8)):
        torch.manual_seed(width)
        f = L2SelfAttention(width, heads, contractive=0.5, max_tokens=32).double()
        x = size * torch.randn(2, 32, width).double()
        error, report = judged(f, x)
        assert 0 < error <= report.error_bound <= 10 * without_logits(f, x, report)


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
        heads, tokens = (1, 2, 4, 8)[index % 4], (1, 2, 5, 16)[index // 4 % 4]
        f = L2SelfAttention(8, heads, contractive=(0.3, 0.9)[index % 2], max_tokens=16, norm=norm)
        f.get_parameter(f"{weight}.weight").data.mul_(factor)
        x = scale * torch.randn(1, tokens, 8)
        x[:, : index % 3] *= 100
        error, report = judged(f.to(dtype), x.to(dtype), is_causal=index % 5 == 0)
        assert error <= report.error_bound, (scale, weight, factor)
        assert (report.error_bound == math.inf) == bool(report.reason)
        finite += report.error_bound < math.inf
    assert finite >= 0.7 * len(cases)


def test_sixty_four_tokens_with_one_far_away():
    torch.manual_seed(0)
    f, x = L2SelfAttention(8, 4, contractive=0.9, max_tokens=64), torch.randn(1, 64, 8)
    x[:, 40] *= 1e4
    for dtype in (torch.float64, torch.float32):
        error, report = judged(f.to(dtype), x.to(dtype))
        assert 0 < error <= report.error_bound < math.inf


@torch.no_grad()
def test_undetermined_weights_are_refused_in_words():
    f, x = far_token(0, size=1e9)
    _, report = judged(f, x)
    assert report.error_bound == math.inf
    assert "leaves the attention weights undetermined" in report.reason
    heads = nn.MultiheadAttention(4, 2, batch_first=True)

    class Hidden(nn.Module):
        def forward(self, x):
            return 1e-3 * heads(x, x, x)[0]

    _, report = InvertibleResidual(Hidden(), lipschitz=0.5).inverse(torch.randn(1, 3, 4))
    assert report.error_bound == math.inf
    assert "out of sight" in report.reason


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_is_no_logit(is_causal):
    torch.manual_seed(1)
    block = InvertibleResidual(L2SelfAttention(8, 2, contractive=0.5, max_tokens=6).double())
    padding = torch.tensor([[True] * 2 + [False] * 4, [False] * 6])
    y = torch.randn(2, 6, 8).double()
    _, report = block.inverse(y, key_padding_mask=padding, is_causal=is_causal)
    assert report.error_bound < 1e-12


@torch.no_grad()
def test_cosine_and_chains():
    for seed, size in enumerate((1e-3, 1.0, 1e3, 1e6)):
        torch.manual_seed(seed)
        f = CosineSelfAttention(8, 2, tau=50.0, learn_scales=False).double()
        query, key, value, out = (
            float(torch.linalg.matrix_norm(p.weight, 2))
            for p in (f.q_proj, f.k_proj, f.v_proj, f.o_proj)
        )
        # Theory note B6, two heads joined by L6; eps = 0.01.
        f.nu.fill_(0.9 / (math.sqrt(2) * out * 10 * (value + 50 * (query + key))))
        x = size * torch.randn(1, 8, 8).double()
        x[:, 0] *= 30
        y = x + f(x)
        report = with_error_bound(Inversion(1, 0.0, math.inf, 0.9, "tok"), f, x, y, {})
        error = size_of(wide(x) - inverted(lambda t, f=f: cosine(f, t), wide(y), wide(x)), "tok")
        assert 0 < error <= report.error_bound < math.inf
    inner, last = steep_projection(3)[0], nn.Linear(8, 8, bias=False).double()
    last.weight.data.div_(torch.linalg.matrix_norm(last.weight, 2))
    x = steep_projection(3)[1]
    chain = nn.Sequential(inner, nn.ELU(), last)
    with inner.frozen():
        y = x + chain(x)
        scales = divisions(inner)
        report = with_error_bound(Inversion(1, 0.0, math.inf, 0.5, "tok"), chain, x, y, {})

    def exact(t):
        middle = l2(inner, scales, t)
        return np.where(middle > 0, middle, np.expm1(np.minimum(middle, 0))) @ wide(last.weight).T

    error = size_of(wide(x) - inverted(exact, wide(y), wide(x)), "tok")
    assert 0 < error <= report.error_bound < math.inf


@torch.no_grad()
def test_logits_that_come_ready_made_count():
    class Averages(nn.Module):
        def __init__(self, sharpness):
            super().__init__()
            self.sharpness = sharpness

        def forward(self, x):
            weights = (self.sharpness * x.sum(-1)).softmax(-1)
            return (0.1 * weights[..., None] * x).sum(-2, keepdim=True).expand_as(x)

    bounds = [
        InvertibleResidual(Averages(s), lipschitz=0.5).inverse(torch.ones(1, 3, 4))[1]
        for s in (1, 1e18)
    ]
    assert bounds[0].error_bound < 1e-6
    assert bounds[1].reason
