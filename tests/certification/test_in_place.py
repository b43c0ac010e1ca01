"""Modules that overwrite their input, in every position: bounded as they run, or refused by name."""

import math
from types import SimpleNamespace

import pytest
import torch
from tests.words.test_words import model_of, tokenizer_of
from torch import nn

from wellposed import certify
from wellposed.certification import LayerBound, register_rule
from wellposed.errors import ConfigError, NotLipschitzError, UnsoundBoundError
from wellposed.nn import Block, InvertibleResidual, ReversibleSequential
from wellposed.words import WordCertificate

pytestmark = pytest.mark.slow  # the whole table

WIDTH = 8
IN_PLACE = {
    "relu": lambda: nn.ReLU(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "hardtanh": lambda: nn.Hardtanh(inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.5, inplace=True),
    "dropout": lambda: nn.Dropout(0.5, inplace=True).train(),
}


def linear():
    """A linear map of norm 1/2, so that the claims of 1/2 below are true, under dropout too."""
    made = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    made.weight.data /= 2 * torch.linalg.matrix_norm(made.weight.data, 2)
    return made


def at_start(part):
    return nn.Sequential(part(), linear())


def behind_an_alias(part):
    return nn.Sequential(nn.Identity(), nn.Dropout(0.0), part(), linear())


def behind_a_linear_map(part):
    return nn.Sequential(linear(), part(), linear())


def block(branch, norm="none", residual="convex"):
    options = {
        "hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 16, "activation": "gelu",
        "attention": "ball", "feedforward": "mlp", "residual": residual, "norm": norm, "qk_norm": False,
        "dropout": 0.0, "attention_dropout": 0.0, "layer_norm_eps": 1e-2, "num_hidden_layers": 1,
    }  # fmt: skip
    made = Block(SimpleNamespace(**options)).double()
    made.feedforward = branch
    return made


ROUTES = {
    **{
        f"block {norm} {residual}": lambda f, norm=norm, residual=residual: block(f, norm, residual)
        for norm in ("none", "pre", "post")
        for residual in ("plain", "rezero", "convex", "budget")
    },
    "invertible": lambda f: InvertibleResidual(f, lipschitz=0.5),
    "reversible": lambda f: ReversibleSequential([InvertibleResidual(f, lipschitz=0.5)]),
    "sequential": lambda f: nn.Sequential(InvertibleResidual(f, lipschitz=0.5), linear()),
}
BRANCHES = {"start": at_start, "alias": behind_an_alias, "inner": behind_a_linear_map}


def overwrites(route, branch):
    """Whether the tensor that a residual adds is overwritten: a pre-norm gives the branch its own."""
    return branch != "inner" and " pre " not in route


def steepest(module, tokens=3, steps=20):
    """Largest slope that gradient ascent in float64 finds, in norm tok."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 16, tokens, WIDTH, dtype=torch.float64, generator=generator)
    best = 0.0
    for _ in range(steps):
        x.requires_grad_()
        y.requires_grad_()
        torch.manual_seed(0)
        first = module(x * 1)
        torch.manual_seed(0)
        moved = (first - module(y * 1)).norm(dim=-1).amax(-1)
        slopes = moved / (x - y).norm(dim=-1).amax(-1)
        best = max(best, float(slopes.detach().max()))
        by_x, by_y = torch.autograd.grad(slopes.log().sum(), (x, y))
        x = x.detach() + 0.05 * torch.nn.functional.normalize(by_x, dim=-1)
        y = y.detach() + 0.05 * torch.nn.functional.normalize(by_y, dim=-1)
    return best


@pytest.mark.parametrize("cross_check", [True, False])
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("part", IN_PLACE)
@pytest.mark.parametrize("route", ROUTES)
def test_a_branch_in_place_is_bounded_as_it_runs_or_refused_by_name(
    route, part, branch, cross_check
):
    torch.manual_seed(1)
    module = ROUTES[route](BRANCHES[branch](IN_PLACE[part]))
    certificate = certify(module, seq_len=3, norm="tok", cross_check=cross_check)
    if overwrites(route, branch):
        with pytest.raises(NotLipschitzError, match="overwrites its input, which is used again"):
            certificate.require()
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
        draws = (route, part) == ("reversible", "dropout")
        with pytest.raises(
            ConfigError, match="parts drop at random" if draws else "which the residual adds"
        ):
            module(x)
        return
    assert certificate.total < math.inf
    if (route, part) != ("reversible", "dropout"):
        assert steepest(module) <= certificate.total * (1 + 1e-9)


class WritesToItsInput(nn.Module):
    """Says nothing of what it does to its input."""

    def forward(self, x):
        return x.relu_() @ torch.eye(WIDTH, dtype=x.dtype)


class WritesThroughData(nn.Module):
    def forward(self, x):
        x.data.relu_()
        return x @ torch.eye(WIDTH, dtype=x.dtype)


class AddsWhatActivatedAgain(nn.Module):
    """A rule that bounds its part by itself, and adds the tensor that the part overwrote."""

    def __init__(self, activation):
        super().__init__()
        self.up = linear()
        self.activation = activation

    def forward(self, x):
        y = self.up(x)
        return y + self.activation(y)


def constant_one(_module, context):
    return LayerBound(1.0, "claimed", out_radius=context.radius)


def by_hand(module, context):
    up = context.child(module.up, "up")
    active = context.child(module.activation, "activation")
    return LayerBound(up.lipschitz * (1 + active.lipschitz), "by hand")


register_rule(WritesToItsInput)(constant_one)
register_rule(WritesThroughData)(constant_one)
register_rule(AddsWhatActivatedAgain)(by_hand)


@pytest.mark.parametrize("kind", [WritesToItsInput, WritesThroughData])
@pytest.mark.parametrize("route", ROUTES)
def test_what_no_attribute_declares_is_found_by_the_cross_check(route, kind):
    module = ROUTES[route](kind())
    message = "WritesT.* changes its input in a call"
    with pytest.raises(UnsoundBoundError, match=message):
        certify(module, seq_len=3)


def test_a_rule_that_bounds_a_part_in_place_by_itself_is_refused():
    module = AddsWhatActivatedAgain(nn.ReLU(inplace=True))
    certificate = certify(module, seq_len=3, cross_check=False)
    with pytest.raises(NotLipschitzError, match=r"activation \(ReLU\) overwrites its input"):
        certificate.require()
    assert certify(AddsWhatActivatedAgain(nn.ReLU()), seq_len=3).total < math.inf


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.GELU(), nn.SiLU(inplace=True)])
@pytest.mark.parametrize("first", [True, False])
def test_an_encoder_of_torch_owns_the_tensor_that_it_activates(activation, first):
    made = nn.TransformerEncoderLayer(
        WIDTH, 2, 16, 0.0, activation, batch_first=True, norm_first=first, dtype=torch.float64
    ).eval()
    certificate = certify(made, seq_len=3, radius=2.0)
    assert certificate.total < math.inf
    made.linear1 = nn.Identity()
    made.linear2 = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    total = certify(made.train(), seq_len=3, radius=2.0).total
    in_place = getattr(activation, "inplace", False)
    assert (total == math.inf) == (in_place and not first)


class Unknown(nn.Module):
    def forward(self, x):
        return 0.5 * x


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda: nn.Sequential(Unknown(), nn.LayerNorm(WIDTH, eps=0.0)), "divides by 0"),
        (lambda: nn.Sequential(nn.Flatten(), Unknown()), "mixes tokens"),
        (lambda: nn.Sequential(nn.ReLU(inplace=True), Unknown()), "overwrites its input"),
    ],
)
def test_a_claim_supplies_a_missing_proof_and_overrides_no_other_reason(f, reason):
    claimed = InvertibleResidual(f(), lipschitz=0.5)
    certificate = certify(claimed, seq_len=3, cross_check=False)
    with pytest.raises(NotLipschitzError, match=reason):
        certificate.require()
    assert certify(InvertibleResidual(Unknown(), lipschitz=0.5), seq_len=3).total == 1.5


@pytest.mark.parametrize("residual", ["convex", "rezero", "budget"])
def test_no_words_are_certified_of_a_branch_in_place(residual):
    model = model_of(residual=residual)
    for layer in model.model.layers:
        layer.feedforward = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    message = "overwrites its input"
    with pytest.raises(NotLipschitzError, match=message):
        WordCertificate(model, tokenizer_of(), max_length=6)
    accepted = WordCertificate(model, tokenizer_of(), max_length=6, required=False)
    assert "no bound" in accepted.reason


class FailsAtItsWidth(nn.Module):
    """Has a width, at which it fails for a reason; at any other width it fails for another."""

    def __init__(self):
        super().__init__()
        self.in_features = WIDTH

    def forward(self, x):
        if x.shape[-1] == WIDTH:
            raise LookupError
        raise ArithmeticError


register_rule(FailsAtItsWidth)(constant_one)


def test_the_second_width_of_the_cross_check_never_replaces_the_first_reason():
    tried = certify(FailsAtItsWidth(), seq_len=3).cross_check
    assert tried == f"not run: LookupError at an input (batch, tokens, {WIDTH})"
