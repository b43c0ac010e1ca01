"""Parts of TransJect, spectrum, embedding and blocks, and edge cases: half precision, empty batches, forward
derivatives, misfits."""

import math

import pytest
import torch
from tests.support.close import within
from torch.testing import assert_close

from wellposed import nn as wn
from wellposed.errors import ConfigError, ShapeError
from wellposed.linalg import isometry_error

D = 6
E = 2
N = 5


def spectrum(**options):
    return wn.GramSpectrum(D, **options).double()


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
    module = spectrum()
    x = torch.randn(1, 9, D, dtype=torch.float64)
    padding = torch.zeros(1, 9, dtype=torch.bool)
    padding[0, 5:] = True
    assert_close(module(x, key_padding_mask=padding), module(x[:, :5]), rtol=1e-12, atol=0)
    loss = module.reconstruction_loss
    assert_close(loss(x, key_padding_mask=padding), loss(x[:, :5]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("normalization", ["max", "trace"])
def test_causal_sigma_is_that_of_the_prefix(normalization):
    module = spectrum(normalization=normalization)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    sigma = module(x, is_causal=True)
    for t in range(5):
        assert_close(sigma[:, t], module(x[:, : t + 1]), rtol=1e-12, atol=0)


def test_half_precision_sums_do_not_stall():
    # In bfloat16 a sum of ones stops at 256.
    module = wn.GramSpectrum(2, normalization="trace").bfloat16()
    with torch.no_grad():
        module.basis.weight.copy_(torch.eye(2))
    x = torch.ones(1, 4000, 2, dtype=torch.bfloat16)
    x[:, 1000:, 1] = 0
    assert module(x).dtype is torch.bfloat16
    assert_close(module(x).float(), torch.tensor([[0.8, 0.2]]), rtol=4e-3, atol=0)


@pytest.mark.parametrize("tokens", [3, 20])
def test_reconstruction_loss_is_the_formula_and_free_of_size_and_length(tokens):
    module = spectrum()
    x = torch.randn(2, tokens, D, dtype=torch.float64)
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
    module = wn.GramSpectrum(D)
    x = torch.randn(2, 20, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = module.reconstruction_loss(x)
    assert torch.equal(under, module.reconstruction_loss(x))


def test_reconstruction_loss_cannot_be_won_by_growing():
    module = spectrum()
    x = torch.randn(1, 20, D, dtype=torch.float64)
    with torch.no_grad():
        module.basis.weight.mul_(3)
    assert module.reconstruction_loss(x) > 1


def test_learned_spectrum_is_a_parameter_and_the_same_twice():
    module = wn.LearnedSpectrum(D)
    x = torch.randn(2, 3, D)
    assert torch.equal(module(x), module(2 * x))
    assert module(x).abs().max() < 1
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert wn.TransJectStack(D, 1, spectrum="random").reconstruction_loss(x) is None


def test_what_no_spectrum_takes():
    stack = wn.TransJectStack(D, 1)
    with pytest.raises(ShapeError, match="attention_mask == 0"):
        stack(torch.zeros(2, 3, D), key_padding_mask=torch.zeros(2, 3))


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_distinct_pairs_get_distinct_vectors(position):
    module = wn.InjectiveEmbedding(7, 8, position=position, max_positions=30)
    ids = torch.arange(7)[:, None].expand(7, 30)
    vectors = module(ids).reshape(-1, 8).double()
    distances = torch.cdist(vectors, vectors).fill_diagonal_(torch.inf)
    assert distances.min() > 1e-3
    # A sum of the two, as usual, is no injection: pick the positions so that it collides.
    token = vectors[0, :4]
    code = vectors[0, 4:]
    first = module(torch.zeros(1, 1, dtype=torch.long))[0, 0].double()
    assert torch.equal(first, torch.cat([token, code]))


def test_sines_follow_the_formula_before_and_beyond_the_table():
    module = wn.InjectiveEmbedding(3, 12, max_positions=4).double()
    codes = module(torch.zeros(1, 9, dtype=torch.long))[0, :, 6:]
    for p in range(9):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            expected = torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64)
            # The stored part was rounded to float32 when the module was made.
            within(codes[p, 2 * i : 2 * i + 2], expected, 1e-7)


def test_given_positions():
    module = wn.InjectiveEmbedding(5, 8, max_positions=4)
    ids = torch.tensor([[1, 2, 3]])
    within(module(ids, torch.arange(3)), module(ids), 1e-7)
    shifted = module(ids, torch.tensor([[5, 0, 1]]))
    within(shifted[:, 1:, 4:], module(ids)[:, :2, 4:], 1e-7)


def test_what_no_embedding_takes():
    with pytest.raises(ConfigError, match="even width"):
        wn.InjectiveEmbedding(5, 7)
    with pytest.raises(ShapeError, match="max_position_embeddings >= 5"):
        wn.InjectiveEmbedding(5, 8, position="learned", max_positions=4)(
            torch.zeros(1, 5, dtype=torch.long)
        )
    with pytest.raises(ShapeError, match=r"expected \(batch, tokens\)"):
        wn.InjectiveEmbedding(5, 8)(torch.zeros(4, dtype=torch.long))


def make(**options):
    torch.manual_seed(7)
    return wn.TransJectStack(D, 2, num_experts=E, residual="sigmoid", **options).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_orthogonal_to_its_rounding(dtype):
    layer = wn.OrthogonalLinear(32).to(dtype)
    before = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, before)
    # A product of two columns of norm 1, each entry rounded by eps/2 of itself, is off by a few eps
    # at most.
    assert isometry_error(layer.weight.double()) < 3 * torch.finfo(dtype).eps * 32**0.5
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        stack = wn.TransJectStack(D, 2, num_experts=E)
    finally:
        torch.set_default_dtype(default)
    assert {parameter.dtype for parameter in stack.parameters()} == {dtype}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_no_sample_gives_no_sample(options):
    out = make(**options)(torch.zeros(0, N, D))
    assert out.last_hidden_state.shape == (0, N, D)
    shape = (0, N, E) if "is_causal" in options else (0, E)
    assert [gates.shape for gates in out.gates] == [shape] * 2


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sample_of_padding_alone_is_finite_where_it_is_not_looked_for(is_causal):
    stack = make(is_causal=is_causal)
    x = torch.randn(2, N, D)
    padding = torch.tensor([[False] * N, [True] * N])
    with pytest.raises(ShapeError, match=r"1 of 2 samples are padding alone \(rows \[1\]"):
        stack(x, key_padding_mask=padding)
    torch._dynamo.reset()
    compiled = torch.compile(stack, backend="eager", fullgraph=True)
    out = compiled(x, key_padding_mask=padding)
    assert out.last_hidden_state.isfinite().all()
    assert not out.sigma[1].any()


@pytest.mark.parametrize(
    ("x", "sigma", "gates"),
    [
        ((4, N, D), (4, N, D), None),
        ((4, N, D), (4, D), (4, N, E)),
        ((4, N, D), (3,), None),
        ((4, N, D), (3, D), None),
        ((4, N, D), (D,), (4, 1)),
        ((4, N, D), (D,), (3, E)),
        ((N, D), (D,), None),
        ((4, 0, D), (D,), None),
        ((4, N, D + 1), (D + 1,), None),
    ],
)
def test_block_says_what_does_not_fit(x, sigma, gates):
    block = wn.TransJectBlock(D, 2, num_experts=E).eval()
    with pytest.raises(ShapeError, match="TransJectBlock: received"):
        block(torch.ones(x), torch.ones(sigma), gates=None if gates is None else torch.ones(gates))


def test_a_causal_block_takes_one_or_many():
    block = wn.TransJectBlock(D, 2, num_experts=E).eval()
    x = torch.randn(4, N, D)
    for sigma in ((D,), (4, D), (4, N, D)):
        for gates in ((4, E), (4, N, E)):
            output, *_ = block(x, torch.ones(sigma), gates=torch.ones(gates), is_causal=True)
            assert output.shape == x.shape


def test_stack_says_how_many_gates_are_missing():
    with pytest.raises(ConfigError, match="gates of 1 layers; expected 2"):
        make()(torch.randn(1, N, D), gates=[torch.ones(1, E)])


def test_inverse_says_what_does_not_fit_and_knows_gates_that_are_not_convex():
    stack = make().double()
    x = torch.randn(2, N, D, dtype=torch.float64)
    out = stack(x)
    y = out.last_hidden_state.detach()
    gates = [gate.detach() for gate in out.gates]
    with pytest.raises(ShapeError, match=r"received gates \(2, 1\)"):
        stack.inverse(y, out.sigma, [gate[:, :1] for gate in gates])
    for wrong in (y[..., 1:], y[0]):
        with pytest.raises(ShapeError, match=r"received x \("):
            stack.inverse(wrong, out.sigma, gates)
    _, usual = stack.inverse(y, out.sigma, gates)
    _, doubled = stack.inverse(y, out.sigma, [1.5 * gate for gate in gates])
    contractions = [report.blocks[0].contraction for report in (usual, doubled)]
    assert contractions[1] == pytest.approx(1.5 * contractions[0], rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"spectrum": "random"}])
