"""A wrong call of a model or its configuration is an error of ours that names the mistake."""

import math

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from wellposed.errors import ConfigError, ShapeError, WellposedError
from wellposed.models import (
    ARCHITECTURES,
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
    for family in ("wellposed", "transject")
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
    with pytest.raises(
        ConfigError, match=r"unknown keyword of \w+.forward 'input_idz'; nearest: .*input_ids"
    ):
        MODELS[name]()(input_idz=IDS)


def ids(*rows):
    return torch.tensor(rows)


LANGUAGE = "wellposed causal_lm"
BODY = "TransJectModel"
SEQ2SEQ = "wellposed seq2seq_lm"
PAIR = "wellposed sequence_pair_classification"
TWO = ids([3, 4])
MISFITS = [
    (LANGUAGE, {"input_ids": ids([1] * 11)}, "of 11 tokens; expected at most 10.*embeddings >= 11"),
    (LANGUAGE, {"input_ids": ids([1, 2], [2, 13])}, r"token 13 at row 1, position 1; .*\[0, 13\)"),
    (LANGUAGE, {"input_ids": ids([-1])}, "token -1 at row 0, position 0"),
    (LANGUAGE, {"input_ids": IDS, "attention_mask": IDS[:, :3]}, r"shape \(2, 3\).*\(2, 5\)"),
    (LANGUAGE, {"input_ids": IDS[0]}, r"input_ids: received shape \(5,\)"),
    (LANGUAGE, {"input_ids": IDS[:, :0]}, r"input_ids: received shape \(2, 0\)"),
    (LANGUAGE, {}, "received neither of input_ids and inputs_embeds"),
    (LANGUAGE, {"inputs_embeds": torch.ones(1, 2, 5)}, r"\(1, 2, 5\); .*\(batch, tokens, 12\)"),
    (LANGUAGE, {"input_ids": TWO, "position_ids": ids([-1, 0])}, "position_ids below 0"),
    (LANGUAGE, {"input_ids": TWO, "position_ids": ids([10, 0])}, "a sequence of 11 tokens"),
    (BODY, {"inputs_embeds": torch.ones(1, 2, 8).long()}, r"X\^0, position codes included"),
    (BODY, {"inputs_embeds": torch.ones(1, 2, 12).long()}, "int64; expected floating vectors"),
    (BODY, {"input_ids": IDS, "attention_mask": ids([1] * 5, [0] * 5)}, "padding alone"),
    (BODY, {}, "received neither of input_ids and inputs_embeds"),
    (SEQ2SEQ, {"input_ids": TWO}, "neither of decoder_input_ids and decoder_inputs_embeds"),
    (SEQ2SEQ, {"decoder_input_ids": TWO}, "received neither of input_ids and inputs_embeds"),
    (SEQ2SEQ, {"input_ids": TWO, "decoder_input_ids": ids([1, 13])}, "decoder_input_ids.*token 13"),
    (SEQ2SEQ, {"input_ids": TWO, "decoder_input_ids": ids([1] * 11)}, "11 tokens; .* at most 10"),
    (SEQ2SEQ, {"input_ids": TWO, "decoder_input_ids": TWO, "attention_mask": IDS}, "attention"),
    (PAIR, {"input_ids": IDS, "input_ids_pair": TWO}, "received 1 sequences for 2 in input_ids"),
    (PAIR, {"input_ids": IDS}, "neither of input_ids and inputs_embeds"),
    *(
        (name, {"input_ids": IDS.to(dtype)}, f"input_ids: received {dtype}; expected torch.int64")
        for name in (LANGUAGE, BODY)
        for dtype in (torch.float32, torch.bool, torch.uint8)
    ),
    *(
        (f"{family} causal_lm", {"input_ids": IDS, "labels": labels}, "labels")
        for family in ("wellposed", "transject")
        for labels in (IDS[:, :3], IDS[0], IDS.float(), 13 + IDS)
    ),
    *(
        (f"{family} sequence_classification", {"input_ids": IDS, "labels": labels}, message)
        for family in ("wellposed", "transject")
        for labels, message in {
            torch.tensor([0, 2]): r"class 2 at row 1; expected classes in \[0, 2\)",
            torch.tensor([-1, 0]): "class -1 at row 0",
            torch.tensor([0, 1, 2]): r"shape \(3,\); expected \(2,\), or \(2, 2\)",
            torch.tensor(1): r"shape \(\); expected",
        }.items()
    ),
    *(
        (name, {"input_ids": IDS, "position_ids": positions}, "position")
        for name in ("WellposedModel", BODY)
        for positions in (IDS[:, :4] * 0, torch.zeros(3, 5).long(), torch.zeros(2, 5))
    ),
]


@pytest.mark.parametrize(("name", "arguments", "message"), MISFITS)
def test_what_does_not_fit_is_named(name, arguments, message):
    with pytest.raises(ShapeError, match=message):
        MODELS[name]()(**arguments)


CANNOT = [
    *((name, {"output_attentions": True}, "output_attentions=True") for name in (LANGUAGE, BODY)),
    (SEQ2SEQ, {"decoder_input_ids": IDS, "output_attentions": True}, "output_attentions=True"),
    *((name, {"use_cache": True}, "is not causal") for name in ("WellposedModel", BODY)),
    (LANGUAGE, {"use_cache": False, "past_key_values": DynamicCache()}, "with use_cache=False"),
    ("transject causal_lm", {"past_key_values": object()}, "expected TransJectCache"),
    (
        SEQ2SEQ,
        {"decoder_input_ids": IDS, "past_key_values": DynamicCache()},
        "received DynamicCache; expected EncoderDecoderCache",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "message"), CANNOT)
def test_what_cannot_be_done_is_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        MODELS[name]()(input_ids=IDS, **arguments)


def test_a_decoder_names_the_memory():
    decoder = WellposedDecoder(WellposedConfig(**SIZES, **heads("")))
    table = nn.Embedding(13, 12)
    for memory in (torch.zeros(2, 4, 7), torch.zeros(2, 12)):
        with pytest.raises(ShapeError, match="memory"):
            decoder(input_ids=IDS, encoder_hidden_states=memory, token_embedding=table)


@pytest.mark.parametrize("kind", [WellposedConfig, TransJectConfig])
def test_odd_values_of_a_configuration_are_taken_or_refused(kind):
    names = {*kind.hints(), "num_labels", "id2label"}
    for name in sorted(names):
        for value in ODD:
            try:
                kind(**{**SIZES, **heads(kind.model_type), name: value}).to_json_string()
            except WellposedError as error:
                assert name in str(error)  # noqa: PT017 (either way will do)
