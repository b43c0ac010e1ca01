"""Gated feed-forwards on balls: against sampled Jacobians, attacks, and the product of norms."""

import math

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.nn import InvertibleResidual

WIDTH = 6
HIDDEN = 9


def swiglu(*, bias=False):
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=2, mlp_bias=bias
    )
    return LlamaMLP(config)


def geglu(activation="gelu_pytorch_tanh"):
    config = transformers.GemmaConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_attention_heads=2, hidden_act=activation
    )
    return GemmaMLP(config)


KINDS = {
    "SwiGLU": swiglu,
    "SwiGLU with biases": lambda: swiglu(bias=True),
    "GEGLU, tanh": geglu,
    "GEGLU": lambda: geglu("gelu"),
    "ReGLU": lambda: geglu("relu"),
}
CHANGES = {
    "plain": lambda weight: weight,
    "large": lambda weight: 30 * weight,
    "small": lambda weight: 1e-3 * weight,
    "rank one": lambda weight: weight[:, :1] @ weight[:1] if weight.ndim > 1 else weight,
    "zero rows": lambda weight: (
        weight * (torch.arange(len(weight)) % 2).unsqueeze(-1) if weight.ndim > 1 else weight
    ),
}


def made(name, change="plain", seed=0):
    torch.manual_seed(seed)
    module = KINDS[name]().double().eval().requires_grad_(False)
    for weight in module.parameters():
        weight.copy_(CHANGES[change](torch.randn_like(weight) / 2))
    return module


def product_of_norms(module, radius):
    """Return the bound of B13: ``|W_d| (l |W_g| max|u| + |W_u| max|g|)``, biases of zero."""
    up, gate, down = (part.weight for part in (module.up_proj, module.gate_proj, module.down_proj))
    norms = [float(torch.linalg.matrix_norm(weight, 2)) for weight in (gate, up, down)]
    largest_up, largest_gate = (float(part.norm(dim=-1).max()) * radius for part in (up, gate))
    return norms[2] * (1.129 * norms[0] * largest_up + norms[1] * largest_gate)


def steepest(module, centre, radius, count=400):
    """Return the largest norm of the Jacobian at points of the ball, most of them on its surface."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    sizes = torch.rand(count, 1, generator=generator, dtype=torch.float64).pow(0.1)
    points = centre + radius * sizes * drawn / drawn.norm(dim=-1, keepdim=True)
    jacobians = torch.func.vmap(torch.func.jacrev(module))(points)
    return float(torch.linalg.matrix_norm(jacobians, 2).max())


@pytest.mark.parametrize("radius", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", KINDS)
def test_no_point_of_the_ball_is_steeper(name, change, radius):
    module = made(name, change)
    total = certify(module, radius=radius, cross_check=False).total
    assert steepest(module, torch.zeros(WIDTH).double(), radius) <= total * (1 + 1e-9) < math.inf
    if name != "SwiGLU with biases":
        assert total <= product_of_norms(module, radius) * (1 + 1e-6)


@pytest.mark.parametrize("radius", [1e-3, 0.3, 2.0])
@pytest.mark.parametrize("name", KINDS)
def test_no_point_near_the_inputs_is_steeper(name, radius):
    module = made(name, seed=1)
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(2, 1, WIDTH, generator=generator, dtype=torch.float64)
    near = certify(module, around=x, radius=radius, cross_check=False)
    assert "around the inputs (B23)" in near.form
    attained = max(steepest(module, centre, radius) for centre in x[:, 0])
    assert attained <= near.total * (1 + 1e-9)
    ball = float(x.norm(dim=-1).max()) + radius
    assert near.total <= certify(module, radius=ball, cross_check=False).total * (1 + 1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_an_attack_of_the_block_with_its_skip_stays_below(name):
    module = made(name, seed=2)
    block = InvertibleResidual(nn.Sequential(module))
    certificate = certify(block, radius=1.0, cross_check=False)
    attack = lipschitz_lower_bound(block, (1, WIDTH), radius=1.0, restarts=4, steps=40)
    assert attack.value <= certificate.total * (1 + 1e-9)
    alone = certify(module, radius=1.0, cross_check=False).total
    assert certificate.total <= 1 + alone
    assert "with the skip" in certificate.layers[0].form or certificate.total < 1 + alone


def test_on_all_inputs_and_with_another_gate_there_is_no_bound():
    assert "no global Lipschitz constant; pass radius=" in certify(made("SwiGLU")).table()
    other = made("SwiGLU")
    other.act_fn = nn.Softsign()
    table = certify(other, radius=1.0).table()
    assert "gate Softsign are not known on an interval" in table


def test_norms_inf_and_sum_are_covered():
    module = made("GEGLU")
    for norm in ("inf", 2, "sum"):
        total = certify(module, seq_len=2, norm=norm, radius=1.0, cross_check=False).total
        attack = lipschitz_lower_bound(
            module, (2, WIDTH), norm=norm, radius=1.0, restarts=4, steps=20
        )
        assert attack.value <= total * (1 + 1e-9)
