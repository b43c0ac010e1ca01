"""TransJect's mixture, block and stack: against the formulas, masks, causality, the
cache, the inverse."""

import io

import pytest
import torch
from tests.support.close import within
from tests.support.constrained import descend
from tests.support.layers import draw
from tests.support.transject import slow_stack
from torch.testing import assert_close

from wellposed import nn as wn
from wellposed.constrain import constrain_
from wellposed.errors import ConfigError, NotContractiveError
from wellposed.linalg import isometry_error

D = 6
L = 3
N = 7
KINDS = [
    {},
    {"num_experts": 3},
    {"num_experts": 2, "gating": "normalized", "spectrum_norm": "trace"},
    {"spectrum": "random"},
    {"num_experts": 2, "spectrum": "random"},
    {"feedforward_bias": True},
]
kinds = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())) or "plain"
)


def make(*, start=1.2, dtype=torch.float64, width=D, **options):
    """Return a stack whose residual weights are away from zero, whose gates differ, in eval
    mode."""
    torch.manual_seed(7)
    stack = wn.TransJectStack(width, L, **options).to(dtype).eval()
    with torch.no_grad():
        for index, layer in enumerate(stack.layers):
            layer.residual.weight.fill_(start - index / 2)
            if options.get("feedforward_bias"):
                layer.feedforward.up_proj.bias.normal_()
                layer.feedforward.down_proj.bias.normal_()
            if hasattr(layer.attention, "gate"):
                layer.attention.gate.weight.mul_(4)
    return stack


@kinds
@pytest.mark.parametrize("length", [3, 11])
@torch.no_grad()
def test_stack_is_the_formula(kind, length):
    stack = make(**kind)
    x = draw(2, length, D)
    expected = torch.stack([slow_stack(stack, sample) for sample in x])
    within(stack(x).last_hidden_state, expected, 1e-12)


@kinds
def test_padding_changes_nothing(kind):
    x = draw(2, N, D)
    longer = torch.cat([draw(2, 3, D, seed=1) * 100, x, draw(2, 5, D, seed=2) * 100], 1)
    padding = torch.ones(2, N + 8, dtype=torch.bool)
    padding[:, 3 : 3 + N] = False
    for causal in (False, True):
        stack = make(is_causal=causal, **kind)
        short = stack(x)
        long = stack(longer, key_padding_mask=padding)
        assert long.last_hidden_state.isfinite().all()
        within(long.last_hidden_state[:, 3 : 3 + N], short.last_hidden_state, 1e-12)


@kinds
def test_permuted_tokens_are_permuted_outputs(kind):
    stack = make(**kind)
    x = draw(2, N, D)
    order = torch.randperm(N)
    within(stack(x[:, order]).last_hidden_state, stack(x).last_hidden_state[:, order], 1e-12)


@kinds
def test_causal_form_sees_no_later_token(kind):
    stack = make(is_causal=True, **kind)
    x = draw(1, N, D).requires_grad_()
    y = stack(x).last_hidden_state
    for t in range(N):
        (gradient,) = torch.autograd.grad(y[0, t].sum(), x, retain_graph=True)
        reached = gradient[0].abs().amax(-1)
        assert (reached[t + 1 :] == 0).all()
        assert reached[t] > 0
        # Earlier tokens have an effect through sigma or the gates, if these follow the input.
        if t and kind != {"spectrum": "random"}:
            assert reached[:t].max() > 0


@kinds
def test_gates_of_the_causal_form_are_those_of_the_prefix(kind):
    causal = make(is_causal=True, **kind)
    full = make(**kind)
    x = draw(2, N, D)
    # One layer and one sigma: else earlier tokens of the prefix would use other sigmas and gates
    # than the last.
    for stack in (causal, full):
        del stack.layers[1:]
    sigma = torch.rand(D, dtype=torch.float64)
    output = causal(x, sigma=sigma)
    for t in range(N):
        expected = full(x[:, : t + 1], sigma=sigma)
        within(output.last_hidden_state[:, t], expected.last_hidden_state[:, t], 1e-12)
        within(output.gates[0][:, t], expected.gates[0], 1e-12)


@kinds
@pytest.mark.parametrize("pieces", [[1] * N, [4, 1, 2]])
def test_cache_equals_one_pass(kind, pieces):
    stack = make(is_causal=True, **kind)
    x = draw(2, N, D)
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[1, :2] = True
    expected = stack(x, key_padding_mask=padding).last_hidden_state
    cache = wn.TransJectCache()
    outputs = []
    start = 0
    with torch.no_grad():
        for size in pieces:
            stop = start + size
            part = stack(x[:, start:stop], key_padding_mask=padding[:, :stop], cache=cache)
            outputs.append(part.last_hidden_state)
            start = stop
    assert cache.num_tokens == N
    outputs = torch.cat(outputs, 1)
    real = ~padding
    within(outputs[real], expected[real].detach(), 1e-12)


