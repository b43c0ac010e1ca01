"""What a caller gets wrong is an error of ours that names it: sizes, keywords, values and shapes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from wellposed import nn as wn
from wellposed.errors import ShapeError

CONFIG = SimpleNamespace(
    hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, activation="gelu",
    attention="dot_product", feedforward="mlp", residual="plain", norm="pre", qk_norm=False, dropout=0.0,
    attention_dropout=0.0, layer_norm_eps=1e-5,
)  # fmt: skip
SELF = [
    wn.DotProductAttention,
    wn.L2SelfAttention,
    wn.CosineSelfAttention,
    wn.BallAttention,
    wn.InverseDAttention,
]
CROSS = [wn.CrossAttention, wn.CosineCrossAttention, wn.BallCrossAttention]
FORWARD = {
    **{kind.__name__: lambda kind=kind: kind(8, 2) for kind in SELF},
    "MLP": lambda: wn.MLP(8, 16),
    "MaxMinFeedForward": lambda: wn.MaxMinFeedForward(8, 16),
    "OrthogonalFeedForward": lambda: wn.OrthogonalFeedForward(8),
    "BallProjection": lambda: wn.BallProjection(8),
    "GramSpectrum": lambda: wn.GramSpectrum(8),
    "Block": lambda: wn.Block(CONFIG),
    "TransformerStack": lambda: wn.TransformerStack(CONFIG),
    "TransJectStack": lambda: wn.TransJectStack(8, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("x", [torch.zeros(2, 5, 7), torch.zeros(()), None, [[1.0]]], ids=repr)
def test_tokens_of_another_width_are_refused(name, x):
    with pytest.raises(ShapeError, match=rf"{name}.*(received|expected).*\b8\b"):
        FORWARD[name]()(x)


@pytest.mark.parametrize("kind", SELF)
def test_attention_reads_batches_of_sequences_and_their_padding(kind):
    module = kind(8, 2)
    with pytest.raises(ShapeError, match=r"expected a tensor \(batch, tokens, 8\)"):
        module(torch.zeros(5, 8))
    for mask in (
        torch.zeros(3, 5, dtype=torch.bool),
        torch.zeros(2, 4, dtype=torch.bool),
        torch.zeros(2, 5),
    ):
        with pytest.raises(ShapeError, match="key_padding_mask"):
            module(torch.zeros(2, 5, 8), key_padding_mask=mask)
    other = wn.attention_mask(None, True, 2, 4, torch.device("cpu"))
    with pytest.raises(ShapeError, match="finished mask"):
        module(torch.zeros(2, 5, 8), key_padding_mask=other)


@pytest.mark.parametrize("kind", CROSS)
def test_cross_attention_names_the_side_that_does_not_fit(kind):
    module = kind(8, 2, memory_dim=6)
    with pytest.raises(ShapeError, match=r"received x \(2, 5, 6\)"):
        module(torch.zeros(2, 5, 6), torch.zeros(2, 3, 6))
    with pytest.raises(ShapeError, match=r"received memory \(2, 3, 8\)"):
        module(torch.zeros(2, 5, 8), torch.zeros(2, 3, 8))
    with pytest.raises(ShapeError, match=r"received memory \(3, 3, 6\).*batch"):
        module(torch.zeros(2, 5, 8), torch.zeros(3, 3, 6))


@pytest.mark.parametrize(
    ("module", "ids"),
    [
        (wn.UnitEmbedding(5, 4), torch.tensor([5])),
        (wn.LearnedPositions(5, 4), torch.tensor([-1])),
        (wn.SinusoidalPositions(5, 4), torch.tensor([7])),
        (wn.InjectiveEmbedding(5, 4), torch.tensor([[9]])),
        (wn.UnitEmbedding(5, 4), torch.tensor([0.5])),
    ],
)
def test_ids_outside_the_table_are_refused(module, ids):
    with pytest.raises(ShapeError, match=type(module).__name__):
        module(ids)
