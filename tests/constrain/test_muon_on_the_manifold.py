"""Muon beside ``to="orthogonal"`` is manifold Muon on square weights, and SPEL on tall and wide ones.

The references are in float64, by SVD: the dual ascent of Bernstein 2025 for
``min <G, A>, |A|_2 <= lr, A^T W + W^T A = 0``, and ``polar(W - lr polar(T))`` of arXiv 2601.21487 with
the tangent gradient T.
"""

import math

import pytest
import torch
import transformers as hf
from torch import nn

import wellposed as wp
from wellposed.constrain import MuonAndAdamW

RATE = 0.02


def polar(matrix):
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def cosine(one, other):
    return float((one * other).sum() / (one.norm() * other.norm()))


def dual_ascent(point, gradient, steps=4000):
    """The step of manifold Muon for a budget of 1, the best of a long ascent."""
    scaled = gradient / torch.linalg.matrix_norm(gradient, 2)
    dual = torch.zeros(point.shape[1], point.shape[1], dtype=torch.float64)
    best = None
    smallest = math.inf
    for count in range(steps):
        step = -polar(scaled + 2 * point @ dual)
        normal = step.mT @ point + point.mT @ step
        if float(normal.norm()) < smallest:
            best = step
            smallest = float(normal.norm())
        dual += 0.1 / math.sqrt(1 + count) * normal
    return best, smallest


def tangent(point, gradient):
    product = point.mT @ gradient
    return gradient - point @ (product + product.mT) / 2


def start(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight.data = torch.randn(rows, columns, generator=generator)
    # One scale for all shapes: Muon's own factor would lengthen the steps of tall weights.
    muon = torch.optim.Muon([layer.weight], lr=RATE, momentum=0.0, weight_decay=0.0, nesterov=False,
                            adjust_lr_fn="original")  # fmt: skip
    handle = wp.constrain_(layer, muon, where="weight")
    layer.weight.grad = torch.randn(rows, columns, generator=generator)
    return layer, muon, handle


@pytest.mark.parametrize("side", [4, 8])
def test_a_square_weight_takes_the_step_of_the_dual_ascent(side):
    layer, muon, handle = start(side, side)
    point, gradient = (x.detach().double().clone() for x in (layer.weight, layer.weight.grad))
    muon.step()
    step = layer.weight.detach().double() - point
    skew = point.mT @ gradient
    closed = -point @ polar(skew - skew.mT)
    ascended, residue = dual_ascent(point, gradient)

    # The closed form is feasible, and the ascent, an independent route, ends at the same value.
    assert torch.linalg.matrix_norm(closed, 2) <= 1 + 1e-6
    assert (closed.mT @ point + point.mT @ closed).abs().max() <= 1e-6
    assert residue <= 0.05
    assert float((gradient * ascended).sum()) == pytest.approx(
        float((gradient * closed).sum()), rel=0.02
    )
    # Muon's five products give singular values of 0.7 to 1.2 in bfloat16.
    assert cosine(step, closed) >= 0.97
    assert 0.6 * RATE <= torch.linalg.matrix_norm(step, 2) <= 1.3 * RATE
    assert handle.error().worst <= 1e-5


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_a_rectangular_weight_takes_the_step_of_spel(shape):
    layer, muon, handle = start(*shape)
    point, gradient = (x.detach().double().clone() for x in (layer.weight, layer.weight.grad))
    muon.step()
    step = layer.weight.detach().double() - point
    if shape[0] < shape[1]:
        point = point.mT
        gradient = gradient.mT
        step = step.mT
    scale = RATE * math.sqrt(max(1.0, shape[0] / shape[1]))
    expected = polar(point - scale * polar(tangent(point, gradient))) - point
    assert cosine(step, expected) >= 0.97
    assert handle.error().worst <= 1e-5


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
SIZES |= {"intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXED = {**SIZES, "num_key_value_heads": 1, "num_local_experts": 3, "head_dim": 8}


def test_the_budget_holds_for_every_expert_and_for_momenta():
    """Momenta stay tangent: their skew coordinates are left-invariant."""
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**MIXED))
    optimizer = MuonAndAdamW(model, lr=RATE, where="layers")
    handle = wp.constrain_(model, optimizer, where="layers")
    query = model.model.layers[0].self_attn.q_proj.weight
    for seed in range(5):
        ids = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        before = query.detach().double().clone()
        optimizer.step()
        step = before.mT @ (query.detach().double() - before)
        assert torch.linalg.matrix_norm(step, 2) <= 1.3 * RATE
        assert (step + step.mT).norm() <= RATE * step.norm()
    assert handle.error().worst <= 1e-5
