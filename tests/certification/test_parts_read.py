"""A part that a rule reads must have the exact class and form of the rule's proof; otherwise it is
named."""

import functools
import math

import pytest
import torch
from torch import nn

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import LayerBound, certify, register_rule
from wellposed.models import build_model
from wellposed.nn import DotProductAttention
from wellposed.nn.attention import HeadProjections


def _with_norms(**options):
    torch.manual_seed(0)
    module = DotProductAttention(8, 2, qk_norm=True, **options).double().eval()
    module.requires_grad_(False)
    return module


def _attacked(module, norm="tok", width=8):
    """Return attack / certificate on the unit ball; 0 if refused."""
    certificate = certify(module, seq_len=6, norm=norm, radius=1.0, cross_check=False)
    if math.isinf(certificate.total):
        assert all(layer.reason for layer in certificate.uncertified)
        return 0.0
    attack = lipschitz_lower_bound(
        module, (6, width), norm=norm, radius=1.0, restarts=8, steps=60, seed=1
    )
    return attack.ratio(certificate)


@pytest.mark.parametrize("norm", ["tok", 2])
def test_the_bias_of_a_norm_of_queries_and_keys_counts(norm):
    module = _with_norms(eps=1e-2)
    plain = certify(module, seq_len=6, radius=1.0, norm=norm, cross_check=False).total
    for name in ("q_norm", "k_norm"):
        biased = nn.LayerNorm(4, eps=1e-2).double()
        biased.bias.data.copy_(30 * torch.randn(4))
        biased.weight.data.copy_(0.1 * torch.ones(4))
        setattr(module, name, biased)
    module.requires_grad_(False)
    assert 0.05 < _attacked(module, norm) <= 1
    assert certify(module, seq_len=6, radius=1.0, norm=norm, cross_check=False).total != plain


def test_a_wrapper_that_lends_its_name_is_seen():
    """`functools.wraps` copies the names of the wrapped function to its replacement."""
    original = nn.Linear.forward

    @functools.wraps(original)
    def louder(self, x):
        return 1.76 * original(self, x)

    nn.Linear.forward = louder
    try:
        certificate = certify(nn.Sequential(nn.Linear(4, 4)), seq_len=2, cross_check=False)
    finally:
        nn.Linear.forward = original
    assert "class's forward" in certificate.uncertified[0].reason


def test_wrappers_of_torch_are_looked_through():
    class Guarded(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    @register_rule(Guarded)
    def rule(module: Guarded, site) -> LayerBound:
        return LayerBound(site.operator_norm(module.weight), "as Linear")

    assert math.isfinite(certify(Guarded(4, 4), seq_len=2).total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_in_float64_keeps_the_eps_of_a_norm_that_has_none(dtype):
    norm = nn.RMSNorm(4).to(dtype)
    certificate = certify(norm, seq_len=2)
    assert certificate.total == pytest.approx(torch.finfo(torch.float32).eps ** -0.5)
    start = torch.full((1, 2, 4), 1e-9, dtype=torch.float64)
    attack = lipschitz_lower_bound(norm, (2, 4), start=start, restarts=1, steps=5)
    assert attack.ratio(certificate) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_a_compiled_part_is_what_it_was(name):
    module = DotProductAttention(8, 2).eval()
    plain = certify(module, seq_len=4, radius=1.0)
    setattr(module, name, torch.compile(getattr(module, name), backend="eager"))
    module.v_proj.compile(backend="eager")
    assert certify(module, seq_len=4, radius=1.0).total == plain.total
    module.v_proj._compiled_call_impl = len
    assert "_compiled_call_impl" in certify(module, seq_len=4, radius=1.0).uncertified[0].reason


# Inputs that transformers reads from shapes, from its own modules, and from callers.


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.Module, "_call_impl"),
        (nn.Module, "_wrapped_call_impl"),
        (nn.Linear, "_call_impl"),
        (HeadProjections, "_tokens"),
    ],
)
def test_a_method_behind_forward_that_was_replaced(owner, name, monkeypatch):
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def twice(self, *args, **kwargs):
        return 2 * inner(self, *args, **kwargs)

    if owner is HeadProjections:
        module = DotProductAttention(8, 2)
    else:
        module = nn.Linear(8, 8)
    assert certify(module, seq_len=3, radius=1.0).total < math.inf
    monkeypatch.setattr(owner, name, twice, raising=False)
    certificate = certify(module, seq_len=3, radius=1.0, cross_check=False)
    assert f"class's {name}" in certificate.uncertified[0].reason


def test_a_certificate_says_that_it_leaves_out_prefixes():
    model = build_model("wellposed", "causal_lm", vocab_size=9, attention="l2_tied").eval()
    assert "without past_key_values" in certify(model, seq_len=4).table()
    assert "past_key_values" not in certify(nn.Linear(4, 4), seq_len=4).table()
