"""The attack is a lower bound, confirmed by an independent Jacobian, and finds known constants."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.attack import lipschitz_lower_bound, perturbation_size
from wellposed.certification import certify
from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import L2Layer, l2_constants
from wellposed.nn import MLP, L2SelfAttention
from wellposed.nn.attention import AttentionMask

NORMS = ("tok", "inf", 2)


@pytest.fixture
def attention():
    return L2SelfAttention(4, 2).eval()


@pytest.mark.parametrize("norm", NORMS)
def test_the_value_is_the_jacobians_at_the_input_found(reference, attention, norm):
    attack = lipschitz_lower_bound(attention, (3, 4), norm=norm, restarts=4, steps=12)
    double = copy.deepcopy(attention).double()
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.func.jacrev(lambda x: double(x[None])[0])(attack.input).detach()
    value = float(reference.norms[norm](jacobian[None]))
    assert {2: 0.98, "inf": 0.8, "tok": 0.99}[norm] * value <= attack.value <= value * (1 + 1e-9)
    pushed = torch.einsum("tfij,ij->tf", jacobian, attack.direction)
    length = {2: Tensor.norm, "inf": lambda t: t.abs().max(), "tok": lambda t: t.norm(dim=-1).max()}
    length = length[norm]
    assert float(length(pushed)) >= attack.value * (1 - 1e-6)
    assert float(length(attack.direction)) == pytest.approx(1.0)
    assert attack.values.shape == (4,)
    assert 0 < attack.ratio(certify(attention, seq_len=3, norm=norm)) <= 1


@pytest.mark.parametrize("norm", NORMS)
def test_a_linear_map_is_found_exactly(norm):
    weight = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    linear = nn.Linear(2, 2)
    linear.weight.data.copy_(weight)
    truth = 3.5 if norm == "inf" else float(torch.linalg.matrix_norm(weight, 2))
    attack = lipschitz_lower_bound(linear, (3, 2), norm=norm, restarts=3, steps=4, inner=6)
    assert attack.value == pytest.approx(truth, rel=1e-5)
    assert attack.ratio(certify(linear, seq_len=3, norm=norm)) <= 1


def masked(mask, tokens):
    """Return arguments of the module; the mask "any" is set by hand."""
    if mask != "any":
        return {"is_causal": mask == "causal"}
    allowed = (torch.rand(1, 1, tokens, tokens) < 0.5) | torch.eye(tokens, dtype=torch.bool)
    return {"key_padding_mask": AttentionMask(allowed, False)}


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("mask", "shape", "heads"),
    [("full", (3, 4), 2), ("causal", (3, 4), 2), ("any", (3, 4), 2), ("causal", (4, 2), 1)],
)
def test_ascent_over_weights_as_well_stays_below_the_bound(norm, mask, shape, heads):
    """Ascend log(slope / bound) over inputs, directions and weights."""
    attention = L2SelfAttention(shape[1], heads).double().eval()
    options = masked(mask, shape[0])
    constants = l2_constants(shape[0], mask=mask)
    x, v = (torch.randn(8, *shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([x, v, *attention.parameters()], lr=0.05)

    def slopes():
        _, moved = torch.func.jvp(lambda y: attention(y, **options), (x,), (v,))
        return perturbation_size(moved, norm) / perturbation_size(v, norm)

    def ratio():
        certificate = certify(attention, seq_len=shape[0], norm=norm, mask=mask)
        return slopes().max().item() / certificate.total

    ratios = [ratio()]
    for _ in range(4):
        for _ in range(20):
            layer = L2Layer(*attention.head_weights(), method="gram")
            loss = (layer.bound(constants, norm=norm).value.log() - slopes().log()).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ratios.append(ratio())
    assert ratios[0] < max(ratios) <= 1


def test_functions_classifiers_and_models_with_embeddings():
    head = nn.Sequential(MLP(4, 8), nn.Linear(4, 3)).double()
    pooled = lipschitz_lower_bound(lambda x: head(x).mean(1), (5, 4), restarts=2, steps=3)
    assert pooled.value <= certify(head, seq_len=5).total

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 2)

        def get_input_embeddings(self):
            return self.embed

        def forward(self, input_ids=None, inputs_embeds=None):
            return (self.head(inputs_embeds), None)

    model = Model()
    assert lipschitz_lower_bound(model, (2, 4), steps=2).ratio(certify(model.head, seq_len=2)) <= 1


def test_it_is_deterministic_and_every_argument_changes_something(attention):
    plain = {"restarts": 3, "steps": 6}
    first = lipschitz_lower_bound(attention, (3, 4), **plain)
    assert lipschitz_lower_bound(attention, (3, 4), **plain).value == first.value
    for changes in (
        {"restarts": 5}, {"steps": 2}, {"inner": 1}, {"learning_rate": 0.5}, {"scales": (0.01, 0.02)}, {"seed": 1},
        {"radius": 0.01}, {"norm": 2},
        {"start": torch.ones(3, 3, 4)},
        {"forward_kwargs": {"is_causal": True}}, {"dtype": torch.float32},
    ):  # fmt: skip
        attack = lipschitz_lower_bound(attention, (3, 4), **{**plain, **changes})
        assert attack.value != first.value, changes


def test_a_constant_map_has_slope_zero():
    for dtype in (torch.float64, None):
        assert lipschitz_lower_bound(torch.zeros_like, (2, 2), steps=2, dtype=dtype).value == 0.0
    zero = nn.Linear(2, 2)
    nn.init.zeros_(zero.weight)
    attack = lipschitz_lower_bound(zero, (2, 2), steps=2)
    assert attack.value == 0.0
    assert attack.ratio(certify(zero, seq_len=2)) == 0.0


class DividedByItself(nn.Module):
    """``x W / |W|_F`` is 1-Lipschitz; in float32 the squares of small weights underflow, so it
    divides by tiny."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(size * torch.eye(4))

    def forward(self, x):
        square = self.weight.square().sum()
        return x @ self.weight / square.sqrt().clamp_min(torch.finfo(square.dtype).tiny)