def test_cache_reorders_and_does_not_grow():
    stack = make(is_causal=True, num_experts=2, gating="normalized")
    x = draw(3, N, D)
    cache = wn.TransJectCache()
    sizes = []
    with torch.no_grad():
        for t in range(N - 1):
            stack(x[:, t : t + 1], cache=cache)
            sizes.append(sum(part.numel() for part in cache.last_sums.values()))
        rows = torch.tensor([2, 0])
        output = stack(x[rows, N - 1 :], cache=cache.reorder_(rows)).last_hidden_state
        expected = stack(x[rows]).last_hidden_state[:, -1:]
    assert len(set(sizes)) == 1
    within(output, expected, 1e-12)


@kinds
def test_identity_at_the_start_bitwise(kind):
    x = torch.randn(2, N, D)
    for causal in (False, True):
        stack = wn.TransJectStack(D, L, is_causal=causal, **kind).eval()
        assert torch.equal(stack(x).last_hidden_state, x)


@kinds
@pytest.mark.parametrize("causal", [False, True])
def test_inverse(kind, causal):
    stack = make(start=2.5, is_causal=causal, **kind)
    x = draw(3, N, D)
    padding = torch.zeros(3, N, dtype=torch.bool)
    padding[0, 4:] = True
    out = stack(x, key_padding_mask=padding)
    back, report = stack.inverse(out.last_hidden_state.detach(), out.sigma, out.gates)
    error = float((back - x).norm(dim=-1).max())
    assert error <= report.error_bound + 1e-13
    assert report.error_bound < 1e-11
    assert len(report.blocks) == 2 * L


def test_inverse_refuses_what_is_no_bijection():
    stack = make(num_experts=2)
    x = draw(1, N, D)
    out = stack(x)
    with pytest.raises(ConfigError, match="gates of 1 layers; expected 3"):
        stack.inverse(x, out.sigma, out.gates[:1])
    with torch.no_grad():
        stack.layers[0].feedforward.up_proj.weight.mul_(9)
    with pytest.raises(NotContractiveError):
        stack.inverse(x, out.sigma, out.gates)
    dropping = wn.TransJectStack(D, L, dropout=0.1)
    with pytest.raises(ConfigError, match="dropout"):
        dropping.inverse(x.float(), out.sigma.float(), [gate.float() for gate in out.gates])


def test_given_sigma_and_gates_repeat_a_pass():
    stack = make(num_experts=2)
    x = draw(2, N, D)
    out = stack(x)
    again = stack(x, sigma=out.sigma, gates=out.gates)
    # A token alone gives the same: nothing else passes between tokens.
    alone = stack(x[:, 2:3], sigma=out.sigma, gates=out.gates)
    within(again.last_hidden_state, out.last_hidden_state, 1e-12)
    within(alone.last_hidden_state[:, 0], out.last_hidden_state[:, 2], 1e-12)


def test_orthogonal_through_training_save_and_load():
    stack = wn.TransJectStack(16, 2, num_experts=2, residual="sigmoid")
    optimizer = torch.optim.AdamW(stack.parameters(), lr=3e-3, weight_decay=0.0)
    handle = constrain_(stack, optimizer, where=wn.OrthogonalLinear)
    twin = wn.TransJectStack(16, 2, num_experts=2)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.0)
    by_name = constrain_(twin, twin_optimizer, where=list(wn.orthogonal_patterns(twin)))
    assert {row.path for row in handle.report.rows} == {row.path for row in by_name.report.rows}
    assert len(handle.report.rows) == 1 + 2 * (2 * 2 + 2)
    x = torch.randn(4, 9, 16)
    goal = torch.randn(4, 9, 16)

    def loss():
        off = (stack(x).last_hidden_state - goal).square().mean()
        return off + 0.1 * stack.reconstruction_loss(x)

    losses = descend(loss, optimizer, 60)
    assert losses[-1] < losses[0]
    saved = io.BytesIO()
    torch.save(stack.state_dict(), saved)
    saved.seek(0)
    fresh = wn.TransJectStack(16, 2, num_experts=2, residual="sigmoid")
    fresh.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(fresh(x).last_hidden_state, stack(x).last_hidden_state)
    for part in fresh.modules():
        if isinstance(part, wn.OrthogonalLinear):
            assert isometry_error(part.weight) < 1e-5
            assert part.norm_bound() < 1 + 1e-4


def test_norm_bound_is_above_the_norm():
    layer = wn.OrthogonalLinear(D)
    with torch.no_grad():
        layer.weight.add_(0.01 * torch.randn(D, D))
    true = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
    assert true <= layer.norm_bound() < 1.2


def test_residual_starts():
    x = torch.randn(3)
    f = torch.randn(3)
    assert torch.equal(wn.InjectiveResidual(4)(x, f), x)
    assert_close(wn.InjectiveResidual(4, "sigmoid")(x, f), x + f / 8)
    residual = wn.InjectiveResidual(2)
    with torch.no_grad():
        residual.weight.fill_(-3.0)
    scale = torch.tensor(-3.0).tanh().item() / 2
    assert residual.coefficients() == (1.0, pytest.approx(scale))
