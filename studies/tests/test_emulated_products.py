"""Muon's steps by products in float32 are as near to exact ones as torch's own in bfloat16."""

import pytest
import torch

from wellposed_studies.frontier.emulated_products import ProductsInFloat32, bfloat16_products

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of torch.optim.Muon, by default."""


def orthogonalised(gradient):
    """Newton-Schulz of Muon in float64."""
    wide = gradient.double()
    wide = wide / wide.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide


def stepped(shape, context):
    """Return the step of Muon on a weight of zeros, and its gradient."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape)
    with context:
        torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    return -weight.detach(), weight.grad


@pytest.mark.parametrize("shape", [(24, 24), (24, 96)])
def test_it_is_as_near_to_float64_as_the_step_of_torch(shape):
    expected = orthogonalised(stepped(shape, ProductsInFloat32())[1])
    ours, theirs = (
        float((stepped(shape, context)[0].double() - expected).norm())
        for context in (ProductsInFloat32(), torch.enable_grad())
    )
    assert 0 < ours < 1.2 * theirs
    assert ours < 0.05 * float(expected.norm())


def test_float64_and_other_functions_are_left_alone():
    half = torch.full((2, 2), 1.0 + 2**-7).bfloat16()
    with ProductsInFloat32():
        assert torch.equal(half.double() @ half.double(), half.double().mm(half.double()))
        assert (half * half).dtype == torch.bfloat16
        assert (half @ half).dtype == torch.bfloat16


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_cpu_with_instructions_uses_them(monkeypatch, has_bf16):
    instructions = {"avx2": True, "avx512_bf16": has_bf16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert isinstance(bfloat16_products(), ProductsInFloat32) == (not has_bf16)