def test_the_modules_own_dtype_shows_what_a_float64_copy_hides():
    module = DividedByItself(1e-25).eval()
    double = lipschitz_lower_bound(module, (3, 4), restarts=2, steps=4)
    assert double.value == pytest.approx(0.5)
    assert (double.found_by, double.dtype) == ("jacobian", torch.float64)
    native = lipschitz_lower_bound(module, (3, 4), restarts=2, steps=4, dtype=None)
    truth = 1e-25 / torch.finfo(torch.float32).tiny
    assert native.value == native.slope == pytest.approx(truth, rel=1e-4)
    assert native.jacobian == pytest.approx(0.5)
    assert (native.found_by, native.dtype) == ("difference", torch.float32)
    plain = lipschitz_lower_bound(DividedByItself(1.0), (3, 4), steps=4, dtype=None)
    assert plain.value == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("dtype", "smallest"),
    [(torch.float64, 0.999), (torch.float32, 0.99), (torch.bfloat16, 0.3), (torch.float16, 0.9)],
)
def test_rounding_fakes_no_violation_and_hides_little(norm, dtype, smallest):
    linear = nn.Linear(8, 8).to(dtype)
    nn.init.normal_(linear.bias, std=3.0)
    attack = lipschitz_lower_bound(linear, (4, 8), norm=norm, restarts=4, steps=20, dtype=None)
    assert attack.dtype is dtype
    assert smallest <= attack.ratio(certify(linear, seq_len=4, norm=norm)) <= 1


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_the_slope_is_that_of_the_pair(attention, dtype):
    padding = torch.tensor([[False, False, True]])
    attack = lipschitz_lower_bound(
        attention, (3, 4), restarts=3, steps=10, dtype=dtype, radius=0.7,
        forward_kwargs={"key_padding_mask": padding},
    )  # fmt: skip
    x, y = attack.pair
    assert x.dtype is y.dtype is attack.dtype
    assert float(torch.stack([x, y]).norm(dim=-1).max()) <= 0.7
    module = copy.deepcopy(attention).to(attack.dtype)
    with torch.no_grad():
        fx, fy = (module(value[None], key_padding_mask=padding)[0].double() for value in (x, y))
    slope = float((fx - fy).norm(dim=-1).max() / (x.double() - y.double()).norm(dim=-1).max())
    assert attack.slope <= slope
    assert attack.slope == pytest.approx(slope, rel=1e-3)


