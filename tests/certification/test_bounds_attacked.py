"""Random modules with adversarial weights, attacked by ascent in float64 in every norm: 0 above."""

import random

import pytest
import torch
from tests.support.multipliers import ADVERSARIAL, adversarial
from torch import nn

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.errors import NotLipschitzError
from wellposed.models import WellposedConfig
from wellposed.nn import (
    Block,
    CosineSelfAttention,
    DynamicTanh,
    InvertibleResidual,
    L2SelfAttention,
    MaxMin,
    PostNorm,
)

ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.ELU, nn.Tanh, nn.Sigmoid, nn.SELU, nn.Softsign,
    lambda: nn.LeakyReLU(-0.5), lambda: nn.LeakyReLU(0.2), lambda: nn.ELU(2.0), MaxMin,
)  # fmt: skip
WIDTH = 4
NORMS = ("tok", "inf", 2, "sum")
# Norm sum counts words; the parts of the variant lipschitz alone have a bound in it (B14).
NO_BOUND_IN_SUM = (InvertibleResidual, L2SelfAttention, CosineSelfAttention, PostNorm)


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
        attention=dice.choice(("l2_tied", "ball", "cosine")),
        norm=dice.choice(("none", "dyt", "post")),
        residual=dice.choice(("plain", "rezero", "convex")),
        feedforward=dice.choice(("mlp", "maxmin")),
        layer_norm_eps=0.1,
    )
    block = Block(config)
    for parameter in block.parameters():
        # Scales of ReZero begin at 0, which would leave the identity.
        start = parameter.data if parameter.data.any() else torch.ones_like(parameter)
        exponent = dice.uniform(-1, 1)
        if parameter.ndim == 2:
            exponent = dice.choice((-6, 6, exponent, exponent))
        parameter.data = start * 10**exponent
    return block


def _reached(module, certificate, seed):
    """Return the largest slope that an attack finds over the certified one."""
    attack = lipschitz_lower_bound(
        module, (3, WIDTH), norm=certificate.norm, restarts=4, steps=15, seed=seed,
        scales=(0.01, 30.0),
    )  # fmt: skip
    return max(attack.value, attack.slope) / max(certificate.total, 1e-300)


@pytest.mark.slow
@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize("part", range(20))
def test_nothing_is_above_its_bound_in_any_norm(part):
    """500 modules, each in every norm: attacked, or refused with the name of a part."""
    attacked = dict.fromkeys(NORMS, 0)
    for number in range(25 * part, 25 * part + 25):
        dice = random.Random(number)
        torch.manual_seed(number)
        module = _module(dice).double().eval()
        for norm in NORMS:
            certificate = certify(module, seq_len=3, norm=norm, cross_check=False)
            if certificate.label != "uncertified":
                assert _reached(module, certificate, number) <= 1 + 1e-9, (number, norm, module)
                attacked[norm] += 1
                continue

            parts = [part for part in module.modules() if isinstance(part, NO_BOUND_IN_SUM)]
            named = "|".join({type(part).__name__ for part in parts})
            assert norm == "sum"
            assert named
            with pytest.raises(NotLipschitzError, match=named):
                certificate.require()

    assert attacked["tok"] == attacked["inf"] == attacked[2] == 25
    assert attacked["sum"] > 0


def test_a_few_of_them():
    for number in (3, 14, 15):
        dice = random.Random(number)
        torch.manual_seed(number)
        module = _module(dice).double().eval()
        assert _reached(module, certify(module, seq_len=3, cross_check=False), 0) <= 1 + 1e-9
