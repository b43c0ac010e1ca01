"""A table of routes of certificates and kinds of bad input.

Every cell refuses by name, or gives the product's bound, or the bound of the stored values.
"""

import itertools
import math

import pytest
import torch
from torch import nn

from wellposed.certification import certified_bound, certify, local_radius
from wellposed.certification.bounds import (
    Matrix,
    Slopes,
    branch_bound,
    chain_bound,
    convolution_norm,
    network_of,
    tightest_bound,
)
from wellposed.errors import ConfigError, NotLipschitzError, ShapeError
from wellposed.models import WellposedConfig, WellposedForSequenceClassification
from wellposed.nn import CosineSelfAttention

WIDTH = 4
TOKENS = 3


def feedforward(hidden=6, activation=None, depth=2):
    widths = [WIDTH, *[hidden] * (depth - 1), WIDTH]
    layers = []
    for first, second in itertools.pairwise(widths):
        layers += [nn.Linear(first, second), activation or nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def deep(hidden=6, activation=None):
    return feedforward(hidden, activation, depth=3)


def classifier(attention="dot_product", norm="pre"):
    config = WellposedConfig(
        hidden_size=WIDTH, num_attention_heads=2, num_hidden_layers=1, vocab_size=5, num_labels=3,
        attention=attention, norm=norm,
    )  # fmt: skip
    return WellposedForSequenceClassification(config).eval()


def links(module, slopes=(0.0, 1.0)):
    return [
        Matrix(part.weight.detach()) if isinstance(part, nn.Linear) else Slopes(*slopes)
        for part in module
    ]


def inputs(count=1, tokens=TOKENS):
    return torch.randn(count, tokens, WIDTH, generator=torch.Generator().manual_seed(0))


def spoilt(module, value):
    with torch.no_grad():
        module.get_parameter(next(iter(dict(module.named_parameters()))))[0, 0] = value
    return module


def product(module):
    norms = [
        torch.linalg.matrix_norm(part.weight.detach().double(), 2)
        for part in module
        if isinstance(part, nn.Linear)
    ]
    return math.prod(float(norm) for norm in norms)


def around(module, x=None, radius=0.1):
    return certify(module, around=inputs() if x is None else x, radius=radius)


MULTIPLIERS = {"negative": -1.0, "zero": 0.0, "NaN": math.nan, "infinite": math.inf}
OF_MULTIPLIERS = {
    "branch_bound": lambda bad: branch_bound(
        [network_of(links(feedforward()))], [0.0], [1.0], multipliers=torch.full((1, 6), bad)
    ),
    "chain_bound": lambda bad: chain_bound(
        network_of(links(deep())), multipliers=[torch.ones(6), torch.full((6,), bad)]
    ),
}


@pytest.mark.parametrize("kind", MULTIPLIERS)
@pytest.mark.parametrize("route", OF_MULTIPLIERS)
def test_multipliers_that_are_not_positive_are_refused(route, kind):
    with pytest.raises(ConfigError, match=f"{route}: 6 of .* multipliers are not positive"):
        OF_MULTIPLIERS[route](MULTIPLIERS[kind])


NOT_FINITE = {
    "network_of": (lambda bad: network_of(links(spoilt(feedforward(), bad))), "matrix 0 of 2"),
    "tightest_bound": (lambda bad: tightest_bound(links(spoilt(deep(), bad))), "matrix 0 of 3"),
    "convolution_norm": (
        lambda bad: convolution_norm(torch.full((1, 1, 2), bad)),
        "entries of a .* weight are NaN or infinite",
    ),
    "certify, feed-forward": (lambda bad: certify(spoilt(feedforward(), bad)), "0.weight"),
    "certify, chain": (lambda bad: certify(spoilt(deep(), bad)), "0.weight"),
    "certify, classifier": (
        lambda bad: certify(spoilt(classifier(), bad), seq_len=TOKENS),
        "embeddings",
    ),
    "certify, convolution": (
        lambda bad: certify(spoilt(nn.Conv1d(4, 4, 3), bad), norm=2),
        "weight",
    ),
    "around": (lambda bad: around(spoilt(feedforward(), bad)), "0.weight"),
    "local_radius": (lambda bad: local_radius(spoilt(classifier(), bad), inputs()), "embeddings"),
    "certified_bound": (lambda bad: certified_bound(spoilt(feedforward(), bad)), "0.weight"),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("route", NOT_FINITE)
def test_weights_that_are_not_finite_are_refused_by_name(route, bad):
    call, words = NOT_FINITE[route]
    with pytest.raises(NotLipschitzError, match=words):
        call(bad)


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


UNKNOWN = {
    "certify, feed-forward": lambda: certify(feedforward(activation=Sine())),
    "certify, chain": lambda: certify(deep(activation=Sine())),
    "around": lambda: around(feedforward(activation=Sine())),
}


@pytest.mark.parametrize("route", UNKNOWN)
def test_an_activation_of_unknown_slopes_is_named(route):
    certificate = UNKNOWN[route]()
    assert math.isinf(certificate.total)
    assert "1 (Sine)" in certificate.table()
    with pytest.raises(NotLipschitzError, match=r"1 \(Sine\): no rule for"):
        certificate.require()


@pytest.mark.parametrize("norm", ["tok", 2, "inf"])
def test_an_infinite_temperature_is_named(norm):
    attention = CosineSelfAttention(WIDTH, 2).double().eval()
    with torch.no_grad():
        attention.log_tau.fill_(1000.0)
    certificate = certify(attention, seq_len=TOKENS, norm=norm)
    with pytest.raises(NotLipschitzError, match=r"log_tau reaches 1000; lower log_tau"):
        certificate.require()


def test_other_routes_refuse_unknown_slopes():
    with pytest.raises(NotLipschitzError, match=r"1 \(Sine\): no rule for"):
        certified_bound(feedforward(activation=Sine()))
    for slopes in ((math.nan, 1.0), (0.0, math.inf), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="expected finite numbers low <= high"):
            Slopes(*slopes)


STORED = {
    "certify, feed-forward": (feedforward, lambda module: certify(module).total),
    "certify, chain": (deep, lambda module: certify(module).total),
    "certify, classifier": (classifier, lambda module: certify(module, seq_len=TOKENS).total),
    "certify, convolution": (
        lambda: nn.Conv1d(4, 4, 3),
        lambda module: certify(module, norm=2).total,
    ),
    "around": (feedforward, lambda module: around(module).total),
    "local_radius": (classifier, lambda module: local_radius(module, inputs(), steps=4).tolist()),
    "certified_bound": (feedforward, lambda module: float(certified_bound(module).detach())),
    "branch_bound": (
        feedforward,
        lambda module: branch_bound([network_of(links(module))], [1.0], [0.5]),
    ),
    "chain_bound": (deep, lambda module: chain_bound(network_of(links(module)))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("route", STORED)
def test_half_weights_are_certified_as_stored(route, dtype):
    make, compute = STORED[route]
    torch.manual_seed(0)
    module = make().to(dtype)
    half = compute(module)
    assert half == pytest.approx(compute(module.double()), rel=1e-9)


ONE_UNIT = {
    "feed-forward": lambda: feedforward(hidden=1),
    "chain": lambda: deep(hidden=1),
    "one of one": lambda: nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)),
}
ROUTES = {
    "certify": lambda module: certify(module).total,
    "certify, norm inf": lambda module: certify(module, norm="inf").total,
    "certified_bound": lambda module: float(certified_bound(module).detach()),
    "around": lambda module: around(module, inputs()[..., : module[0].in_features]).total,
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ONE_UNIT)
def test_a_layer_of_one_unit_is_bounded_by_its_product(name, route):
    torch.manual_seed(0)
    module = ONE_UNIT[name]().double()
    size = product(module)
    if route == "certify, norm inf":
        rows = (part.weight.abs().sum(1).max() for part in module if isinstance(part, nn.Linear))
        size = math.prod(float(row.detach()) for row in rows)
    assert 0 <= ROUTES[route](module) <= size * (1 + 1e-5)
    if route == "certify" and len(module) == 3:
        # With one hidden unit the product is the Lipschitz constant.
        assert ROUTES[route](module) == pytest.approx(size, rel=1e-5)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("make", [feedforward, deep])
def test_a_layer_without_units_is_constant(make):
    module = make(hidden=0)
    for norm in ("tok", 2, "inf", "sum"):
        assert certify(module, norm=norm).total == 0.0
    assert tightest_bound(links(module)).value == math.inf


EMPTY = {
    "certify, no tokens": lambda: certify(feedforward(), seq_len=0),
    "certified_bound, no tokens": lambda: certified_bound(feedforward(), seq_len=0),
    "around, no tokens": lambda: around(feedforward(), inputs(tokens=0)),
    "around, no inputs": lambda: around(feedforward(), inputs(count=0)),
    "around, no width": lambda: around(feedforward(), inputs()[..., :0]),
    "local_radius, no tokens": lambda: local_radius(classifier(), inputs(tokens=0)),
    "local_radius, no inputs": lambda: local_radius(classifier(), inputs(count=0)),
    "radius, no tokens": lambda: certify(classifier("ball", "none"), seq_len=TOKENS).radius(
        torch.tensor([[1.0, 0.0, 0.0]]), tokens=0
    ),
}


@pytest.mark.parametrize("route", EMPTY)
def test_empty_tokens_are_refused_by_name(route):
    caller = route.split(",")[0].replace("around", "certify").replace("certified_bound", "certify")
    with pytest.raises(ShapeError, match=f"{caller}: "):
        EMPTY[route]()


def test_a_radius_beyond_the_ball_is_said():
    """A token of a LayerNorm may become constant, and a token outside the ball has no radius."""
    norm = nn.LayerNorm(WIDTH)
    beyond = around(norm, radius=100.0)
    assert beyond.total == certify(norm).total
    assert "a token may become constant within the radius" in beyond.table()
    attention = certify(classifier(norm="none"), seq_len=TOKENS, radius=1.0)
    logits = torch.tensor([[1.0, 0.0, 0.0]])
    assert float(attention.radius(logits, largest_token=0.5)) > 0
    assert float(attention.radius(logits, largest_token=1.5)) == 0.0
    with pytest.raises(ConfigError, match=r"covers tokens with \|x_i\| <= 1 only"):
        attention.radius(logits)
    assert bool((local_radius(classifier(), inputs(), steps=4) < inputs().norm(dim=-1).max()).all())


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_a_radius_that_is_no_size_is_refused(radius):
    with pytest.raises(ConfigError, match="radius"):
        around(feedforward(), radius=radius)
    if radius != math.inf:
        with pytest.raises(ConfigError, match="radius is the largest 2-norm"):
            certify(feedforward(), radius=radius)
