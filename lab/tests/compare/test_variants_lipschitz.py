"""The Lipschitz variant: its parts are registered, training keeps its weights in their set, and no
attack beats it."""

import math
from dataclasses import replace

import pytest
import torch

import wellposed as wp
from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed.models import build_model, input_vectors, model_keywords
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.loop.build import build_constraint

SIZES = ModelOptions(hidden_size=16, num_attention_heads=2, num_hidden_layers=2)
BASE = RunConfig("listops", model=SIZES)
VOCABULARY = {
    "vocab_size": 11, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Each held matrix is orthogonal to 1e-5, so its norm is below 1 + 1e-5; a path holds four of each
# block, and the head.
OFF = (1 + 1e-5) ** 10
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


def model_of(spec, kind="sequence_classification", **sizes):
    """Return a model of the variant, a few steps into training, and what holds its weights."""
    config = apply_variant(spec, replace(BASE, model=replace(SIZES, **sizes)))
    torch.manual_seed(0)
    model = build_model("wellposed", kind, **VOCABULARY, **model_keywords(config.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    handle = build_constraint(config.constrain, model, optimizer)
    inputs = {"input_ids": IDS, "labels": IDS if kind.endswith("lm") else torch.tensor([0, 1])}
    if "pair" in kind:
        inputs["input_ids_pair"] = IDS.flip(0)
    for _ in range(5):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), handle


@pytest.mark.parametrize("budget", [1.0, 3.0])
@pytest.mark.parametrize(
    "kind", ["sequence_classification", "sequence_pair_classification", "causal_lm", "seq2seq_lm"]
)
def test_every_kind_of_model_keeps_its_budget_after_training(kind, budget):
    model, handle = model_of(f"lipschitz:{budget}", kind)
    assert handle.error().worst <= 1e-5
    # of an encoder-decoder, whose decoder reads two sequences, the encoder
    part = model.model.encoder if kind == "seq2seq_lm" else model
    certificate = wp.certify(part, seq_len=4).require()
    assert 0.3 < certificate.total <= budget * OFF
    lower = wp.lipschitz_lower_bound(part, (4, 16), restarts=2, steps=8)
    assert 0.01 < lower.ratio(certificate) <= 1 + 1e-6


@pytest.mark.parametrize(("budget", "norm"), [(1.0, "tok"), (3.0, 2), (3.0, "inf")])
def test_no_attack_beats_a_model_of_pairs(budget, norm):
    model, _ = model_of(f"lipschitz:{budget}", "sequence_pair_classification", num_hidden_layers=1)
    is_padded = norm != 2
    real = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    masks = {"attention_mask": real[:1], "attention_mask_pair": real[1:]}
    lower = wp.lipschitz_lower_bound(
        model, (8, 16), norm=norm, restarts=2, steps=12, scales=(1e-3, 1e3),
        forward_kwargs=masks if is_padded else None,
    )  # fmt: skip
    assert 1e-4 < lower.ratio(wp.certify(model, seq_len=4, norm=norm)) <= 1 + 1e-6


def test_the_control_without_blocks_is_a_bag_of_unit_vectors():
    model, _ = model_of("lipschitz", num_hidden_layers=0)
    expected = input_vectors(model, IDS) + model.model.embeddings.position(torch.arange(4))
    torch.testing.assert_close(model(input_ids=IDS).logits, model.classifier(expected.mean(1)))
    assert wp.certify(model, seq_len=4).total <= OFF
    pair, _ = model_of("lipschitz", "sequence_pair_classification", num_hidden_layers=0)
    assert 0.3 < wp.certify(pair, seq_len=4).total <= OFF


def test_a_language_model_without_blocks_generates_without_a_cache():
    model, _ = model_of("lipschitz", "causal_lm", num_hidden_layers=0)
    ids = model.generate(IDS, max_new_tokens=3, do_sample=False)
    for length in (4, 5, 6):
        logits = model(input_ids=ids[:, :length]).logits
        assert torch.equal(logits[:, -1].argmax(-1), ids[:, length])
    with pytest.raises(ConfigError, match="the model has no blocks"):
        model(input_ids=IDS, use_cache=True)
    with pytest.raises(ConfigError, match="a decoder without blocks reads no source"):
        model_of("lipschitz", "seq2seq_lm", num_hidden_layers=0)


BALL = {"attention": "ball"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**BALL, "ball_temperature": 0.0}, "ball_temperature = 0.0, expected"),
        ({**BALL, "ball_max_temperature": math.inf}, "ball_max_temperature = inf"),
        ({**BALL, "attention_dropout": 0.1}, "attention 'ball' with attention_dropout=0.1"),
        ({**BALL, "qk_norm": True}, "attention 'ball' with .*qk_norm=True"),
        ({**BALL, "ball_temperature": 11.0}, "expected temperature < max_temperature"),
        ({"ball_temperature": 1.0}, "= 1.0, which only attention 'ball' reads"),
        ({"residual": "budget", "budget": 1.0}, "budget = 1.0, expected a finite number >"),
        ({"residual": "convex", "budget": 3.0}, "= 3.0, which only residual 'budget' reads"),
        ({"feedforward": "maxmin", "activation": "relu"}, "'relu', which only feedforward 'mlp'"),
    ],
)
def test_options_out_of_range_unread_or_beyond_the_bound_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_model("wellposed", "causal_lm", **options)
