"""Bounds on balls around given inputs: no pair of inputs inside is steeper, and bad requests."""

import math
from functools import partial

import pytest
import torch
from tests.support.local_slopes import inside, steepest
from torch import nn

from wellposed.certification import LayerBound, certify, local_radius, register_rule
from wellposed.errors import ConfigError, ShapeError
from wellposed.models import (
    WellposedConfig,
    WellposedForCausalLM,
    WellposedForSequenceClassification,
)
from wellposed.nn import (
    BallAttention,
    CosineSelfAttention,
    DotProductAttention,
    L2SelfAttention,
    frozen,
)

WIDTH = 8
TOKENS = 4


def classifier(
    attention="dot_product", norm="pre", kind=WellposedForSequenceClassification, **more
):
    config = WellposedConfig(
        hidden_size=WIDTH, num_attention_heads=2, num_hidden_layers=2, attention=attention, norm=norm,
        vocab_size=20, num_labels=3, **more,
    )  # fmt: skip
    return kind(config)


def encoder(*, first):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, norm_first=first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def normed(norm):
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 3)
    )


MODULES = {
    "pre": classifier,
    "post": lambda: classifier(norm="post"),
    "no norm": lambda: classifier(norm="none"),
    "rezero": lambda: classifier(norm="none", residual="rezero"),
    "DyT": lambda: classifier(norm="dyt"),
    "cosine, pre": lambda: classifier("cosine"),
    "ball, pre": lambda: classifier("ball"),
    "L2, post": lambda: classifier("l2_tied", "post"),
    "contractive, pre": lambda: classifier("l2_contractive"),
    "over d, pre": lambda: classifier("inverse_d"),
    "language model": lambda: classifier(kind=WellposedForCausalLM),
    "torch, norm first": lambda: encoder(first=True),
    "torch, norm last": lambda: encoder(first=False),
    "LayerNorm": lambda: normed(nn.LayerNorm(WIDTH)),
    "RMSNorm": lambda: normed(nn.RMSNorm(WIDTH, eps=1e-5)),
    "dot product": lambda: DotProductAttention(WIDTH, 2),
    "query norm": lambda: DotProductAttention(WIDTH, 2, qk_norm=True),
    "attention of torch": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "cosine": lambda: CosineSelfAttention(WIDTH, 2),
    "ball": lambda: BallAttention(WIDTH, 2, bias=True),
    "L2": lambda: L2SelfAttention(WIDTH, 2),
    "ReLU": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)),
    "tanh": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)),
}


def made(name, seed=0):
    torch.manual_seed(seed)
    return MODULES[name]().double().eval().requires_grad_(False)


def inputs(seed=0, count=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def run(module, x):
    if hasattr(module, "get_input_embeddings"):
        return module(inputs_embeds=x).logits
    if isinstance(module, nn.MultiheadAttention):
        return module(x, x, x)[0]
    return module(x)


@pytest.mark.parametrize("radius", [1e-4, 0.03, 1.0])
@pytest.mark.parametrize("name", MODULES)
def test_no_two_inputs_in_the_balls_are_steeper(name, radius):
    module = made(name)
    x = inputs()
    certificate = certify(module, seq_len=TOKENS, around=x, radius=radius)
    assert certificate.tokens == TOKENS
    assert f"within {radius:g} of those of 2 inputs" in certificate.domain
    assert steepest(partial(run, module), x, radius, 8) <= certificate.total * (1 + 1e-9) < math.inf


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_long_ascent_stays_below(name):
    for seed, radius in ((1, 1e-3), (2, 0.1)):
        module = made(name, seed)
        x = inputs(seed, 1)
        total = certify(module, seq_len=TOKENS, around=x, radius=radius, cross_check=False).total
        with frozen(module):
            slope = steepest(partial(run, module), x, radius, 200, copies=16)
        assert slope <= total * (1 + 1e-9)


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)])
def test_a_norm_has_the_slope_of_the_smallest_deviation(norm):
    torch.manual_seed(0)
    norm.weight.data.normal_()
    x = inputs(3).float()
    centred = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
    deviation = float(centred.square().mean(-1).sqrt().min())
    for radius in (1e-3, 0.5 * deviation * math.sqrt(WIDTH)):
        lowest = deviation - radius / math.sqrt(WIDTH)
        expected = float(norm.weight.detach().abs().max()) / math.sqrt(lowest**2 + 1e-5)
        certificate = certify(norm, seq_len=TOKENS, around=x, radius=radius, cross_check=False)
        assert certificate.total == pytest.approx(expected, rel=1e-5)
    beyond = certify(norm, seq_len=TOKENS, around=x, radius=1.001 * deviation * math.sqrt(WIDTH))
    assert beyond.total == certify(norm, seq_len=TOKENS).total
    assert "a token may become constant" in beyond.layers[0].form


