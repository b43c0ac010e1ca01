"""L2 attention, and its division by the bound if it is contractive.

The division runs in its own dtype, at every size of weights and matmul precision, and by the bound
of Kim et al. (2021)."""

import copy
import math

import pytest
import torch
from tests.support.layers import stack_config
from torch.testing import assert_close

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.errors import ConfigError, NotLipschitzError, ShapeError
from wellposed.linalg import full_precision, l2_constants
from wellposed.nn import ATTENTIONS, AttentionMask, L2SelfAttention

D = 8
N = 5
NORMS = ("tok", "inf", 2)
SIZE = {
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


def build(dtype, scale, heads=2, **options):
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


MARGIN = 1e-4
"""The layer divides by norms that are proved by Gram matrices, up to 3e-5 above those of certificates."""


def check_certificate(layer, heads=2, norm="tok"):
    """A contraction by 0.9 divides by the bound of B3. In tok B24 proves less: ``1 + 2c + 2e`` is a part
    of ``1 + 4c`` with one head. With several, ``1 + 2e`` in place of ``1 + 2c`` may weigh more."""
    total = certify(layer, seq_len=N, norm=norm).total
    if norm != "tok":
        assert total == 0.9
        return

    constants = l2_constants(N)
    of_one_head = 0.9 * constants.bracket() / constants.without_joint_keys().bracket()
    of_rows = 0.9 * (1 + 2 * constants.row_excess) / (1 + 2 * constants.c)
    if heads == 1:
        assert total == pytest.approx(of_one_head, rel=MARGIN)
    assert of_rows <= total <= of_one_head * (1 + MARGIN) < 0.75


def slope(layer, norm, tokens=N):
    """Largest `|f(x) - f(y)| / |x - y|` over pairs a good part of their size apart, each rounded to
    the dtype."""
    generator = torch.Generator().manual_seed(7)
    dtype = layer.o_proj.weight.dtype
    largest = 0.0
    for size in (0.1, 1.0, 8.0):
        for step in (0.3, 2.0):
            x = size * torch.randn(48, tokens, D, generator=generator)
            y = x + step * size * torch.randn(48, tokens, D, generator=generator)
            x = x.to(dtype)
            y = y.to(dtype)
            with torch.no_grad():
                moved = layer(x).double() - layer(y).double()
            ratio = SIZE[norm](moved) / SIZE[norm](x.double() - y.double())
            assert ratio.isfinite().all()
            largest = max(largest, float(ratio.max()))
    return largest


@pytest.mark.parametrize(("dtype", "scale"), CASES, ids=str)
@pytest.mark.parametrize(
    "norm", ["tok", *(pytest.param(norm, marks=pytest.mark.slow) for norm in ("inf", 2))]
)
def test_a_contraction_contracts_in_its_own_dtype(norm, dtype, scale):
    for heads in (1, 2, 8):
        layer = build(dtype, scale, heads, norm=norm, bias=scale == 1.0)
        check_certificate(layer, heads, norm)
        assert 0.01 < slope(layer, norm) <= 0.9


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e14])
@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"max_tokens": None}, {"max_tokens": N}])
def test_a_contraction_contracts_at_any_length(scale, options):
    layer = build(torch.float32, scale, bias=scale == 1.0, **options)
    for tokens in (1, 3, N):
        if options["max_tokens"] in (None, N) or tokens == 1:
            assert slope(layer, "tok", tokens) <= 0.9
            assert certify(layer, seq_len=tokens).total <= 0.9


