"""Random modules with adversarial weights, attacked by ascent in float64 in every norm: 0 above."""

import random

import pytest
import torch
from tests.support.multipliers import ADVERSARIAL, adversarial
from torch import nn

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.models import WellposedConfig
from wellposed.nn import (
    Block,
    DynamicTanh,
    InvertibleResidual,
    MaxMin,
)

ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.ELU, nn.Tanh, nn.Sigmoid, nn.SELU, nn.Softsign,
    lambda: nn.LeakyReLU(-0.5), lambda: nn.LeakyReLU(0.2), lambda: nn.ELU(2.0), MaxMin,
)  # fmt: skip
WIDTH = 4


def _stack(dice, depth):
    widths = [WIDTH, *(dice.choice((2, 4, 8)) for _ in range(depth - 1)), WIDTH]
    kind = dice.choice([kind for kind in ADVERSARIAL if kind != "cancels the skip"])
    layers = []
    for weight in adversarial(kind, widths):
        linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
        linear.weight.data.copy_(weight)
        layers += [linear, dice.choice(ACTIVATIONS)()]
    return nn.Sequential(*layers[:-1])


def _module(dice):
    match dice.choice(("stack", "residual", "block", "nested", "dyt")):
        case "stack":
            return _stack(dice, dice.choice((1, 2, 3, 4)))
        case "residual":
            return InvertibleResidual(_stack(dice, 2))
        case "nested":
            return nn.Sequential(_stack(dice, 2), nn.Identity(), nn.Dropout(0.5), _stack(dice, 2))
        case "dyt":
            norm = DynamicTanh(WIDTH, alpha=dice.choice((-2.0, 0.5)))
            return InvertibleResidual(nn.Sequential(norm, _stack(dice, 2)))
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 8}
    config = WellposedConfig(
        **sizes,
        attention="l2_tied",
        norm=dice.choice(("none", "dyt", "post")),
        residual=dice.choice(("plain", "rezero", "convex")),
        feedforward=dice.choice(("mlp", "maxmin")),
        layer_norm_eps=0.1,
    )
    block = Block(config)
    for parameter in block.parameters():
        parameter.data.mul_(10 ** dice.uniform(-1, 1))
    return block


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_nothing_is_above_its_bound(part):
    for number in range(50):
        dice = random.Random(50 * part + number)
        torch.manual_seed(50 * part + number)
        norm = dice.choice(("tok", "inf", 2, "sum"))
        module = _module(dice).double().eval()
        certificate = certify(module, seq_len=3, norm=norm, cross_check=False)
        if certificate.label == "uncertified":
            assert norm == "sum"
            continue
        attack = lipschitz_lower_bound(
            module, (3, WIDTH), norm=norm, restarts=4, steps=15, seed=number, scales=(0.01, 30.0)
        )
        reached = max(attack.value, attack.slope)
        assert reached <= certificate.total * (1 + 1e-9), (part, number, module, norm)


def test_a_few_of_them():
    for number in (3, 14, 15):
        dice = random.Random(number)
        torch.manual_seed(number)
        module = _module(dice).double().eval()
        certificate = certify(module, seq_len=3, cross_check=False)
        attack = lipschitz_lower_bound(module, (3, WIDTH), restarts=2, steps=8)
        assert max(attack.value, attack.slope) <= certificate.total * (1 + 1e-9)
