"""Spectra: the diagonal of the Gram matrix in a basis, padding, causality, the reconstruction
loss."""

import pytest
import torch
from tests.support.close import within
from tests.support.refusal import bad_shape
from torch.testing import assert_close

from wellposed.nn import GramSpectrum, LearnedSpectrum, TransJectStack

D = 6


def spectrum(**options):
    return GramSpectrum(D, **options).double()


def gram_diagonal(module, tokens):
    basis = module.basis.weight.mT
    return (basis.mT @ (tokens.mT @ tokens) @ basis).diagonal()


@pytest.mark.parametrize("normalization", ["max", "trace"])
def test_is_the_normalised_diagonal(normalization):
    module = spectrum(normalization=normalization, eps=0.3)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    for sample, sigma in zip(x, module(x), strict=True):
        g = gram_diagonal(module, sample)
        total = g.max() if normalization == "max" else g.sum()
        assert_close(sigma, g / (total + 0.3), rtol=1e-12, atol=0)
        assert sigma.max() < 1


def test_is_the_true_spectrum_in_the_basis_of_eigenvectors():
    x = torch.randn(1, 20, D, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(x[0].mT @ x[0])
    module = spectrum(eps=1e-12)
    with torch.no_grad():
        module.basis.weight.copy_(vectors.mT)
    assert_close(module(x)[0], values / values.max(), rtol=1e-9, atol=0)
    assert module.reconstruction_loss(x) < 1e-12


def test_padding_enters_nothing():
    module, x = spectrum(), torch.randn(1, 9, D, dtype=torch.float64)
    padding = torch.zeros(1, 9, dtype=torch.bool)
    padding[0, 5:] = True
    assert_close(module(x, key_padding_mask=padding), module(x[:, :5]), rtol=1e-12, atol=0)
    assert_close(
        module.reconstruction_loss(x, key_padding_mask=padding),
        module.reconstruction_loss(x[:, :5]),
        rtol=1e-9,
        atol=0,
    )


@pytest.mark.parametrize("normalization", ["max", "trace"])
def test_causal_sigma_is_that_of_the_prefix(normalization):
    module, x = spectrum(normalization=normalization), torch.randn(2, 5, D, dtype=torch.float64)
    sigma = module(x, is_causal=True)
    for t in range(5):
        assert_close(sigma[:, t], module(x[:, : t + 1]), rtol=1e-12, atol=0)


def test_half_precision_sums_do_not_stall():
    # In bfloat16 a sum of ones stops at 256.
    module = GramSpectrum(2, normalization="trace").bfloat16()
    with torch.no_grad():
        module.basis.weight.copy_(torch.eye(2))
    x = torch.ones(1, 4000, 2, dtype=torch.bfloat16)
    x[:, 1000:, 1] = 0
    assert module(x).dtype is torch.bfloat16
    assert_close(module(x).float(), torch.tensor([[0.8, 0.2]]), rtol=4e-3, atol=0)


@pytest.mark.parametrize("tokens", [3, 20])
def test_reconstruction_loss_is_the_formula_and_free_of_size_and_length(tokens):
    module, x = spectrum(), torch.randn(2, tokens, D, dtype=torch.float64)
    basis = module.basis.weight.mT
    parts = []
    for sample in x:
        gram = sample.mT @ sample
        rebuilt = basis @ torch.diag(gram_diagonal(module, sample)) @ basis.mT
        parts.append((gram - rebuilt).square().sum() / gram.square().sum())
    loss = module.reconstruction_loss(x)
    assert_close(loss, torch.stack(parts).mean(), rtol=1e-9, atol=0)
    assert_close(module.reconstruction_loss(torch.cat([x, x], 1) * 7), loss, rtol=1e-9, atol=0)


def test_reconstruction_loss_is_float32_under_autocast():
    module, x = GramSpectrum(D), torch.randn(2, 20, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = module.reconstruction_loss(x)
    assert torch.equal(under, module.reconstruction_loss(x))


def test_reconstruction_loss_cannot_be_won_by_growing():
    module, x = spectrum(), torch.randn(1, 20, D, dtype=torch.float64)
    with torch.no_grad():
        module.basis.weight.mul_(3)
    assert module.reconstruction_loss(x) > 1


def test_descent_on_the_loss_finds_the_spectrum():
    from wellposed.constrain import constrain_

    scales = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5, 0.2])
    x = torch.randn(1, 200, D) * scales @ torch.linalg.qr(torch.randn(D, D))[0]
    module = GramSpectrum(D)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    constrain_(module, optimizer, where="*.basis")
    for _ in range(60):
        optimizer.zero_grad()
        module.reconstruction_loss(x).backward()
        optimizer.step()
    true = torch.linalg.eigvalsh(x[0].mT @ x[0])
    within(module(x)[0].sort().values, true / true.max(), 0.02)


def test_learned_spectrum_is_a_parameter_and_the_same_twice():
    module = LearnedSpectrum(D)
    x = torch.randn(2, 3, D)
    assert torch.equal(module(x), module(2 * x))
    assert module(x).abs().max() < 1
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert TransJectStack(D, 1, spectrum="random").reconstruction_loss(x) is None


def test_refusals():
    stack = TransJectStack(D, 1)
    with bad_shape(match="attention_mask == 0"):
        stack(torch.zeros(2, 3, D), key_padding_mask=torch.zeros(2, 3))
