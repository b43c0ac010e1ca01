"""Rules of single parts whose bounds and balls are known numbers."""

import copy
import math

import pytest
import torch
from tests.support.certificates import rows, why
from tests.support.samples import SAMPLES
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from wellposed import nn as ours
from wellposed.certification import (
    LayerBound,
    certify,
    layer_norm_bound,
    register_rule,
)
from wellposed.models import WellposedModel
from wellposed.nn import BallProjection, DynamicErf, DynamicTanh, MaxMin, ReZeroResidual

WIDTH = 4
R = 0.3
NORMS = ("tok", 2, "inf")


def linear(*, bias=True):
    module = nn.Linear(WIDTH, WIDTH, bias=bias).double()
    with torch.no_grad():
        rows = [[3.0, 4, 0, 0], [0, 0, 0, 0], [0, 0, 0, -2], [0, 0, 0, 0]]
        module.weight.copy_(torch.tensor(rows))
        if bias:
            module.bias.copy_(torch.tensor([0.6, 0, -0.8, 0]))
    return module


def normed(kind, eps):
    module = kind(WIDTH, eps).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 0.0]))
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(torch.tensor([0.0, 0.3, 0.0, 0.4]))
    return module


def ends(module, norm, radius):
    """Return the bound of a module and the radius of its outputs."""
    model = nn.Sequential(module, linear())
    by_path = rows(model, norm=norm, radius=radius, cross_check=False)
    # An identity has no row.
    return by_path["0"].lipschitz if "0" in by_path else 1.0, by_path["1"].radius


PARTS = [
    # name, module, bound by norm, output radius on the ball of radius R, and on the whole space
    ("linear", linear(), {"tok": 5, 2: 5, "inf": 7}, 5 * R + 1, math.inf),
    ("linear without bias", linear(bias=False), {"tok": 5, 2: 5, "inf": 7}, 5 * R, math.inf),
    ("identity", nn.Identity(), dict.fromkeys(NORMS, 1), R, math.inf),
    ("relu", nn.ReLU(inplace=True), dict.fromkeys(NORMS, 1), R, math.inf),
    ("dropout", nn.Dropout(0.75).train(), dict.fromkeys(NORMS, 4), 4 * R, math.inf),
    ("no dropout", nn.Dropout(0.75).eval(), dict.fromkeys(NORMS, 1), R, math.inf),
    ("maxmin", MaxMin(), dict.fromkeys(NORMS, 1), R, math.inf),
    ("wide ball", BallProjection(WIDTH, radius=0.5), {"tok": 1, 2: 1, "inf": 1}, R, 0.5),
    # Factors of a norm in norm inf: 2 - 2/D of centring, or 1, and (1 + sqrt D)/2, for four
    # entries.
    ("layer norm", normed(nn.LayerNorm, 0.25), {"tok": 4, 2: 4, "inf": 12}, 4 * R + 0.5, 4.5),
    ("rms norm", normed(nn.RMSNorm, 0.25), {"tok": 4, 2: 4, "inf": 10}, 4 * R, 4.0),
    # |gamma| + |beta| is 5.25**0.5 + 0.5.
    ("dynamic tanh", normed(DynamicTanh, 2.0), dict.fromkeys(NORMS, 4), 4 * R + 0.5, 2.7912878),
    # The slope is 4 * 2 / sqrt(pi); with s = 0 the output at 0 is beta.
    (
        "dynamic erf",
        normed(DynamicErf, 2.0),
        dict.fromkeys(NORMS, 4.5135167),
        4.5135167 * R + 0.5,
        2.7912878,
    ),
    ("steep norm", normed(nn.LayerNorm, 1e-4), {"tok": 200, 2: 200, "inf": 600}, 4.5, 4.5),
]