def test_a_constant_token_has_the_slope_of_all_inputs():
    norm = nn.LayerNorm(WIDTH)
    certificate = certify(norm, seq_len=2, around=torch.ones(1, 2, WIDTH), radius=1e-3)
    assert certificate.total == pytest.approx(1 / math.sqrt(1e-5), rel=1e-5)
    assert "a token may become constant" in certificate.layers[0].form


def test_units_that_cannot_switch_are_linear():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    net = net.double().requires_grad_(False)
    x = inputs(5, 1)[:, :1] * 3
    active = (net[0](x)[0, 0] > 0).double()
    linear = torch.linalg.matrix_norm(net[2].weight @ torch.diag(active) @ net[0].weight, 2)
    total = certify(net, seq_len=1, around=x, radius=1e-4, cross_check=False).total
    assert float(linear) <= total <= 1.05 * float(linear)
    assert total < 0.8 * certify(net, seq_len=1, cross_check=False).total


@pytest.mark.parametrize("name", ["pre", "post", "cosine, pre", "L2, post", "dot product"])
def test_small_balls_have_far_smaller_bounds(name):
    module = made(name)
    x = inputs()
    near = certify(module, seq_len=TOKENS, around=x, radius=1e-6, cross_check=False).total
    ball = float(x.norm(dim=-1).max())
    everywhere = certify(module, seq_len=TOKENS, radius=ball, cross_check=False).total
    assert near < everywhere / 3
    totals = [
        certify(module, seq_len=TOKENS, around=x, radius=radius, cross_check=False).total
        for radius in (1e-3, 1e-1, 10.0)
    ]
    assert near <= totals[0] <= totals[1] <= totals[2]


def attacked(module, x, radius, label):
    moved = torch.zeros_like(x)
    for _ in range(20):
        moved.requires_grad_()
        logits = run(module, x + moved)[0]
        others = torch.cat((logits[:label], logits[label + 1 :])).max()
        if bool(others > logits[label]):
            return True
        (gradient,) = torch.autograd.grad(others - logits[label], moved)
        step = gradient / gradient.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        moved = inside(moved.detach() + radius / 4 * step, radius)
    return False


@pytest.mark.parametrize("name", ["pre", "post", "no norm", "cosine, pre", "ball, pre", "L2, post"])
def test_the_radius_of_an_input_is_the_fixed_point(name):
    module = made(name)
    x = inputs(7, 3)
    logits = run(module, x)
    radii = local_radius(module, x, steps=10)
    assert bool((radii > 0).all())
    for row, radius in enumerate(radii.tolist()):
        assert not attacked(
            module, x[row : row + 1], radius * (1 - 1e-9), int(logits[row].argmax())
        )
        one = certify(module, seq_len=TOKENS, around=x[row : row + 1], radius=radius * 0.9)
        assert float(one.radius(logits[row : row + 1])) == pytest.approx(radius * 0.9, rel=1e-6)
    assert bool((local_radius(module, x, (logits.argmax(-1) + 1) % 3, steps=2) == 0).all())
    certificate = certify(module, seq_len=TOKENS, around=x, radius=1e-3)
    assert bool((certificate.radius(logits) <= 1e-3).all())


def test_logits_of_other_inputs_are_refused():
    module = made("pre").float()
    x = inputs().float()
    certificate = certify(module, seq_len=TOKENS, around=x, radius=1e-3)
    assert bool((certificate.radius(run(module, x)) >= 0).all())
    for logits in (run(module, inputs(9).float()), run(module, x)[:1]):
        with pytest.raises(ConfigError, match="not those of the inputs"):
            certificate.radius(logits)
    assert "outputs" not in certificate.to_dict()
    assert certificate.to_dict()["around"] == 2


def test_half_weights_are_certified_as_stored():
    module = made("pre")
    half = made("pre").bfloat16()
    stored = made("pre").bfloat16().double()
    x = inputs()
    totals = [
        certify(stored_as, seq_len=TOKENS, around=x, radius=1e-2, cross_check=False).total
        for stored_as in (half, stored, module)
    ]
    assert totals[0] == pytest.approx(totals[1], rel=1e-9) != totals[2]
    assert certify(stored, seq_len=TOKENS, around=x.bfloat16(), radius=1e-2).total < math.inf


