"""What `certify` and its parts compute does not depend on the default dtype of the caller."""

import pytest
import torch
from torch import nn

from wellposed.certification import (
    attain,
    certified_bound,
    certify,
    cosine_attention_bound,
    layer_norm_bound,
    local_radius,
)
from wellposed.certification.bounds import (
    Matrix,
    Slopes,
    branch_bound,
    chain_bound,
    convolution_norm,
    network_of,
    tightest_bound,
)
from wellposed.models import WellposedConfig, WellposedForSequenceClassification
from wellposed.nn import DynamicErf, DynamicTanh, InvertibleResidual, MaxMin, TransJectStack

WIDTH = 8
TOKENS = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float64)


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def classifier(attention="dot_product", norm="pre", **more):
    config = WellposedConfig(
        hidden_size=WIDTH, num_attention_heads=2, num_hidden_layers=1, attention=attention, norm=norm,
        vocab_size=20, num_labels=3, **more,
    )  # fmt: skip
    return WellposedForSequenceClassification(config)


def between(*activations):
    return nn.Sequential(nn.Linear(WIDTH, 16), *activations, nn.Linear(16, WIDTH))


def rows(module, **asked):
    certificate = certify(module, **{"seq_len": TOKENS, "cross_check": False, **asked})
    numbers = [(layer.lipschitz, layer.radius) for layer in certificate.layers]
    return [certificate.total, *numbers]


def around(module):
    return rows(module, around=drawn(2, TOKENS, WIDTH), radius=0.03)


def radii(module):
    certificate = certify(module, seq_len=TOKENS, radius=2.0, cross_check=False)
    logits = drawn(2, 3)
    return [
        certificate.radius(logits, largest_token=largest).tolist()
        for largest in (1.9, [1.9, 1.95], torch.tensor(1.9, dtype=torch.float64))
    ]


def attained(module):
    certificate = certify(module, seq_len=TOKENS, radius=1.3, cross_check=False)
    return attain(certificate, steps=3).attained


def functions(_module):
    maps = drawn(2, WIDTH, 4), drawn(2, 4, WIDTH)
    attention = [
        float(
            cosine_attention_bound(
                maps[0], maps[0], maps[0], maps[1], eps=0.01, temperature=0.3, value_scale=0.7,
                seq_len=5, norm=norm,
            ).value
        )
        for norm in ("tok", 2, "inf")
    ]  # fmt: skip
    links = [Matrix(drawn(6, WIDTH)), Slopes(-0.3, 0.7), Matrix(drawn(WIDTH, 6, seed=1))]
    chain = [*links, Slopes(0.1, 0.9), Matrix(drawn(3, WIDTH, seed=2))]
    return [
        *attention,
        layer_norm_bound(0.3, 1e-5, WIDTH),
        branch_bound([network_of(links)], [0.3], [0.7]),
        chain_bound(network_of(chain)),
        tightest_bound(links, 0.3, 0.7).value,
        convolution_norm(drawn(3, 2, 3)),
    ]


ROUTES = {
    **{
        f"{attention}, norm {norm}": (
            lambda attention=attention: classifier(attention, "none"),
            lambda module, norm=norm: rows(module, norm=norm, radius=1.3),
        )
        for attention in ("l2_tied", "l2_contractive", "cosine", "dot_product", "ball", "inverse_d")
        for norm in ("tok", 2, "inf")
    },
    "norm sum": (lambda: classifier("ball", "none"), lambda module: rows(module, norm="sum")),
    **{
        f"activation {type(part).__name__}": (lambda part=part: between(part), rows)
        for part in (
            nn.LeakyReLU(0.3), nn.ELU(1.3), nn.PReLU(), nn.GELU(), nn.SiLU(), nn.Mish(), nn.SELU(),
            nn.Hardsigmoid(), nn.Softplus(threshold=40), MaxMin(), DynamicTanh(16), DynamicErf(16),
            nn.LayerNorm(16), nn.RMSNorm(16),
        )
    },
    "two activations": (lambda: between(nn.LeakyReLU(0.3), nn.LeakyReLU(1.7)), rows),
    "a slope": (lambda: nn.LeakyReLU(1.3), rows),
    "chain": (lambda: nn.Sequential(between(nn.LeakyReLU(0.1)), nn.ELU(0.7), nn.Linear(8, 3)), rows),
    "skip": (lambda: InvertibleResidual(between(nn.LeakyReLU(0.3))), rows),
    "dropout": (lambda: between(nn.Dropout(0.3)).train(), rows),
    "convolution": (lambda: nn.Conv1d(4, 5, 3), lambda module: rows(module, norm=2)),
    "stack": (lambda: TransJectStack(WIDTH, 2), lambda module: rows(module, norm=2)),
    "encoder of torch": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
        lambda module: rows(module, radius=1.3),
    ),
    **{
        f"around, {attention}": (lambda attention=attention: classifier(attention), around)
        for attention in ("dot_product", "cosine", "ball", "l2_tied")
    },
    **{
        f"around, {type(part).__name__}": (lambda part=part: between(part), around)
        for part in (nn.ReLU(), nn.GELU(), nn.Tanh(), nn.LeakyReLU(0.3))
    },
    "radius": (lambda: classifier("ball", "none"), radii),
    "local_radius": (
        classifier,
        lambda module: local_radius(module, drawn(2, TOKENS, WIDTH), steps=4).tolist(),
    ),
    "certified_bound": (
        lambda: between(nn.LeakyReLU(0.3)),
        lambda module: [float(certified_bound(module).detach())],
    ),
    "attain": (lambda: classifier("ball", "none"), attained),
    "functions": (nn.Identity, functions),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
def test_the_default_dtype_rounds_nothing(name):
    make, compute = ROUTES[name]
    torch.manual_seed(0)
    module = make()
    module = module if name == "dropout" else module.eval()
    expected = compute(module)
    before = torch.get_default_dtype()
    try:
        for dtype in DTYPES:
            torch.set_default_dtype(dtype)
            assert compute(module) == expected, dtype
    finally:
        torch.set_default_dtype(before)
