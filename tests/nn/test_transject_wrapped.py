"""TransJect with adapters, hooks, parametrisations, offloaded weights: what is not plain is
called."""

import pytest
import torch
from tests.support.close import within
from tests.support.layers import draw
from tests.support.transject import Adapter
from tests.support.words import words
from torch import nn
from torch.testing import assert_close

from wellposed.errors import ConfigError, NotContractiveError
from wellposed.nn import GramSpectrum, TransJectStack

D = 6
L = 2
N = 5
MAPS = [
    "spectrum.basis",
    "layers.0.attention.experts.1.left",
    "layers.0.attention.experts.1.right",
    "layers.1.attention.gate",
    "layers.1.feedforward.up_proj",
    "layers.1.feedforward.down_proj",
]
paths = pytest.mark.parametrize("path", MAPS)


def make(**options):
    torch.manual_seed(7)
    stack = TransJectStack(D, L, num_experts=2, **options).double().eval()
    with torch.no_grad():
        for index, layer in enumerate(stack.layers):
            layer.residual.weight.fill_(1.2 - index / 2)
    return stack


def passes(stack, x):
    """The path on a CPU, and the one on which accelerators batch experts."""
    yield "one by one", stack(x).last_hidden_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wellposed.nn.transject._gram.prefers_loop", lambda _: False)
        yield "batched", stack(x).last_hidden_state


class Flipped(nn.Module):
    def forward(self, weight):
        return weight.flip(-1)


def adapt(stack, path):
    """Put an adapter in the place of a map; return its weight, merged."""
    adapter = Adapter(stack.get_submodule(path))
    stack.set_submodule(path, adapter)
    return stack.get_submodule(path).base.weight + adapter.change


def parametrise(stack, path):
    part = stack.get_submodule(path)
    torch.nn.utils.parametrize.register_parametrization(part, "weight", Flipped())
    return part.weight


@paths
@pytest.mark.parametrize("wrap", [adapt, parametrise])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_wrapped_map_is_the_same_as_its_merged_weight(path, wrap, is_causal):
    x = draw(2, N, D)
    wrapped = make(is_causal=is_causal)
    merged = make(is_causal=is_causal)
    plain = merged(x).last_hidden_state
    with torch.no_grad():
        merged.get_submodule(path).weight.copy_(wrap(wrapped, path))
    expected = merged(x).last_hidden_state
    assert (expected - plain).abs().max() > 1e-6
    for name, output in passes(wrapped, x):
        assert_close(
            output, expected, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    wrapped(x).last_hidden_state.square().sum().backward()
    weights = wrapped.named_parameters()
    changed = [weight.grad for n, weight in weights if "change" in n or "original" in n]
    assert all(gradient.abs().max() > 0 for gradient in changed)


PARTS = [f"layers.0.{p}" for p in words("residual attention feedforward attention.experts.0")]


@pytest.mark.parametrize("path", MAPS + PARTS)
def test_what_a_hook_returns_counts(path):
    x = draw(2, N, D)
    stack = make()
    expected = stack(x).last_hidden_state

    def change(_module, _inputs, output):
        return (2 * output[0], output[1]) if isinstance(output, tuple) else 3 * output.roll(1, -1)

    stack.get_submodule(path).register_forward_hook(change)
    changed = [output for _, output in passes(stack, x)]
    assert (changed[0] - expected).abs().max() > 1e-6
    for output in changed[1:]:
        within(output, changed[0], 1e-12)


@pytest.mark.parametrize("options", [{}, {"gating": "normalized"}, {"spectrum": "random"}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_offloaded_weights_are_fetched(options, is_causal):
    accelerate = pytest.importorskip("accelerate")
    x = draw(2, N, D)
    stack = make(is_causal=is_causal, **options)
    expected = stack(x).last_hidden_state.detach()
    accelerate.cpu_offload(stack, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in stack.parameters())
    for _, output in passes(stack, x):
        within(output.detach(), expected, 1e-12)


def test_the_reconstruction_loss_is_that_of_the_wrapped_basis():
    x = draw(2, N, D)
    wrapped = GramSpectrum(D).double()
    merged = GramSpectrum(D).double()
    merged.load_state_dict(wrapped.state_dict())
    adapter = Adapter(wrapped.basis)
    wrapped.basis = adapter
    with torch.no_grad():
        merged.basis.weight.add_(adapter.change)
    loss = wrapped.reconstruction_loss(x)
    assert_close(loss, merged.reconstruction_loss(x), rtol=1e-12, atol=0)
    loss.backward()
    assert adapter.change.grad is not None


@paths
def test_the_inverse_refuses_what_has_no_known_bound(path):
    x = draw(2, N, D)
    stack = make()
    stack.set_submodule(path, Adapter(stack.get_submodule(path)))
    out = stack(x)
    if "basis" in path or "gate" in path:
        back, report = stack.inverse(out.last_hidden_state.detach(), out.sigma.detach(), out.gates)
        assert (back - x).norm(dim=-1).max() <= report.error_bound + 1e-12
        return
    with pytest.raises(NotContractiveError, match=rf"{path.split('.', 2)[2]}: Adapter"):
        stack.inverse(out.last_hidden_state, out.sigma, out.gates)


def test_the_inverse_says_that_weights_are_offloaded():
    accelerate = pytest.importorskip("accelerate")
    x = draw(2, N, D)
    stack = make()
    with torch.no_grad():
        out = stack(x)
    accelerate.cpu_offload(stack, execution_device=torch.device("cpu"))
    outputs = out.last_hidden_state, out.sigma, out.gates
    with pytest.raises(ConfigError, match=r"residual\.weight"):
        stack.inverse(*outputs)
