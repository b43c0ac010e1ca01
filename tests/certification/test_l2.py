"""The core claims: no input and no weights exceed a bound of L2 attention. The two published claims
that fail do fail, and outputs stay in the certified ball."""

import math
from functools import partial

import pytest
import torch
from tests.support.certificates import rows
from torch import nn

from wellposed.linalg import (
    L2Layer,
    kim2021_bound,
    l2_constants,
)
from wellposed.nn import L2SelfAttention

NORMS = ("tok", "inf", 2)
MASKS = ("full", "causal", "any")
randn, rand = (partial(draw, dtype=torch.float64) for draw in (torch.randn, torch.rand))
# (tokens, width, heads), weight draws, inputs per draw
SMALL = [(2, 1, 1), (3, 4, 2), (3, 8, 8), (5, 6, 3), (8, 4, 1), (12, 2, 2)]
LARGE = [(33, 2, 2), (64, 1, 1)]
CASES = [(shape, 10, 48, torch.float64) for shape in SMALL]
CASES += [(shape, 4, 24, torch.float32) for shape in SMALL]
CASES += [(shape, 2, 10, dtype) for shape in LARGE for dtype in (torch.float64, torch.float32)]
# Rounding of the Jacobian, not of the bound: float32 logits are off by a few 1e-6 relative, float64
# by 1e-14.
SLACK = {torch.float64: 1e-9, torch.float32: 1e-4}


def _weights(shape):
    """Draw W, R, W_O at log-uniform scales in 1e-3..1e3; sometimes of low rank, sometimes equal
    across heads."""
    _, width, heads = shape
    dim = width // heads
    scale = lambda: 10 ** (6 * rand(()) - 3)  # noqa: E731
    shapes = ((heads, width, dim), (heads, dim, dim), (heads, dim, width))
    w, r, o = (randn(*shape) * scale() for shape in shapes)
    kind = int(torch.randint(4, ()))
    if kind == 1:
        w = w[:1].expand_as(w).clone()
    elif kind == 2:
        r = torch.eye(dim, dtype=torch.float64).expand_as(r) * scale()
    elif kind == 3:
        o = o * torch.logspace(-2, 2, heads, dtype=torch.float64)[:, None, None]
    return w, r, o


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("shape", "draws", "inputs", "dtype"), CASES, ids=str)
def test_no_random_case_exceeds_the_bound(reference, shape, draws, inputs, dtype, mask):
    tokens, width, _ = shape
    torch.manual_seed(sum(shape) * 7 + MASKS.index(mask))
    for _ in range(draws):
        w, r, o = _weights(shape)
        bias = reference.mask_bias(mask, tokens)
        # Inputs around the scale at which squared distances of z are of order log N, from far below
        # to far above.
        spread = 10 ** (4 * rand(inputs, 1, 1) - 2)
        x = randn(inputs, tokens, width) * spread / w.norm()
        x[::3, 0] *= 3
        tau = float(10 ** (torch.rand(()) - 0.5))
        parts = [part.to(dtype) for part in (w, r, o, bias)]
        jacobian = reference.jacobians(
            lambda y: reference.l2_attention(y, *parts, tau),  # noqa: B023
            x.to(dtype),
        )
        assert jacobian.isfinite().all()
        for norm in NORMS:
            slope = float(reference.norms[norm](jacobian.double()).max())
            layer = L2Layer(*parts[:3])
            constants = l2_constants(tokens, mask=mask)
            bound = float(layer.bound(constants, norm=norm).value)
            assert slope <= bound * (1 + SLACK[dtype]), (norm, slope / bound)
            cheap = layer.bound(constants, norm=norm, per_head_only=True)
            assert bound <= float(cheap.value) * (1 + 1e-9)


def test_the_printed_second_power_fails_and_the_fourth_holds(reference):
    """kim2021 Theorem 3.2, p=2, as printed: violated tenfold. D = H = 1, W = 10, X = (0, 5): J =
    100 I."""
    one, ten = (torch.full((1, 1, 1), size, dtype=torch.float64) for size in (1.0, 10.0))
    r = ten.mT @ one
    x = torch.tensor([[[0.0], [5.0]]], dtype=torch.float64)
    jacobian = reference.jacobians(
        lambda y: reference.l2_attention(y, ten, r, one, torch.zeros(2, 2)), x
    )
    slope = float(reference.norms[2](jacobian))
    assert slope == pytest.approx(100.0)
    assert slope > 3 * float(kim2021_bound(ten, one, one[0], seq_len=2, norm=2, as_printed=True))
    assert slope <= float(kim2021_bound(ten, one, one[0], seq_len=2, norm=2))
    ours = L2Layer(ten, r, one).bound(l2_constants(2, mask="full"), norm=2)
    assert slope <= float(ours.value)


