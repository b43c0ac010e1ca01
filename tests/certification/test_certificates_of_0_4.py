"""Certificates that 0.4 stored, as JSON and as pickles: they load, and are still true.

`certificates_0_4.json` was written by wellposed 0.4.0 at commit 202ffd21. For each module of `MODULES` it
holds the arguments of `certify`, the weights, ``to_dict()`` and a pickle of the certificate.
"""

import base64
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import Certificate, CertifiedLayer, certify
from wellposed.models import WellposedConfig, WellposedForSequenceClassification
from wellposed.nn import MLP, InvertibleResidual, MaxMinFeedForward

STORED = json.loads(Path(__file__).with_name("certificates_0_4.json").read_text("utf-8"))


def classifier(attention, **more):
    config = WellposedConfig(
        hidden_size=4, num_attention_heads=2, num_hidden_layers=1, intermediate_size=6, vocab_size=5,
        max_position_embeddings=4, num_labels=3, attention=attention, norm="none", **more,
    )  # fmt: skip
    return WellposedForSequenceClassification(config)


MODULES = {
    "chain": lambda: nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)
    ),
    "residual": lambda: InvertibleResidual(MLP(4, 6)),
    "maxmin": lambda: MaxMinFeedForward(4, 6),
    "norm": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)),
    "l2_tied": lambda: classifier("l2_tied"),
    "l2_contractive": lambda: classifier("l2_contractive"),
    "cosine": lambda: classifier("cosine"),
    "ball": lambda: classifier("ball"),
    "dot_product": lambda: classifier("dot_product"),
    "words": lambda: classifier("ball", residual="rezero"),
}


def stored_module(name):
    module = MODULES[name]().double().eval()
    weights = {
        key: torch.tensor(values, dtype=torch.float64)
        for key, values in STORED[name]["weights"].items()
    }
    module.load_state_dict(weights)
    return module


def numbers(values):
    return {key: math.inf if value == "inf" else value for key, value in values.items()}


def from_json(values):
    layers = tuple(CertifiedLayer(**numbers(layer)) for layer in values["layers"])
    return Certificate(**{**numbers(values), "layers": layers})


def unpickled(name):
    return pickle.loads(base64.b64decode(STORED[name]["pickle"]))


def test_every_stored_certificate_is_read():
    assert list(STORED) == list(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_stored_certificate_loads_from_json_and_from_a_pickle(name):
    plain = STORED[name]["json"]
    loaded = from_json(plain)
    pickled = unpickled(name)
    assert loaded.total == pickled.total == plain["total"]
    assert loaded.table() == pickled.table()
    assert pickled.to_dict() == plain
    assert (pickled.form, pickled.around, pickled.reach, pickled.attained) == (
        "",
        0,
        math.inf,
        None,
    )
    pickled.require_weights_of(stored_module(name))


@pytest.mark.parametrize("name", MODULES)
def test_a_stored_certificate_is_still_true(name):
    module = stored_module(name)
    asked = STORED[name]["asked"]
    old = unpickled(name)
    assert certify(module, **asked).total <= old.total * (1 + 1e-9)
    options = {key: asked[key] for key in ("norm", "radius") if key in asked}
    attack = lipschitz_lower_bound(
        module, (asked["seq_len"], 4), restarts=4, steps=30, scales=(1e-3, 10.0), **options
    )
    assert 0 < attack.value <= old.total * (1 + 1e-9)


def test_a_stored_certificate_still_gives_its_radius():
    old = unpickled("ball")
    module = stored_module("ball")
    logits = module(inputs_embeds=torch.ones(1, 4, 4, dtype=torch.float64)).logits.detach()
    first, second = logits[0].topk(2).values
    assert old.head is not None
    assert float(old.radius(logits)) >= float(first - second) / (math.sqrt(2) * old.total) > 0
