"""Blocks and stacks of them, with their masks and positions."""

import math

import pytest
import torch
from tests.support.layers import allowed_by_loop, plain_stack

from wellposed.errors import ConfigError, ShapeError
from wellposed.nn import (
    MLP,
    AttentionMask,
    SinusoidalPositions,
    attention_mask,
)


def stack(**changes):
    torch.manual_seed(0)
    return plain_stack(**changes)


def test_the_module_paths_are_the_documented_ones():
    names = dict(stack(norm="pre", residual="rezero", qk_norm=True).named_parameters()).keys()
    projections = {f"layers.1.attention.{part}_proj.weight" for part in "qkvo"}
    hidden = {f"layers.0.feedforward.{part}_proj.weight" for part in ("up", "down")}
    scales = {"layers.0.attention_residual.scale", "layers.0.attention.q_norm.weight"}
    assert projections | hidden | scales | {"final_norm.weight"} <= names


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


def test_an_unknown_part_is_named():
    with pytest.raises(ConfigError, match="unknown attention 'dot_prodct'; nearest: dot_product"):
        stack(attention="dot_prodct")
    with pytest.raises(ConfigError, match="unknown activation 'gleu'; nearest: gelu"):
        MLP(4, 6, activation="gleu")
    assert MLP(4, 6, bias=False).up_proj.bias is None


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_the_residual_stream_stays_in_float32_under_autocast(norm):
    model = stack(norm=norm)
    x = torch.randn(2, 5, 8)
    exact = model.double()(x.double())
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    assert output.dtype == torch.float32
    assert (output.double() - exact).norm() <= 8 * 2**-8 * exact.norm()


CPU = torch.device("cpu")
PADDINGS = [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1]]


def effective(made, num_queries, num_keys):
    """The weights that `scaled_dot_product_attention` computes from the pair."""
    every = torch.ones(num_queries, num_keys, dtype=torch.bool)
    mask = every[None, None] if made.mask is None else made.mask
    return mask & every.tril() if made.is_causal else mask


causality = pytest.mark.parametrize("is_causal", [False, True])
lengths = pytest.mark.parametrize("num_queries", [1, 2, 5])


@causality
@lengths
def test_padding_masks_equal_the_loop(is_causal, num_queries):
    made = attention_mask(torch.tensor(PADDINGS, dtype=torch.bool), is_causal, num_queries, 5, CPU)
    assert made.mask is not None
    assert not made.is_causal
    for row, padding in zip(made.mask, PADDINGS, strict=True):
        assert torch.equal(row[0], allowed_by_loop(padding, is_causal, num_queries, 5))


@causality
@lengths
def test_without_padding_the_pair_means_the_same(is_causal, num_queries):
    made = attention_mask(None, is_causal, num_queries, 5, CPU)
    expected = allowed_by_loop([0] * 5, is_causal, num_queries, 5)
    assert torch.equal(effective(made, num_queries, 5).expand(1, 1, -1, -1)[0, 0], expected)


@pytest.mark.parametrize(
    ("is_causal", "num_queries", "flag"),
    [(False, 5, False), (True, 5, True), (True, 1, False), (False, 2, False)],
)
def test_no_mask_is_made_where_none_is_needed(is_causal, num_queries, flag):
    kind = "causal" if is_causal else "full"
    assert attention_mask(None, is_causal, num_queries, 5, CPU) == AttentionMask(None, flag, kind)


def test_only_masks_made_here_claim_a_pattern():
    padding = torch.tensor([[False, True]])
    kinds = [attention_mask(padding, flag, 2, 2, CPU).kind for flag in (False, True)]
    assert kinds == ["full", "causal"]
    assert AttentionMask(torch.ones(1, 1, 2, 2, dtype=torch.bool), False).kind == "any"


def test_a_finished_mask_is_returned_as_it_is():
    made = attention_mask(torch.tensor([[False, True]]), True, 2, 2, CPU)
    assert attention_mask(made, False, 2, 2, CPU) is made


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(
        ShapeError, match=r"is torch.int64 .*; expected torch.bool .* attention_mask == 0"
    ):
        attention_mask(torch.ones(2, 5, dtype=torch.int64), False, 5, 5, CPU)
    with pytest.raises(ShapeError, match=r"torch.bool \(2, 4\); expected torch.bool \(2, 5\)"):
        attention_mask(torch.zeros(2, 4, dtype=torch.bool), False, 5, 5, CPU)
    with pytest.raises(ShapeError, match="received 3 queries and 2 keys"):
        attention_mask(None, False, 3, 2, CPU)


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_sinusoids_equal_the_formula(width):
    table = SinusoidalPositions(50, width, scale=0.5).double()
    table.reset_parameters()
    codes = table(torch.arange(50))
    for p in (0, 1, 17, 49):
        for c in range(width):
            angle = p / 10000 ** (2 * (c // 2) / width)
            wave = math.sin(angle) if c % 2 == 0 else math.cos(angle)
            assert codes[p, c].item() == pytest.approx(0.5 * wave, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_cast_table_is_as_exact_as_a_new_one(dtype):
    codes = SinusoidalPositions(50, 8, scale=0.3)
    fresh = SinusoidalPositions(50, 8, scale=0.3).double().table.to(dtype)
    assert torch.equal(codes.to(torch.bfloat16).to(dtype).table, fresh)
    assert codes.to("meta").to(torch.float64).table.is_meta


def test_large_angles_keep_float32_accuracy():
    codes = SinusoidalPositions(100_001, 2)(torch.tensor([100_000]))
    assert codes[0, 0].item() == pytest.approx(math.sin(100_000.0), abs=1e-7)
