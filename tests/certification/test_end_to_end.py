"""Small whole models: the better of two routes, the radius of a known head, the ball of
embeddings."""

import math

import pytest
import torch
from tests.support.certificates import rows

from wellposed import models as wm
from wellposed.certification import certify

TOKENS = 5


def _config(**changes):
    values = {
        "hidden_size": 6, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8, "num_labels": 3,
        "vocab_size": 11, "max_position_embeddings": 8, "attention": "l2_tied", "norm": "none", "layer_norm_eps": 0.1,
    }  # fmt: skip
    return wm.WellposedConfig(**{**values, **changes})


def test_norm_two_takes_the_better_of_two_routes():
    model = wm.WellposedForSequenceClassification(_config()).eval()
    tok = certify(model, seq_len=8)
    two = certify(model, seq_len=8, norm=2)
    assert two.total <= tok.total * (1 + 1e-9)
    short = certify(model, seq_len=8, norm=2, min_tokens=8)
    assert short.total <= two.total
    assert two.layers[0].path == "model"


def test_the_known_head_sharpens_the_radius():
    model = wm.WellposedForSequenceClassification(_config(num_hidden_layers=1)).eval()
    certificate = certify(model, seq_len=TOKENS)
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    blunt = 2.0 / (math.sqrt(2) * certificate.total)
    assert float(certificate.radius(logits)) >= blunt
    weight, body = certificate.head
    by_hand = min(2.0 / (float((weight[0] - weight[k]).double().norm()) * body) for k in (1, 2))
    assert float(certificate.radius(logits)) == pytest.approx(max(by_hand, blunt), rel=1e-5)


def test_the_embeddings_ball_holds_every_token():
    model = wm.WellposedModel(_config()).eval()
    ids = torch.arange(8)[None]
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    inner = rows(model, 8, radius=wm.embedding_radius(model))["layers.0"].radius
    assert float(states[0].detach().norm(dim=-1).max()) <= inner