def test_a_cache_is_of_as_many_sequences(options):
    stack = make(is_causal=True, **options)
    x = torch.randn(3, N, D)
    cache = wn.TransJectCache()
    one = wn.TransJectCache()
    stack(x[:2], cache=cache)
    with pytest.raises(ShapeError, match="received 3 sequences, but the cache is for 2"):
        stack(x, cache=cache)
    with pytest.raises(ConfigError, match="a cache needs is_causal=True"):
        make(**options)(x, cache=wn.TransJectCache())
    stack(x[:1, :2], cache=one)
    common = torch.cat([x[:1, :2].expand(3, -1, -1), x[:, 2:]], 1)
    expected = stack(common).last_hidden_state[:, 2:]
    within(stack(x[:, 2:], cache=one).last_hidden_state, expected, 1e-5)


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_embedding_says_which_ids_and_positions_it_takes(position):
    module = wn.InjectiveEmbedding(5, D, position=position, max_positions=4)
    ids = torch.tensor([[1, 2]])
    for wrong in (ids.float(), ids.bool()):
        with pytest.raises(ShapeError, match=r"in torch\.(float32|bool) of shape"):
            module(wrong)
        with pytest.raises(ShapeError, match=r"positions is torch\.(float32|bool)"):
            module(ids, wrong)
    assert torch.equal(module(ids.int(), ids.int()), module(ids, ids))
    for beyond in (torch.tensor([0, 99]), torch.tensor([-1, 0])):
        if position == "learned":
            with pytest.raises(ShapeError, match=r"from -?\d+ to \d+ .* in \[0, 4\)"):
                module(ids, beyond)
        else:
            assert module(ids, beyond).isfinite().all()


def test_positions_that_are_hooked_are_called():
    module = wn.InjectiveEmbedding(5, D, max_positions=4)
    calls = []
    expected = module(torch.tensor([[1, 2]]))
    module.position.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(module(torch.tensor([[1, 2]])), expected)
    assert calls == [1]
