"""Rules that did not describe the module as it runs, one by one."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.samples import SAMPLES
from torch import nn

from wellposed.certification import LayerBound, certify, register_rule
from wellposed.nn import L2SelfAttention, ReZeroResidual, TransformerStack


@pytest.mark.parametrize("norm", ["tok", "inf", 2])
def test_a_module_that_stands_twice_counts_twice(norm):
    """named_children() drops repeated modules: 10 was certified where the slope is 100."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data = 10 * torch.eye(4)
    for twice in (
        nn.Sequential(layer, layer),
        nn.Sequential(nn.Sequential(layer), nn.Sequential(layer)),
    ):
        certificate = certify(twice, seq_len=3, norm=norm)
        assert certificate.total == pytest.approx(100, rel=1e-5)
        assert certificate.total >= 100
        assert len([row for row in certificate.layers if row.module == "Linear"]) == 2


def test_a_layer_shared_by_a_stack_counts_at_each_place():
    sample = SAMPLES[TransformerStack][1]
    stack = sample.build(8)
    stack.layers[1] = stack.layers[0]
    alone = certify(stack.layers[0], seq_len=5, mask="full").total
    ends = certify(stack.final_norm, seq_len=5).total
    assert certify(stack, seq_len=5).total == pytest.approx(alone**2 * ends, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [False, True])
def test_an_rms_norm_without_eps_takes_that_of_its_input(dtype, affine):
    """2,896 was certified in float64, where the slope at 0 is 6.7e7. torch computes half precision
    in float32."""
    norm = nn.RMSNorm(4, elementwise_affine=affine, dtype=dtype)
    total = certify(norm, seq_len=1, cross_check=False).total
    eps = (
        torch.finfo(dtype).eps
        if dtype in (torch.float32, torch.float64)
        else torch.finfo(torch.float32).eps
    )
    step = torch.full((1, 1, 4), 1e-3 * math.sqrt(eps), dtype=torch.float64)
    step = (
        step.to(dtype) if dtype is not torch.float16 else torch.full((1, 1, 4), 6e-8, dtype=dtype)
    )
    slope = float(norm(step).detach().double().norm() / step.double().norm())
    assert slope <= total * (1 + torch.finfo(dtype).eps), "the output is rounded"
    if affine or dtype is torch.float64:
        assert total == pytest.approx(1 / math.sqrt(eps), rel=1e-6)


def test_an_rms_norm_without_weights_has_the_dtype_of_the_model_around_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4, elementwise_affine=False))
    assert certify(model, seq_len=1).layers[1].lipschitz == pytest.approx(2896.3, rel=1e-4)
    assert certify(model.double(), seq_len=1).layers[1].lipschitz == pytest.approx(
        6.7109e7, rel=1e-4
    )


@pytest.mark.parametrize("norm", [nn.LayerNorm(4, eps=-1e-3), nn.RMSNorm(4, eps=-1e-3)])
def test_a_norm_with_a_pole_is_refused(norm):
    assert "negative" in certify(norm, seq_len=1).uncertified[0].reason


def test_softplus_jumps_at_its_threshold():
    jump = nn.Softplus(beta=1.0, threshold=2.0)
    below, above = torch.tensor([[2.0 - 1e-6]]), torch.tensor([[2.0 + 1e-6]])
    assert float((jump(above) - jump(below)).abs() / 2e-6) > 1e4
    assert "jumps" in certify(jump, seq_len=1).uncertified[0].reason
    assert "jumps" in certify(nn.Softplus(threshold=-1000), seq_len=1).uncertified[0].reason
    assert certify(nn.Softplus(threshold=40), seq_len=1).total == 1.0
    # torch's own threshold, 20, jumps by 2e-9: float64 sees it, float32 does not.
    in_model = nn.Sequential(nn.Linear(2, 2), nn.Softplus())
    assert math.isfinite(certify(in_model, seq_len=1).total)
    assert math.isinf(certify(in_model.double(), seq_len=1).total)


@pytest.mark.parametrize(
    "activation", [nn.ELU(alpha=3.0, inplace=True), nn.SELU(inplace=True), nn.SiLU(inplace=True)]
)
def test_an_activation_in_place_changes_what_a_residual_adds(activation):
    assert "inplace" in certify(activation, seq_len=1).uncertified[0].reason
    assert certify(nn.ReLU(inplace=True), seq_len=1).total == 1.0


def test_a_product_of_small_bounds_is_not_zero():
    layers = nn.Sequential(*(nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)))
    for layer in layers:
        nn.init.constant_(layer.weight, 1e-200)
    certificate = certify(layers, seq_len=1)
    assert certificate.total > 0
    assert float(certificate.radius(torch.tensor([1.0, 0.0]))) < math.inf


def test_a_residual_of_another_class_says_what_it_computes_or_is_refused():
    class Silent(nn.Module):
        def forward(self, x, branch):
            return x + 100 * branch

    class Half(nn.Module):
        def forward(self, x, branch):
            return x + 0.5 * branch

        def coefficients(self):
            return 1.0, 0.5

    class Inherited(ReZeroResidual):
        def forward(self, x, branch):
            return x + 100 * branch

    block = SAMPLES[TransformerStack][0].build(8).layers[0]
    plain = certify(block, seq_len=4).total
    for residual, refused in ((Silent(), True), (Inherited(), True), (Half(), False)):
        block.attention_residual = residual
        total = certify(block, seq_len=4).total
        assert math.isinf(total) if refused else total < plain


def test_a_projection_of_another_make_is_refused_in_words():
    layer = SAMPLES[L2SelfAttention][0].build(8)
    layer.q_proj = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))
    (row,) = certify(layer, seq_len=4).uncertified
    assert "a part lacks what the rule of L2SelfAttention reads" in row.reason


def test_a_parametrised_weight_without_values_is_refused_in_words():
    empty = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)).to("meta")
    assert "on the meta device" in certify(nn.Sequential(empty), seq_len=2).uncertified[0].reason


def test_a_rule_may_read_a_part_of_another_class_by_itself():
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 3.0

        def forward(self, x):
            return self.factor * x

    class Amplifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = Gain()

        def forward(self, x):
            return self.gain(x)

    @register_rule(Amplifier)
    def unsaid(module: Amplifier, site) -> LayerBound:
        return LayerBound(module.gain.factor, "gain")

    assert "gain is" in certify(Amplifier(), seq_len=1).uncertified[0].reason

    @register_rule(Amplifier)
    def said(module: Amplifier, site) -> LayerBound:
        site.reads(module.gain)
        return LayerBound(module.gain.factor, "gain")

    amplifier = Amplifier()
    assert certify(amplifier, seq_len=1).total == 3.0
    amplifier.gain.register_forward_hook(lambda module, args, output: 2 * output)
    assert "forward hook" in certify(amplifier, seq_len=1).uncertified[0].reason


def test_the_watching_hooks_of_a_penalty_are_no_reason_to_refuse():
    import wellposed as wp
    from wellposed.models import WellposedForSequenceClassification

    model = SAMPLES[WellposedForSequenceClassification][0].build(8)
    before = certify(model, seq_len=5).total
    penalty = wp.OrthogonalityPenalty(model, affinity=1e-6)
    assert certify(model, seq_len=5).total == before
    del penalty
