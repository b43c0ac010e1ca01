"""TransJect at its edges: half precision, empty batches, forward derivatives, compiled graphs,
misfits."""

import pytest
import torch
from tests.support.close import within
from tests.support.refusal import bad_config, bad_shape
from torch.autograd import forward_ad

from wellposed.linalg import isometry_error
from wellposed.nn import (
    InjectiveEmbedding,
    OrthogonalLinear,
    TransJectBlock,
    TransJectCache,
    TransJectStack,
)

D, E, N = 8, 2, 5
with_and_without = pytest.mark.parametrize("grad", [True, False])


def make(**options):
    torch.manual_seed(7)
    return TransJectStack(D, 2, num_experts=E, residual="sigmoid", **options).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_orthogonal_to_its_rounding(dtype):
    layer = OrthogonalLinear(32).to(dtype)
    before = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, before)
    # A product of two columns of norm 1, each entry rounded by eps/2 of itself, is off by a few eps
    # at most.
    assert isometry_error(layer.weight.double()) < 3 * torch.finfo(dtype).eps * 32**0.5
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        stack = TransJectStack(D, 2, num_experts=E)
    finally:
        torch.set_default_dtype(default)
    assert {parameter.dtype for parameter in stack.parameters()} == {dtype}


@with_and_without
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"gating": "fixed"}])
def test_no_sample_gives_no_sample(options, grad):
    with torch.set_grad_enabled(grad):
        out = make(**options)(torch.zeros(0, N, D))
    assert out.last_hidden_state.shape == (0, N, D)
    assert [gates.shape for gates in out.gates] == [
        (0, N, E) if "is_causal" in options else (0, E)
    ] * 2


def test_forward_derivatives_without_gradients():
    stack = make().double()
    x, v = torch.randn(2, 2, N, D, dtype=torch.float64).unbind()
    step = 1e-6
    with torch.no_grad():
        ends = stack(x + step * v).last_hidden_state, stack(x - step * v).last_hidden_state
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(
                stack(forward_ad.make_dual(x, v)).last_hidden_state
            ).tangent
            assert tangent is not None
            sigma = forward_ad.make_dual(
                torch.ones(D, dtype=torch.float64), torch.ones(D, dtype=torch.float64)
            )
            assert (
                forward_ad.unpack_dual(stack(x, sigma=sigma).last_hidden_state).tangent is not None
            )
    within(tangent, (ends[0] - ends[1]) / (2 * step), 1e-7)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sample_of_padding_alone_is_finite_where_it_is_not_looked_for(is_causal):
    stack, x = make(is_causal=is_causal), torch.randn(2, N, D)
    padding = torch.tensor([[False] * N, [True] * N])
    with bad_shape(match=r"1 of 2 samples are padding alone \(rows \[1\]"):
        stack(x, key_padding_mask=padding)
    torch._dynamo.reset()
    compiled = torch.compile(stack, backend="eager", fullgraph=True)
    out = compiled(x, key_padding_mask=padding)
    assert out.last_hidden_state.isfinite().all()
    assert not out.sigma[1].any()


@with_and_without
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
def test_block_says_what_does_not_fit(x, sigma, gates, grad):
    block = TransJectBlock(D, 2, num_experts=E).eval()
    with torch.set_grad_enabled(grad), bad_shape(match="TransJectBlock: received"):
        block(torch.ones(x), torch.ones(sigma), gates=None if gates is None else torch.ones(gates))


def test_a_causal_block_takes_one_or_many():
    block, x = TransJectBlock(D, 2, num_experts=E).eval(), torch.randn(4, N, D)
    for sigma in ((D,), (4, D), (4, N, D)):
        for gates in ((4, E), (4, N, E)):
            assert (
                block(x, torch.ones(sigma), gates=torch.ones(gates), is_causal=True)[0].shape
                == x.shape
            )


@with_and_without
def test_stack_says_how_many_gates_are_missing(grad):
    with torch.set_grad_enabled(grad), bad_config(match="gates of 1 layers; expected 2"):
        make()(torch.randn(1, N, D), gates=[torch.ones(1, E)])


def test_inverse_says_what_does_not_fit_and_knows_gates_that_are_not_convex():
    stack, x = make().double(), torch.randn(2, N, D, dtype=torch.float64)
    out = stack(x)
    y, gates = out.last_hidden_state.detach(), [gate.detach() for gate in out.gates]
    with bad_shape(match=r"received gates \(2, 1\)"):
        stack.inverse(y, out.sigma, [gate[:, :1] for gate in gates])
    for wrong in (y[..., 1:], y[0]):
        with bad_shape(match=r"received x \("):
            stack.inverse(wrong, out.sigma, gates)
    _, usual = stack.inverse(y, out.sigma, gates)
    _, doubled = stack.inverse(y, out.sigma, [1.5 * gate for gate in gates])
    contractions = [report.blocks[0].contraction for report in (usual, doubled)]
    assert contractions[1] == pytest.approx(1.5 * contractions[0], rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"spectrum": "random"}])
def test_a_cache_is_of_as_many_sequences(options):
    stack, x, cache, one = (
        make(is_causal=True, **options),
        torch.randn(3, N, D),
        TransJectCache(),
        TransJectCache(),
    )
    stack(x[:2], cache=cache)
    with bad_shape(match="received 3 sequences, and the cache holds the sums of 2"):
        stack(x, cache=cache)
    with bad_config(match="a cache needs is_causal=True"):
        make(**options)(x, cache=TransJectCache())
    stack(x[:1, :2], cache=one)
    common = torch.cat([x[:1, :2].expand(3, -1, -1), x[:, 2:]], 1)
    within(
        stack(x[:, 2:], cache=one).last_hidden_state, stack(common).last_hidden_state[:, 2:], 1e-5
    )


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_embedding_says_which_ids_and_positions_it_takes(position):
    module = InjectiveEmbedding(5, D, position=position, max_positions=4)
    ids = torch.tensor([[1, 2]])
    for wrong in (ids.float(), ids.bool()):
        with bad_shape(match=r"in torch\.(float32|bool) of shape"):
            module(wrong)
        with bad_shape(match=r"positions is torch\.(float32|bool)"):
            module(ids, wrong)
    assert torch.equal(module(ids.int(), ids.int()), module(ids, ids))
    for beyond in (torch.tensor([0, 99]), torch.tensor([-1, 0])):
        if position == "learned":
            with bad_shape(match=r"from -?\d+ to \d+ .* in \[0, 4\)"):
                module(ids, beyond)
        else:
            assert module(ids, beyond).isfinite().all()


def test_positions_that_are_hooked_are_called():
    module, calls = InjectiveEmbedding(5, D, max_positions=4), []
    expected = module(torch.tensor([[1, 2]]))
    module.position.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(module(torch.tensor([[1, 2]])), expected)
    assert calls == [1]
