"""A certificate covers the weights that it was made of, and warns if they have changed."""

import copy
import pickle
import warnings

import pytest
import torch
from tests.support.refusal import refuses_config
from torch import nn

from wellposed.certification import Certificate, certify


@pytest.mark.parametrize("change", ["step", "data", "buffer"])
def test_every_change_of_the_module_is_said_and_none_that_is_not_one(change):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model.register_buffer("scale", torch.ones(1))
    certificate, logits = certify(model, seq_len=2), torch.randn(1, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = certificate.radius(logits)
        model.train().eval()
        certificate.radius(logits)
        pickle.loads(pickle.dumps(certificate)).radius(logits)
    if change == "step":
        model(torch.ones(1, 2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    elif change == "data":
        model[0].weight.data[0, 0] += 1e-3
    else:
        model.scale.zero_()
    with pytest.warns(
        UserWarning, match="weights of this .* have changed since.*certify the module again"
    ):
        assert torch.equal(certificate.radius(logits), right), "that of the weights at the time"


def test_other_weights_are_refused():
    model = nn.Linear(4, 3)
    certificate = certify(model, seq_len=4)
    certificate.require_weights_of(copy.deepcopy(model))
    model.weight.data.mul_(2)
    refuses_config("other weights", certificate.require_weights_of, model)


def test_the_digest_is_kept_with_the_certificate():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    digest = certify(first, seq_len=2).weights
    assert digest == certify(copy.deepcopy(first), seq_len=3).weights
    assert digest != certify(second, seq_len=2).weights
    assert certify(first, seq_len=2).to_dict()["weights"] == digest
    assert Certificate(1.0, (), "exact", 2, 1, 1, "", "", "").weights == ""


def test_a_cross_check_that_could_not_run_stands_in_the_table():
    linear = nn.Linear(4, 4)
    assert "not tested" not in certify(linear, seq_len=2).table()
    assert "not tested: cross_check=False" in certify(linear, seq_len=2, cross_check=False).table()
