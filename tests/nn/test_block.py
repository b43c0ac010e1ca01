"""Blocks and stacks: structure, compilation, recomputation, and parts registered from outside."""

import pytest
import torch
from tests.support.layers import stack_config
from tests.support.refusal import bad_config
from torch import nn
from torch.testing import assert_close

from wellposed.nn import FEEDFORWARDS, MLP, RESIDUALS, Block, TransformerStack


def stack(is_causal=False, **changes):
    torch.manual_seed(0)
    return TransformerStack(stack_config(**changes), is_causal=is_causal)


def test_the_module_paths_are_the_documented_ones():
    names = {
        name for name, _ in stack(norm="pre", residual="rezero", qk_norm=True).named_parameters()
    }
    for path in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert f"layers.1.attention.{path}.weight" in names
    assert {"layers.0.feedforward.up_proj.weight", "layers.0.feedforward.down_proj.weight"} <= names
    assert {
        "layers.0.attention_residual.scale",
        "layers.0.attention.q_norm.weight",
        "final_norm.weight",
    } <= names


def test_rezero_is_the_identity_at_the_start_and_learns_its_scale_first():
    model = stack(norm="none", residual="rezero")
    x = torch.randn(2, 5, 8)
    output = model(x)
    assert torch.equal(output, x)
    output.square().sum().backward()
    layer = model.layers[0]
    assert layer.attention_residual.scale.grad.abs() > 0
    assert layer.feedforward_residual.scale.grad.abs() > 0
    assert layer.attention.q_proj.weight.grad.abs().max() == 0


PADDING = torch.tensor([[False] * 5, [True, True, False, False, False]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_causal", "padding", "norm"), [(True, None, "pre"), (False, PADDING, "none")]
)
def test_a_compiled_stack_has_no_graph_break_and_the_same_result(is_causal, padding, norm):
    model = stack(is_causal, norm=norm, residual="rezero", qk_norm=True, num_hidden_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    x = torch.randn(2, 5, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(
        compiled(x, key_padding_mask=padding),
        model(x, key_padding_mask=padding),
        rtol=1e-5,
        atol=1e-6,
    )


def test_recomputation_gives_the_same_gradients_with_dropout():
    x = torch.randn(2, 5, 8)
    gradients, calls = [], []
    for recompute in (False, True):
        model = stack(is_causal=True, norm="pre", dropout=0.5)
        for layer in model.layers:
            layer.gradient_checkpointing = recompute
            layer.attention.q_proj.register_forward_hook(lambda *_: calls.append(1))
        torch.manual_seed(1)
        model(x).square().sum().backward()
        assert len(calls) == (2 + 4 if recompute else 2)
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_a_new_part_is_one_registration():
    name = "halved-for-this-test"

    class Halved(nn.Module):
        def forward(self, x, branch):
            return x + 0.5 * branch

    if name not in RESIDUALS:
        RESIDUALS.register(name)(lambda _: Halved())
        FEEDFORWARDS.register(name)(lambda _: nn.Identity())
    x = torch.randn(2, 5, 8)
    block = Block(stack_config(norm="none", residual=name, feedforward=name))
    half = x + 0.5 * block.attention(x)
    assert_close(block(x), 1.5 * half)


def test_an_unknown_part_is_named():
    with bad_config(match="unknown attention 'dot_prodct'; nearest: dot_product"):
        stack(attention="dot_prodct")
    with bad_config(match="unknown activation 'gleu'; nearest: gelu"):
        MLP(4, 6, activation="gleu")
    assert MLP(4, 6, bias=False).up_proj.bias is None


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_the_residual_stream_stays_in_float32_under_autocast(norm):
    model, x = stack(norm=norm), torch.randn(2, 5, 8)
    exact = model.double()(x.double())
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    assert output.dtype == torch.float32
    assert (output.double() - exact).norm() <= 8 * 2**-8 * exact.norm()