class Backward(torch.autograd.Function):
    """The identity with a derivative of 10."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 10 * gradient


def test_under_a_custom_gradient_only_the_slope_is_a_lower_bound():
    wrong = lipschitz_lower_bound(Backward.apply, (3, 4), restarts=2, steps=4)
    assert wrong.value == pytest.approx(10.0)
    assert wrong.slope == pytest.approx(1.0)
    honest = lipschitz_lower_bound(Backward.apply, (3, 4), restarts=2, steps=4, dtype=None)
    assert honest.value == pytest.approx(1.0, rel=1e-4)
    assert honest.dtype is torch.get_default_dtype()


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_backward_without_a_derivative_leaves_the_slopes(dtype):
    module = nn.Sequential(nn.Hardsigmoid(), nn.Linear(4, 4))
    attack = lipschitz_lower_bound(module, (3, 4), norm=2, restarts=4, steps=40, dtype=dtype)
    assert (attack.found_by, attack.jacobian) == ("difference", 0.0)
    assert 0.9 <= attack.ratio(certify(module, seq_len=3, norm=2)) <= 1
    with pytest.raises(ShapeError, match="shapes cannot be multiplied"):
        lipschitz_lower_bound(module, (3, 5))


def test_bad_input(attention):
    for message, kind, function, shape, options in (
        ("expected a model", ConfigError, "bert", (3, 4), {}),
        ("unknown norm", ConfigError, attention, (3, 4), {"norm": "fro"}),
        ("tokens, width", ShapeError, attention, (4,), {}),
        (r"received \(0, 4\)", ShapeError, attention, (0, 4), {}),
        ("fails on inputs of shape", ShapeError, nn.MultiheadAttention(4, 2), (3, 5), {}),
        (r"received \(0, 1\)", ConfigError, attention, (3, 4), {"scales": (0, 1)}),
        ("start must be", ShapeError, attention, (3, 4), {"start": torch.ones(3, 4)}),
        ("expected an output", ShapeError, torch.sum, (3, 4), {}),
    ):
        with pytest.raises(kind, match=message):
            lipschitz_lower_bound(function, shape, **options)
    broken = copy.deepcopy(attention)
    broken.q_proj.weight.data.fill_(math.nan)
    with pytest.raises(ConvergenceError, match="Jacobian was NaN"):
        lipschitz_lower_bound(broken, (3, 4), steps=2)
    with pytest.raises(ConvergenceError, match=r"outputs in torch\.float32 were NaN"):
        lipschitz_lower_bound(broken, (3, 4), steps=2, dtype=None)


@pytest.mark.parametrize("norm", NORMS)
def test_inputs_where_it_is_nan_leave_the_others(norm):
    start = torch.tensor([[[1.0, 0.5]], [[9.0, 9.0]]], dtype=torch.float64)
    options = {"norm": norm, "restarts": 2, "steps": 2, "start": start}
    attack = lipschitz_lower_bound(lambda x: 3 * x / (x.detach() < 8), (1, 2), **options)
    assert attack.value == pytest.approx(3.0)


def test_a_function_without_a_gradient_is_measured_all_the_same():
    options = {"restarts": 2, "steps": 3, "dtype": None, "start": torch.randn(2, 2, 2)}
    attack = lipschitz_lower_bound(lambda x: 3 * x.detach(), (2, 2), **options)
    assert attack.value == pytest.approx(3.0, rel=1e-4)
    assert attack.jacobian == 0.0


class KinkedSlope(nn.Module):
    """(x0^2 / 2, |x1|^1.5): its slope is finite everywhere, and has no finite derivative where x1 =
    0."""

    def forward(self, x):
        return torch.stack([x[..., 0].square() / 2, x[..., 1].abs().pow(1.5)], -1)


def test_the_ascent_goes_on_where_a_coordinate_has_no_gradient():
    start = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    options = {"norm": 2, "restarts": 1, "start": start, "radius": 100.0}
    attack = lipschitz_lower_bound(KinkedSlope(), (1, 2), steps=50, **options)
    assert 2.0 < attack.value <= 100.0


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_contractive_layer_is_bounded_once_for_all_its_calls(monkeypatch, dtype):
    bounded = []
    divisor = L2SelfAttention._divisor
    monkeypatch.setattr(
        L2SelfAttention, "_divisor", lambda *args: bounded.append(1) or divisor(*args)
    )
    module = L2SelfAttention(4, 2, contractive=0.9).eval()
    options = {"restarts": 3, "steps": 4, "dtype": dtype}
    once = lipschitz_lower_bound(module, (3, 4), **options)
    # At most the check that it runs, the ascent, and the slopes in its own dtype.
    assert len(bounded) <= 4
    monkeypatch.setattr("wellposed.attack._lower_bound._frozen", lambda _: nullcontext())
    bounded.clear()
    again = lipschitz_lower_bound(module, (3, 4), **options)
    assert len(bounded) > 4
    assert torch.equal(again.input, once.input)
    assert again.value == once.value
