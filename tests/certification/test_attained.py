"""Attained slopes next to the bounds of a certificate."""

import copy
import re

import pytest
import torch
from torch import nn

from wellposed.certification import attain, certify
from wellposed.errors import ConfigError
from wellposed.models import WellposedConfig, WellposedModel


def test_the_cross_check_leaves_its_slopes_and_an_attack_larger_ones():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).double()
    certificate = certify(net)
    attacked = attain(certificate, steps=40)
    assert set(certificate.attained) == set(attacked.attained) == {"", "0", "1", "2"}
    exact = float(torch.linalg.matrix_norm(net[0].weight.detach(), 2))
    assert attacked.attained["0"] == pytest.approx(exact, rel=1e-3)
    for path, slope in attacked.attained.items():
        bounds = {row.path: row.lipschitz for row in certificate.layers} | {"": certificate.total}
        assert certificate.attained[path] <= slope * 1.01 <= bounds[path] * 1.02
    assert certificate.total <= 1.4 * attacked.attained[""]
    assert attacked == certificate, "the same statement"


def test_the_table_shows_them_if_asked():
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.eye_(net[0].weight)
    certificate = attain(certify(net), steps=5)
    assert "attained" not in certificate.table()
    table = certificate.table(attained=True)
    assert re.search(r"bound +attained +loose +label", table)
    assert re.search(r"^1 +1 +1 +exact", table, re.MULTILINE)
    without = certify(net, cross_check=False).table(attained=True)
    assert re.search(r"bound +attained +loose +label", without)


@pytest.mark.slow
def test_every_layer_of_a_model_that_runs_alone_is_attacked():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "norm": "none"}
    model = WellposedModel(WellposedConfig(**sizes, attention="l2_tied")).eval()
    certificate = attain(certify(model, seq_len=4), steps=10)
    bounds = {row.path: row.lipschitz for row in certificate.layers} | {"": certificate.total}
    assert {"layers.0", "layers.0.attention", "layers.0.feedforward"} <= set(certificate.attained)
    for path, slope in certificate.attained.items():
        assert 0 < slope <= bounds[path] * (1 + 1e-6), path


def test_bad_input_is_refused_by_name():
    net = nn.Linear(3, 3)
    certificate = certify(net)
    with pytest.raises(ConfigError, match="no longer exists"):
        attain(copy.copy(certificate))
    net.weight.data.mul_(2)
    with pytest.raises(ConfigError, match="other weights"):
        attain(certificate)
