"""Every wrong size, keyword, value or shape is a wellposed error that names it."""

import inspect
import math
import re

import numpy
import pytest
import torch
from torch import nn

from wellposed import nn as wn
from wellposed.errors import ConfigError, ShapeError, WellposedError

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
    flags = [torch.zeros(shape, dtype=torch.bool) for shape in ((3, 5), (2, 4))]
    for mask in (*flags, torch.zeros(2, 5)):
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
    mask = torch.zeros(2, 2, dtype=torch.bool)
    with pytest.raises(ShapeError, match="cross-attention: key_padding_mask"):
        module(torch.zeros(2, 5, 8), torch.zeros(2, 3, 6), key_padding_mask=mask)


@pytest.mark.parametrize(
    ("module", "ids"),
    [
        (wn.UnitEmbedding(5, 4), torch.tensor([5])),
        (wn.BallEmbedding(5, 4), torch.tensor([5])),
        (wn.LearnedPositions(5, 4), torch.tensor([-1])),
        (wn.SinusoidalPositions(5, 4), torch.tensor([7])),
        (wn.InjectiveEmbedding(5, 4), torch.tensor([[9]])),
        (wn.UnitEmbedding(5, 4), torch.tensor([0.5])),
    ],
)
def test_ids_outside_the_table_are_refused(module, ids):
    with pytest.raises(ShapeError, match=type(module).__name__):
        module(ids)


BUILT = {
    **{kind: {"embed_dim": 8, "num_heads": 2} for kind in [*SELF, *CROSS]},
    wn.MLP: {"embed_dim": 8, "hidden_dim": 16},
    wn.MaxMinFeedForward: {"embed_dim": 8, "hidden_dim": 16},
    wn.OrthogonalFeedForward: {"embed_dim": 8},
    wn.BallProjection: {"embed_dim": 8},
    wn.ConvexResidual: {},
    wn.BudgetResidual: {"budget": 2.0},
    wn.InvertibleResidual: {"f": nn.Identity()},
    wn.ReversibleSequential: {"blocks": [wn.InvertibleResidual(nn.Identity())]},
    wn.LearnedPositions: {"num_positions": 5, "embed_dim": 8},
    wn.SinusoidalPositions: {"num_positions": 5, "embed_dim": 8},
    wn.NoPositions: {"embed_dim": 8},
    wn.InjectiveEmbedding: {"vocab_size": 5, "embed_dim": 8},
    wn.BallEmbedding: {"num_embeddings": 5, "embedding_dim": 8},
    wn.UnitEmbedding: {"num_embeddings": 5, "embedding_dim": 8},
    wn.OrthogonalLinear: {"embed_dim": 8},
    wn.GramAttention: {"embed_dim": 8},
    wn.GramSpectrum: {"embed_dim": 8},
    wn.LearnedSpectrum: {"embed_dim": 8},
    wn.DrawnSpectrum: {"embed_dim": 8},
    wn.ExpertMixture: {"embed_dim": 8, "num_experts": 2},
    wn.InjectiveResidual: {"num_layers": 2},
    wn.TransJectBlock: {"embed_dim": 8, "num_layers": 2},
    wn.TransJectStack: {"embed_dim": 8, "num_layers": 2},
    wn.DynamicTanh: {"width": 8},
    wn.DynamicErf: {"width": 8},
    wn.LearnedScale: {"size": 8},
    wn.NGPTAttention: {"embed_dim": 8, "num_heads": 2},
    wn.NGPTFeedForward: {"embed_dim": 8, "hidden_dim": 12},
    wn.NGPTResidual: {"embed_dim": 8},
    wn.PreNorm: {"normalized_shape": 8},
    wn.PostNorm: {"normalized_shape": 8},
}
ODD = ["x", None, -1, 0, 1.5, math.nan, math.inf, [], {}, True, 10**30, nn.RMSNorm(8)]


@pytest.mark.parametrize("kind", BUILT)
def test_odd_values_are_taken_or_refused_by_name(kind):
    messages = {}
    for name in inspect.signature(kind).parameters:
        for value in ODD if name not in ("_weight", "device", "dtype") else ():
            try:
                kind(**{**BUILT[kind], name: value})
            except WellposedError as error:
                messages[name, str(value)] = str(error)
    for (name, _), text in messages.items():
        assert {kind.__name__, name} & {*re.findall(r"\w+", text)}, text


