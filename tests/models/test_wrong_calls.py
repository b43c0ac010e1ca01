"""What a caller gets wrong of a model or its configuration is an error of ours that names it."""

import math

import pytest
import torch
from tests.support.refusal import bad_config, bad_shape
from torch import nn

from wellposed.errors import WellposedError
from wellposed.models import (
    ARCHITECTURES,
    LSTMConfig,
    TransJectConfig,
    TransJectModel,
    WellposedConfig,
    WellposedDecoder,
    WellposedModel,
    WellposedSeq2SeqModel,
    build_model,
)

SIZES = {"vocab_size": 13, "max_position_embeddings": 10, "hidden_size": 12}
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
KINDS = [
    (family, kind)
    for family in ("wellposed", "transject", "lstm")
    for kind in ARCHITECTURES.get(family).kinds
]
BODIES = [WellposedModel, WellposedDecoder, WellposedSeq2SeqModel]
ODD = ["x", None, -1, 0, 1.5, math.nan, math.inf, [], {}, True, 10**30, nn.RMSNorm(8)]


def heads(family):
    return {} if family == "transject" else {"num_attention_heads": 3}


MODELS = {
    **{f"{family} {kind}": lambda f=family, k=kind: build_model(f, k, **SIZES, **heads(f)) for family, kind in KINDS},
    **{body.__name__: lambda body=body: body(WellposedConfig(**SIZES, **heads(""))) for body in BODIES},
    "TransJectModel": lambda: TransJectModel(TransJectConfig(**SIZES, position="learned")),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_misspelt_keyword_is_told_the_nearest(name):
    with bad_config(match=r"unknown keyword of \w+.forward 'input_idz'; nearest: .*input_ids"):
        MODELS[name]()(input_idz=IDS)


@pytest.mark.parametrize("family", ["wellposed", "transject", "lstm"])
@pytest.mark.parametrize("labels", [IDS[:, :3], IDS[0], IDS.float(), 13 + IDS])
def test_labels_of_a_language_model_fit_its_tokens(family, labels):
    with bad_shape(match="labels"):
        build_model(family, "causal_lm", **SIZES, **heads(family))(input_ids=IDS, labels=labels)


@pytest.mark.parametrize("name", ["WellposedModel", "TransJectModel"])
@pytest.mark.parametrize("shape", [(2, 4), (3, 5), None])
def test_positions_fit_the_tokens(name, shape):
    positions = torch.zeros(shape, dtype=torch.int64) if shape else torch.zeros(2, 5)
    with bad_shape(match="position"):
        MODELS[name]()(input_ids=IDS, position_ids=positions)


def test_a_decoder_names_the_memory():
    decoder = WellposedDecoder(WellposedConfig(**SIZES, **heads("")))
    table = nn.Embedding(13, 12)
    for memory in (torch.zeros(2, 4, 7), torch.zeros(2, 12)):
        with bad_shape(match="memory"):
            decoder(input_ids=IDS, encoder_hidden_states=memory, token_embedding=table)


@pytest.mark.parametrize("kind", [WellposedConfig, TransJectConfig, LSTMConfig])
def test_odd_values_of_a_configuration_are_taken_or_refused(kind):
    names = {*kind.hints(), "num_labels", "id2label"}
    for name in sorted(names):
        for value in ODD:
            try:
                kind(**{**SIZES, **heads(kind.model_type), name: value}).to_json_string()
            except WellposedError as error:
                assert name in str(error)  # noqa: PT017 (either way will do)


@pytest.mark.parametrize("kind", [WellposedConfig, TransJectConfig])
@pytest.mark.parametrize("name", ["num_labels", "num_hidden_layers"])
def test_a_number_that_no_memory_holds_is_refused_before_anything_is_made(kind, name):
    with bad_config(match=rf"{name}: received 100000000; expected .*< "):
        kind(**SIZES, **heads(kind.model_type), **{name: 100_000_000})