CASES = [pytest.param(*values, id=name) for name, *values in PARTS]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("module", "bounds", "ball", "everywhere"), CASES)
def test_the_bound_and_the_ball_of_a_part(module, bounds, ball, everywhere, norm):
    result = ends(module, norm, R)
    assert result == (pytest.approx(bounds[norm], rel=1e-5), pytest.approx(ball, rel=1e-5))
    assert ends(module, norm, None)[1] == pytest.approx(everywhere, rel=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_a_projection_onto_a_ball_smaller_than_what_comes(norm):
    for radius in (0.2, 0.2999):
        bound, ball = ends(BallProjection(WIDTH, radius=radius), norm, R)
        assert bound == pytest.approx(1.5 if norm == "inf" else 1.0)
        assert ball == pytest.approx(radius)
    assert ends(BallProjection(WIDTH, radius=R), norm, R) == (1.0, R)


def test_a_part_that_stands_nested_has_the_ball_of_what_came_before_it():
    inner = nn.Sequential(linear(bias=False), nn.ELU(alpha=2.0))
    model = nn.Sequential(linear(), inner, nn.ReLU(), linear())
    certificate = certify(model, seq_len=3, radius=R, norm="inf", cross_check=False)
    radii = {row.path: row.radius for row in certificate.layers}
    first = 5 * R + 1
    inside = {"1": first, "1.0": first, "1.1": 5 * first, "2": 10 * first, "3": 10 * first}
    assert radii == pytest.approx({"0": R, **inside}, rel=1e-5)
    assert certificate.total == pytest.approx(7 * 7 * 2 * 7, rel=1e-5)
    assert certify(model, seq_len=3, radius=R, cross_check=False).total < 5 * 5 * 2 * 5


@pytest.mark.parametrize("width", [1, 2, 9])
def test_norm_layers_in_every_norm(width):
    half = (1 + math.sqrt(width)) / 2
    for gain, eps in ((1.0, 0.04), (3.0, 0.25), (2.0, 0.09)):
        slope = gain / math.sqrt(eps)
        for options, factor in (
            ({"norm": "tok"}, 1),
            ({"norm": 2}, 1),
            ({"norm": "inf"}, 2 - 2 / width + half),
            ({"norm": "inf", "centred": False}, 1 + half),
        ):
            bound = layer_norm_bound(gain, eps, width, **options)
            assert bound == pytest.approx(slope * factor)
    assert layer_norm_bound(0.0, 0.0, width) == 0.0
    assert layer_norm_bound(1e-9, 0.0, width) == math.inf


def test_dropout_in_training_has_a_slope_unless_it_drops_everything():
    for rate, slope in ((1.0, math.inf), (0.5, 2.0), (0.0, 1.0)):
        assert certify(nn.Dropout(rate).train(), seq_len=2).total == slope


@pytest.mark.parametrize("norm", ["tok", "inf", 2])
def test_a_module_that_stands_twice_counts_twice(norm):
    """named_children() drops repeated modules: 10 was certified for a slope of 100."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data = 10 * torch.eye(4)
    nested = nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))
    for twice in (nn.Sequential(layer, layer), nested):
        certificate = certify(twice, seq_len=3, norm=norm)
        assert certificate.total == pytest.approx(100, rel=1e-5)
        assert certificate.total >= 100
        assert len([row for row in certificate.layers if row.module == "Linear"]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [False, True])
def test_an_rms_norm_without_eps_takes_that_of_its_input(dtype, affine):
    """2,896 was certified in float64, but the slope at 0 is 6.7e7. torch computes half precision in
    float32."""
    norm = nn.RMSNorm(4, elementwise_affine=affine, dtype=dtype)
    total = certify(norm, seq_len=1, cross_check=False).total
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    size = 6e-8 if dtype is torch.float16 else 1e-3 * math.sqrt(eps)
    step = torch.full((1, 1, 4), size, dtype=dtype)
    slope = float(norm(step).detach().double().norm() / step.double().norm())
    assert slope <= total * (1 + torch.finfo(dtype).eps), "the output is rounded"
    if affine or dtype is torch.float64:
        assert total == pytest.approx(1 / math.sqrt(eps), rel=1e-6)


def test_an_rms_norm_without_weights_has_the_dtype_of_the_model_around_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4, elementwise_affine=False))
    for dtype, slope in ((torch.float32, 2896.3), (torch.float64, 6.7109e7)):
        (_, norm) = certify(model.to(dtype), seq_len=1).layers
        assert norm.lipschitz == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize(
    ("threshold", "is_bounded"),
    [(40.0, True), (37.0, True), (30.0, False), (20.0, False), (0.0, False), (-1e3, False)],
)
def test_softplus_jumps_by_less_than_a_rounding_or_is_refused(threshold, is_bounded):
    """torch's default threshold, 20, jumps by 2e-9: visible in float64, not in float32."""
    model = nn.Sequential(nn.Softplus(threshold=threshold), linear())
    assert math.isfinite(certify(model, seq_len=2, cross_check=False).total) == is_bounded
    assert is_bounded or "jumps" in why(model)
    in_float32 = certify(copy.deepcopy(model).float(), seq_len=2, cross_check=False).total
    assert math.isfinite(in_float32) == (threshold >= 20)


def test_a_product_of_small_bounds_is_not_zero():
    layers = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(3)]
    for layer, size in zip(layers, (1e-200, 1e-200, 1e300), strict=True):
        nn.init.constant_(layer.weight, size)
    certificate = certify(nn.Sequential(*layers[:2]), seq_len=1)
    assert certificate.total > 0
    assert float(certificate.radius(torch.tensor([1.0, 0.0]))) < math.inf
    assert certify(nn.Sequential(*layers), seq_len=1).total >= 1e-100
    assert "no rule" in why(nn.Sequential(*layers[:2], nn.LSTM(1, 1)))