REFUSED = [
    *((kind, {"num_heads": 3}, "num_heads=3; expected a number of heads that divides") for kind in [*SELF, *CROSS]),
    *((wn.BallAttention, {"temperature": value}, "temperature = ") for value in (0.0, -1.0, math.nan)),
    (wn.BallCrossAttention, {"temperature": 10.0}, "max_temperature=10.0"),
    (wn.BallAttention, {"max_temperature": math.inf}, "max_temperature = inf"),
    (wn.BallProjection, {"embed_dim": 0}, "BallProjection: embed_dim = 0, expected an integer >= 1"),
    *((wn.BallProjection, {"radius": value}, "radius = ") for value in (0.0, math.inf)),
    (wn.MaxMinFeedForward, {"hidden_dim": 7}, "hidden_dim=7"),
    *((wn.ConvexResidual, {"share": value}, "share = ") for value in (0.0, 1.0)),
    *((wn.ConvexResidual, {"divisor": value}, "wellposed.certify") for value in (0.0, math.nan)),
    *((wn.BudgetResidual, {"budget": value}, "use ConvexResidual") for value in (0.0, -2.0, 1.0, math.inf)),
    (wn.CosineSelfAttention, {"eps": 0, "tau": -1, "dropout": 1}, r"eps = [\s\S]*tau = [\s\S]*dropout = "),
    (wn.L2SelfAttention, {"query_width": 3, "max_tokens": 0}, r"query_width = [\s\S]*max_tokens = "),
    (wn.L2SelfAttention, {"init_scale": -1.0}, "init_scale"),
    (wn.L2SelfAttention, {"norm": "max"}, "'tok', 'inf' or 2"),
    (wn.L2SelfAttention, {"contractive": 0.5, "bound": "kim2020"}, "'sharp' or 'kim2021'"),
    (wn.GramSpectrum, {"normalization": "mxa"}, "'max' or 'trace'"),
    *((wn.GramSpectrum, {"eps": value}, "tokens that are zero") for value in (0.0, 1e-60, math.inf)),
    *((wn.TransJectStack, {"num_layers": value}, "TransJectStack: num_layers") for value in (-1, 1.5, True, math.nan)),
    (wn.InjectiveEmbedding, {"vocab_size": 0, "max_positions": 0}, r"vocab_size = [\s\S]*max_positions = "),
    (wn.OrthogonalFeedForward, {"dropout": 1.0}, "dropout = 1.0"),
    *((wn.DynamicTanh, {"width": value}, "width = ") for value in (-1, 0, 1.5, None)),
    (wn.DynamicTanh, {"alpha": math.nan}, "alpha = nan"),
    *((kind, {"normalized_shape": -1}, "normalized_shape = -1") for kind in (wn.PreNorm, wn.PostNorm)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED)
def test_a_value_out_of_range_is_refused(kind, options, words):
    with pytest.raises((ConfigError, ShapeError), match=words):
        kind(**{**BUILT[kind], **options})


def test_max_min_wants_pairs():
    with pytest.raises(ShapeError, match="width 7 is odd"):
        wn.MaxMin()(torch.zeros(2, 7))


@pytest.mark.parametrize("kind", BUILT)
def test_a_misspelt_keyword_is_told_the_nearest(kind):
    *_, last = inspect.signature(kind).parameters
    nearest = "nearest: " if last == "options" else f"nearest: .*{last}"
    with pytest.raises(ConfigError, match=f"keyword of {kind.__name__} '{last}z'; {nearest}"):
        kind(**{**BUILT[kind], f"{last}z": 1})


def test_numpy_sizes_are_sizes():
    sizes = numpy.int64(8), numpy.int32(2)
    assert wn.L2SelfAttention(*sizes, contractive=numpy.float32(0.5)).contractive == 0.5


def test_a_constructor_without_its_sizes_is_told_what_it_takes():
    with pytest.raises(ConfigError, match=r"L2SelfAttention: missing .*'num_heads'; it takes"):
        wn.L2SelfAttention(8)
