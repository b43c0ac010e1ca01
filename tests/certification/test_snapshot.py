"""A certificate covers the weights that it was made of, and warns if they have changed."""

import copy
import pickle
import warnings

import pytest
import torch
from tests.certification.test_sum import classifier
from torch import nn

from wellposed import nn as wn
from wellposed.certification import Certificate, certify, register_rule
from wellposed.errors import ConfigError


@pytest.mark.parametrize("change", ["step", "data", "buffer"])
def test_every_change_of_the_module_is_said_and_none_that_is_not_one(change):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model.register_buffer("scale", torch.ones(1))
    certificate = certify(model, seq_len=2)
    logits = torch.randn(1, 3)
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
    with pytest.raises(ConfigError, match="other weights"):
        certificate.require_weights_of(model)


class Held(nn.Module):
    """Computes with values that are neither parameters nor buffers of the state_dict."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.plain_weight = torch.ones(4)
        self.bounds = {"low": [1, 2.0], "high": (3,)}
        self.register_buffer("unsaved", torch.ones(4), persistent=False)
        self.outside = [nn.Linear(4, 4)]

    def forward(self, x):
        return self.up(x)


@register_rule(Held)
def _held(module, context):
    return context.chain_of(module, "up")


CERTIFIED = {
    "norm": lambda: nn.LayerNorm(4, eps=0.1),
    "rms": lambda: nn.RMSNorm(4, eps=0.1),
    "elu": lambda: nn.ELU(1.0),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "ball": lambda: wn.BallAttention(4, 2).eval(),
    "cosine": lambda: wn.CosineSelfAttention(4, 2).eval(),
    "dropout": lambda: nn.Dropout(0.5).eval(),
    "attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True).eval(),
    "classifier": lambda: classifier(1).eval(),
    "held": Held,
}
CHANGES = {
    "norm": [("eps", 1e-3), ("normalized_shape", (2, 2))],
    "rms": [("eps", 1e-3)],
    "elu": [("alpha", 3.0), ("inplace", True)],
    "leaky": [("negative_slope", 7.0)],
    "ball": [("max_temperature", 99.0), ("num_heads", 1), ("unit_lipschitz", False)],
    "cosine": [("eps", 1e-9)],
    "dropout": [("training", True)],
    "attention": [("num_heads", 1), ("training", True)],
    "classifier": [("pool", torch.max)],
    "held": [
        ("plain_weight", torch.zeros(4)),
        ("bounds", {"low": [1, 2.5], "high": (3,)}),
        ("unsaved", torch.zeros(4)),
        ("outside", [nn.Linear(4, 4)]),
    ],
}


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [(name, *change) for name, changes in CHANGES.items() for change in changes],
)
@pytest.mark.parametrize("inner", [False, True])
def test_a_changed_option_is_said_and_refused(name, attribute, value, inner):
    part = CERTIFIED[name]()
    module = nn.Sequential(part) if inner else part
    certificate = certify(module, seq_len=2, radius=1.0, cross_check=False)
    certificate.require_weights_of(copy.deepcopy(module))
    setattr(part, attribute, value)
    with pytest.raises(ConfigError, match="of other options"):
        certificate.require_weights_of(module)
    with pytest.warns(UserWarning, match="options .*eps.* have changed since"):
        certificate.radius(torch.randn(1, 3), largest_token=0.5)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_of_later_is_said(register):
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    certificate = certify(module, seq_len=2)
    handle = getattr(module[0], register)(lambda *_: None)
    with pytest.raises(ConfigError, match="of other options"):
        certificate.require_weights_of(module)
    handle.remove()
    certificate.require_weights_of(module)


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_pass_a_copy_and_a_folder_change_no_option(name, tmp_path):
    module = CERTIFIED[name]()
    certificate = certify(module, seq_len=2, radius=1.0)
    if name == "classifier":
        module(input_ids=torch.zeros(1, 2, dtype=torch.long))
        module.save_pretrained(tmp_path)
        certificate.require_weights_of(type(module).from_pretrained(tmp_path).eval())
    elif name != "attention":
        module(torch.randn(1, 2, 4))
    certificate.require_weights_of(module)
    certificate.require_weights_of(pickle.loads(pickle.dumps(module)))


def test_a_mode_that_changes_nothing_is_no_option():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), wn.MLP(4, 8)).eval()
    certificate = certify(module, seq_len=2)
    certificate.require_weights_of(module.train())


def test_a_certificate_of_0_4_without_options_still_loads():
    """A pickle of 0.4 has no such field; the values that it has are those of then."""
    module = nn.LayerNorm(4)
    made = certify(module, seq_len=2)
    state = {name: value for name, value in made.__getstate__().items() if name != "options"}
    old = Certificate.__new__(Certificate)
    vars(old).update(state)
    old = pickle.loads(pickle.dumps(old))
    assert old.options == ""
    module.eps = 1.0
    old.require_weights_of(module)
    assert old.to_dict()["weights"] == made.weights


def test_the_digest_is_kept_with_the_certificate():
    first = nn.Linear(2, 2)
    second = nn.Linear(2, 2)
    digest = certify(first, seq_len=2).weights
    assert digest == certify(copy.deepcopy(first), seq_len=3).weights
    assert digest != certify(second, seq_len=2).weights
    assert certify(first, seq_len=2).to_dict()["weights"] == digest
    assert Certificate(1.0, (), "exact", 2, 1, 1, "", "", "").weights == ""


def test_a_cross_check_that_could_not_run_stands_in_the_table():
    linear = nn.Linear(4, 4)
    assert "not tested" not in certify(linear, seq_len=2).table()
    assert "not tested: cross_check=False" in certify(linear, seq_len=2, cross_check=False).table()