def test_values_of_zero_are_constant_on_a_ball_whose_square_overflows():
    for kind in (ours.DotProductAttention, ours.BallAttention, ours.InverseDAttention):
        attention = kind(4, 2)
        nn.init.zeros_(attention.v_proj.weight)
        for norm in NORMS:
            certificate = certify(attention, seq_len=2, norm=norm, radius=1e200, cross_check=False)
            assert certificate.total == 0


def test_a_residual_of_another_class_says_what_it_computes_or_is_refused():
    class Silent(nn.Module):
        def forward(self, x, branch):
            return x + 100 * branch

    class Half(nn.Module):
        def forward(self, x, branch):
            return x + 0.5 * branch

        def coefficients(self):
            return 1.0, 0.5

    class Inherited(ReZeroResidual):
        def forward(self, x, branch):
            return x + 100 * branch

    block = SAMPLES[WellposedModel][0].build(8).layers[0]
    plain = certify(block, seq_len=4).total
    for residual, refused in ((Silent(), True), (Inherited(), True), (Half(), False)):
        block.attention_residual = residual
        total = certify(block, seq_len=4).total
        assert math.isinf(total) if refused else total < plain


def test_a_rule_may_read_a_part_of_another_class_by_itself():
    class Gain(nn.Module):
        factor = 3.0

        def forward(self, x):
            return self.factor * x

    class Amplifier(nn.Sequential):
        pass

    @register_rule(Amplifier)
    def undeclared_amplifier(module: Amplifier, site) -> LayerBound:
        return LayerBound(module[0].factor, "gain")

    amplifier = Amplifier(Gain())
    assert "0 is" in certify(amplifier, seq_len=1).uncertified[0].reason

    @register_rule(Amplifier)
    def declared_amplifier(module: Amplifier, site) -> LayerBound:
        site.reads(module[0])
        return LayerBound(module[0].factor, "gain")

    assert certify(amplifier, seq_len=1).total == 3.0
    amplifier[0].register_forward_hook(lambda module, args, output: 2 * output)
    assert "forward hook" in certify(amplifier, seq_len=1).uncertified[0].reason


STEEP = parametrize.register_parametrization(nn.PReLU().double(), "weight", nn.Hardtanh(3, 4))
SLOPES = {
    "relu": (nn.ReLU(), F.relu),
    "gelu": (nn.GELU(), F.gelu),
    "tanh gelu": (nn.GELU(approximate="tanh"), None),
    "silu": (nn.SiLU(), F.silu),
    "module": (nn.SiLU(), nn.SiLU()),
    "mish": (nn.Mish(), F.mish),
    "hardswish": (nn.Hardswish(), F.hardswish),
    "selu": (nn.SELU(), F.selu),
    "elu": (nn.ELU(), F.elu),
    "tanh": (nn.Tanh(), torch.tanh),
    "sigmoid": (nn.Sigmoid(), torch.sigmoid),
    "hardsigmoid": (nn.Hardsigmoid(), None),
    "log sigmoid": (nn.LogSigmoid(), None),
    "softsign": (nn.Softsign(), None),
    "tanhshrink": (nn.Tanhshrink(), None),
    "relu6": (nn.ReLU6(), F.relu6),
    "hardtanh": (nn.Hardtanh(), None),
    "softshrink": (nn.Softshrink(), None),
    "softplus": (nn.Softplus(threshold=40), None),
    "flat elu": (nn.ELU(alpha=0.5), None),
    "steep elu": (nn.ELU(alpha=2.5), None),
    "leaky relu": (nn.LeakyReLU(1.7), None),
    "prelu": (nn.PReLU(init=1.3).double(), None),
    "parametrised": (STEEP, None),
}


@pytest.mark.parametrize("name", SLOPES)
def test_the_slope_of_an_activation_is_the_steepest_of_a_fine_grid(name):
    module, function = SLOPES[name]
    points = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    values = module(points).detach()
    steepest = float((values.diff() / points.diff()).abs().max())
    assert certify(module, seq_len=2).total == pytest.approx(steepest, rel=2e-4)
    behind = nn.Sequential(module, nn.Linear(1, 1))
    out = certify(behind, seq_len=1, radius=30.0, cross_check=False).layers[-1].radius
    assert float(values.abs().max()) <= out
    if function is not None:
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation=function).double()
        parts = rows(layer.eval(), radius=1.0, cross_check=False)
        up = parts["linear1"]
        shift = float(layer.linear1.bias.detach().norm())
        ball = math.inf if name == "sigmoid" else (up.lipschitz * up.radius + shift) * steepest
        assert parts["linear2"].radius == pytest.approx(ball, rel=3e-4)