def test_heads_of_different_sizes():
    layer = build(torch.float32, 1.0, 4, bias=False)
    sizes = torch.tensor([1e-15, 1.0, 1e-4, 1e12])
    with torch.no_grad():
        layer.q_proj.weight.mul_(sizes.repeat_interleave(D // 4)[:, None])
        layer.o_proj.weight.mul_((1 / sizes).repeat_interleave(D // 4))
    check_certificate(layer)
    assert slope(layer, "tok") <= 0.9


@pytest.mark.parametrize("name", ["v_proj.weight", "o_proj.weight"])
@pytest.mark.parametrize("power", [-80, -20, 20, 80])
def test_a_power_of_two_in_a_weight_changes_no_bit(name, power):
    layer = build(torch.float32, 1.0, bias=False)
    x = torch.randn(2, N, D)
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
def test_weights_outside_the_range_of_a_dtype_are_refused(dtype, scale, reason):
    layer = build(dtype, scale, bias=False)
    certificate = certify(layer, seq_len=N)
    assert certificate.total == math.inf
    assert reason in certificate.layers[0].reason
    with pytest.raises(NotLipschitzError, match=reason):
        layer.lipschitz_bound(N)


def test_biases_that_drown_the_tokens_are_refused():
    layer = build(torch.float32, 1e-9, bias=True)
    certificate = certify(layer, seq_len=N)
    assert certificate.total == math.inf
    assert "drown tokens of norm 1" in certificate.layers[0].reason
    check_certificate(layer.double())


def test_certify_sees_an_edit_inside_frozen_and_a_copy_keeps_nothing():
    layer = build(torch.float32, 1.0)
    x = torch.randn(1, N, D)
    with torch.no_grad(), layer.frozen():
        layer(x)
        copied = copy.deepcopy(layer)
        check_certificate(layer)
        layer.o_proj.weight.data.mul_(3.0)
        assert slope(layer, "tok") > 0.9 / 3, "the kept factor is in use"
        certificate = certify(layer, seq_len=N)
        assert certificate.total == math.inf
        assert "edited inside frozen()" in certificate.layers[0].reason
        with pytest.raises(NotLipschitzError, match="frozen"):
            layer.lipschitz_bound(N)
    check_certificate(layer)
    copied.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert_close(copied(x), layer(x))


@pytest.mark.parametrize("options", [{}, {"contractive": None}, {"max_tokens": None}])
def test_the_token_at_zero_is_the_forward_pass_in_float64(options):
    layer = build(torch.float64, 1.0, **options)
    for tokens in (1, N):
        expected = layer(torch.zeros(1, tokens, D, dtype=torch.float64))[0, 0]
        assert_close(layer.at_zero(tokens), expected, rtol=1e-12, atol=1e-12)
    low = build(torch.bfloat16, 1.0, **options)
    assert low.at_zero(N).dtype is torch.float64
    apart = low.at_zero(N) - low(torch.zeros(1, N, D).bfloat16())[0, 0]
    assert apart.abs().max() <= 8 * D * 2.0**-8


@pytest.mark.parametrize("setting", ["highest", "high", "medium", "autocast"])
def test_no_matmul_precision_moves_the_division(setting):
    layer = L2SelfAttention(192, 2, contractive=0.999, max_tokens=N, bias=False)
    noisy = torch.randn(192, 192)

    def read():
        by_call, exact = layer.bound_layers("cholesky")
        constants = l2_constants(N)
        both = [(part, norm) for part in (by_call, exact) for norm in NORMS]
        bounds = [part.bound(constants, norm=norm).value.detach() for part, norm in both]
        return [*bounds, by_call.paths.detach(), by_call.mixing.detach()]

    with full_precision():
        expected = read()
        product = noisy @ noisy
    precision = torch.get_float32_matmul_precision()
    try:
        if setting != "autocast":
            torch.set_float32_matmul_precision(setting)
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            pairs = zip(read(), expected, strict=True)
            assert all(torch.equal(computed, wanted) for computed, wanted in pairs)
            if setting == "autocast":  # an unguarded product would be noticed
                assert not torch.equal((noisy @ noisy).float(), product)
    finally:
        torch.set_float32_matmul_precision(precision)


# Raised by torch if one graph begins after another.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_a_compiled_contraction_is_the_same_and_refuses_the_same():
    layer = build(torch.float32, 1e-20, bias=False)
    x = torch.randn(2, N, D)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    short = L2SelfAttention(D, 2, contractive=0.9, max_tokens=N - 1)
    refused = torch.compile(short, backend="aot_eager")
    with pytest.raises(ShapeError, match="covers at most max_tokens"):
        refused(x)
    blind = AttentionMask(~torch.eye(N - 1, dtype=torch.bool)[None, None], False)
    with pytest.raises(NotLipschitzError, match="does not see its own token"):
        refused(x[:, 1:], key_padding_mask=blind)


PAPER_NORMS = ["inf", 2]
TOKENS = 6
WIDTH = 8
HEADS = 2
C = 0.9


def pair(norm, **options):
    """Return layers of the same weights, without division and divided by the paper's bound."""
    torch.manual_seed(0)
    plain = L2SelfAttention(WIDTH, HEADS, norm=norm, **options).double()
    keywords = {"norm": norm, "contractive": C, "bound": "kim2021", **options}
    divided = L2SelfAttention(WIDTH, HEADS, **keywords).double()
    divided.load_state_dict(plain.state_dict())
    return plain, divided


def paper_bound(layer, norm):
    """Theorem 3.2 with every norm from its definition, in float64."""
    assert layer.v_proj is not None
    weights = (layer.q_proj.weight, layer.v_proj.weight)
    w, v = (weight.T.reshape(WIDTH, HEADS, -1).movedim(1, 0) for weight in weights)
    out = layer.o_proj.weight.T
    c = next(x / 1e6 for x in range(10**7) if (x / 1e6) * math.exp(x / 1e6 + 1) >= TOKENS - 1)
    d = WIDTH // HEADS
    order = math.inf if norm == "inf" else 2
    size = lambda m: float(torch.linalg.matrix_norm(m, order))  # noqa: E731
    if norm == "inf":
        heads = max(size(a) * size(a.T) for a in w) * max(size(a.T) for a in v)
        return (4 * c + 1 / math.sqrt(d)) * heads * size(out.T)
    heads = math.sqrt(sum(size(a) ** 4 * size(b) ** 2 for a, b in zip(w, v, strict=True)))
    return math.sqrt(TOKENS / d) * (4 * c + 1) * heads * size(out)


@pytest.mark.parametrize("norm", PAPER_NORMS)
@pytest.mark.parametrize("max_tokens", [TOKENS, None])
@torch.no_grad()
def test_the_output_is_divided_by_the_printed_bound(norm, max_tokens):
    plain, divided = pair(norm, max_tokens=max_tokens, bias=False)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    expected = plain(x) * C / paper_bound(plain, norm)
    # c is found to 1e-6; spectral norms are bounded from above by the Gram iteration.
    assert torch.allclose(divided(x), expected, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("norm", PAPER_NORMS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@torch.no_grad()
def test_the_certificate_is_sound_and_below_the_constant(norm, scale):
    _, divided = pair(norm, max_tokens=TOKENS, bias=False)
    for parameter in divided.parameters():
        parameter.mul_(scale)
    bound = certify(divided, seq_len=TOKENS, norm=norm).total
    assert bound == pytest.approx(float(divided.lipschitz_bound(TOKENS, norm=norm)))
    assert 0 < bound < C / 2
    if scale == 1:
        attack = lipschitz_lower_bound(divided, (TOKENS, WIDTH), norm=norm, restarts=4, steps=60)
        assert 0 < attack.value <= bound


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "tok"},
        {"norm": "inf", "query_width": 2},
        {"norm": "inf", "contractive": None},
    ],
)
def test_what_the_paper_does_not_bound_is_refused(options):
    with pytest.raises(ConfigError, match="bound='sharp'"):
        L2SelfAttention(WIDTH, HEADS, bound="kim2021", **{"contractive": C, **options})


def test_registered_builders():
    names = ("l2", "l2_tied", "l2_contractive")
    untied, tied, contractive = (ATTENTIONS.get(name)(stack_config()) for name in names)
    settings = {"contractive": 0.5, "lipschitz_norm": "inf", "contractive_bound": "kim2021"}
    other = ATTENTIONS.get("l2_contractive")(stack_config(**settings))
    assert (untied.tied, tied.tied, tied.contractive) == (False, True, None)
    assert (contractive.contractive, contractive.norm, contractive.max_tokens) == (0.9, "tok", 16)
    assert (other.contractive, other.norm, other.bound) == (0.5, "inf", "kim2021")
    assert "bound='kim2021'" in repr(other)
    with pytest.raises(ConfigError, match="qk_norm"):
        ATTENTIONS.get("l2_tied")(stack_config(qk_norm=True))