def test_masks_are_those_of_the_call():
    module = made("dot product")
    x = inputs()
    options = {"seq_len": TOKENS, "around": x, "radius": 1e-3, "cross_check": False}
    causal = certify(module, mask="causal", **options)
    plain = certify(module, **options)
    every = certify(module, mask="any", **options)
    assert (causal.mask, plain.mask, every.mask) == ("causal", "full", "any")
    assert max(causal.total, plain.total) < every.total


class SeesItself(nn.Module):
    """Attention under a diagonal mask, which is passed by position or by keyword."""

    def __init__(self, *, by_position):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.by_position = by_position

    def forward(self, x):
        mask = torch.full((TOKENS, TOKENS), -math.inf, dtype=x.dtype).fill_diagonal_(0.0)
        if self.by_position:
            return self.attention(x, x, x, None, True, mask)[0]
        return self.attention(x, x, x, attn_mask=mask)[0]


def test_a_mask_is_noticed_however_it_is_passed():
    """The attention weights under a mask are unknown, so its bound is that of any mask."""

    def rule(module, context):
        return context.child(module.attention, "attention")

    # Rules of others have no centres.
    rule.__module__ = "wellposed.example"
    register_rule(SeesItself)(rule)
    options = {"around": inputs(), "radius": 1e-3, "cross_check": False}
    totals = []
    for by_position in (True, False):
        torch.manual_seed(0)
        module = SeesItself(by_position=by_position).double().eval()
        totals.append(certify(module, **options).total)
    alone = certify(module.attention, **options).total
    assert totals[0] == totals[1] == certify(module.attention, mask="any", **options).total
    assert alone < totals[0]


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(2 * x)


def test_parts_of_a_rule_of_yours_have_the_bound_of_all_inputs():
    @register_rule(Doubled)
    def doubled(module, context):
        inside = context.child(module.norm, "norm")
        return LayerBound(2 * inside.lipschitz, "definition", out_radius=inside.out_radius)

    total = certify(Doubled(), seq_len=TOKENS, around=inputs().float(), radius=1e-3).total
    assert total == pytest.approx(2 / math.sqrt(1e-5), rel=1e-5)


GOOD = inputs().float()
BAD = {
    "no radius": ({"radius": None}, ConfigError, "needs radius="),
    "infinite radius": ({"radius": math.inf}, ConfigError, "finite 2-norm"),
    "negative radius": ({"radius": -1.0}, ConfigError, "must be a Python number > 0"),
    "zero radius": ({"radius": 0.0}, ConfigError, "must be a Python number > 0"),
    "NaN radius": ({"radius": math.nan}, ConfigError, "must be a Python number > 0"),
    "norm 2": ({"norm": 2}, ConfigError, "in norm 'tok' only"),
    "norm sum": ({"norm": "sum"}, ConfigError, "in norm 'tok' only"),
    "ids": ({"around": torch.ones(2, TOKENS, dtype=torch.long)}, ConfigError, "input_vectors"),
    "a list": ({"around": [[1.0]]}, ConfigError, "must be a tensor"),
    "no tokens": ({"around": GOOD[:, :0]}, ShapeError, "none of them 0"),
    "no inputs": ({"around": GOOD[:0]}, ShapeError, "none of them 0"),
    "one token": ({"around": GOOD[0]}, ShapeError, r"\(batch, tokens, width\)"),
    "another width": ({"around": GOOD[..., :5]}, ShapeError, "does not run on around"),
    "too long": ({"seq_len": 2}, ShapeError, "seq_len=2 covers fewer"),
    "NaN": ({"around": GOOD * math.nan}, ConfigError, "NaN or infinity"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_by_name(case):
    changed, error, words = BAD[case]
    options = {"seq_len": TOKENS, "around": GOOD, "radius": 0.1, **changed}
    with pytest.raises(error, match=words):
        certify(made("pre").float(), **options)


def test_dropout_and_pairs_are_refused():
    module = classifier(dropout=0.1).train()
    with pytest.raises(ConfigError, match="dropout is on in"):
        certify(module, seq_len=TOKENS, around=GOOD, radius=0.1)
    with pytest.raises(ShapeError, match="one vector of logits"):
        local_radius(made("language model"), inputs())
    with pytest.raises(ConfigError, match="unknown mask"):
        local_radius(made("pre"), inputs(), mask="some")