def test_the_tempting_inf_constant_fails_and_ours_holds(reference):
    """(4c + 1)/sqrt d would be smaller than 2c + (2c + 1)/sqrt d, but is false: theory note B1', d
    = 64, N = 2."""
    d = 64
    eye = torch.eye(d, dtype=torch.float64)[None]
    direction = torch.ones(d, dtype=torch.float64)
    direction[0] = 1 + math.sqrt(d)
    x = torch.zeros(1, 2, d, dtype=torch.float64)
    x[0, 1] = 1.1307 * d**0.25 * direction / direction.norm()
    r = eye / math.sqrt(d)
    jacobian = reference.jacobians(
        lambda y: reference.l2_attention(y, eye, r, eye, torch.zeros(2, 2), 1 / math.sqrt(d)), x
    )
    slope = float(reference.norms["inf"](jacobian))
    c = l2_constants(2).c
    assert slope == pytest.approx(0.5606, abs=1e-3)
    assert slope > 2 * (4 * c + 1) / math.sqrt(d)
    assert slope <= float(L2Layer(eye, r, eye).bound(l2_constants(2), norm="inf").value)


@pytest.mark.parametrize("norm", ["inf", 2])
def test_our_bound_is_never_above_kims(norm):
    """For the same map, A_h = W_h W_h^T / sqrt d, ours must not exceed the paper's (corrected)
    bound."""
    for tokens in (2, 17, 512):
        w, v = randn(2, 4, 12, 3).unbind()
        o = randn(12, 12)
        weights = (w, w.mT @ v / math.sqrt(3), o.unflatten(0, (4, 3)))
        ours = L2Layer(*weights).bound(l2_constants(tokens), norm=norm).value
        assert ours <= kim2021_bound(w, v, o, seq_len=tokens, norm=norm)


def test_constant_four_is_optimal_in_one_dimension(reference):
    """D = 1, half of the other tokens on each side, sqrt(1 + c) away: the true inf norm is 4c + (1
    - c)/(1 + c) (B1)."""
    tokens = 41
    c = l2_constants(tokens).c
    x = torch.full((1, tokens, 1), math.sqrt(1 + c), dtype=torch.float64)
    x[0, 1::2] *= -1
    x[0, 0] = 0
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    jacobian = reference.jacobians(
        lambda y: reference.l2_attention(y, one, one, one, torch.zeros(tokens, tokens)), x
    )
    slope = float(reference.norms["inf"](jacobian))
    assert slope == pytest.approx(4 * c + (1 - c) / (1 + c), rel=1e-6)
    assert slope <= float(L2Layer(one, one, one).bound(l2_constants(tokens), norm="inf").value)


TINY = 1e-9


@pytest.mark.parametrize("bias", ["values", "output", "both", "against each other"])
@pytest.mark.parametrize("options", [{}, {"contractive": 0.9}], ids=["plain", "contractive"])
def test_the_ball_is_that_of_the_worst_number_of_tokens(options, bias):
    module = L2SelfAttention(4, 2, **options).double().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                if bias in ("both", "against each other") or (bias == "output") == name.startswith(
                    "o_"
                ):
                    parameter.normal_()
        zeros = [torch.zeros(1, count, 4, dtype=torch.float64) for count in range(1, 7)]
        if bias == "against each other":
            constant = module(zeros[-1])[0, 0] - module.o_proj.bias
            module.o_proj.bias.copy_(-2 * constant)
        largest = max(float(module(x).norm(dim=-1).max()) for x in zeros)
    model = nn.Sequential(module, nn.Linear(4, 4).double())
    after = rows(model, 6, radius=TINY)["1"].radius
    assert largest <= after
    assert after == pytest.approx(largest, rel=1e-4, abs=1e-6)
