"""Every registered rule has samples; each is what it says it is: certified or refused, of the
shapes it promises."""

import math

import pytest
import torch
from tests.support.sample import MAX_TOKENS, output_of
from tests.support.samples import SAMPLES

from wellposed.certification import certify

CASES = [
    pytest.param(kind, sample, id=f"{kind.__name__}-{index}")
    for kind, samples in SAMPLES.items()
    for index, sample in enumerate(samples)
]


@pytest.mark.parametrize(("kind", "sample"), CASES)
def test_a_sample_is_what_it_says(kind, sample):
    module = sample.build(8)
    assert type(module) is kind
    assert not module.training
    x = 0.1 * torch.randn(2, 5, 8)
    if sample.runs_alone and (sample.certifiable or not sample.two_inputs):
        with torch.no_grad():
            y = output_of(module, x)
            output_of(module, torch.randn(1, sample.tokens or MAX_TOKENS, 8))
        assert (y.shape == x.shape) or not sample.keeps_width
    for norm in sample.norms:
        total = certify(module, seq_len=5, norm=norm, radius=1.0).total
        assert math.isfinite(total) == sample.certifiable
        if sample.certifiable:
            assert math.isinf(certify(module, seq_len=5, norm=norm).total) == sample.needs_ball
