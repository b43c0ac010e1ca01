"""Layers of a second kind get no heads by name; notes reach the verbs, and the log once as a warning; the summary
of the default set is true."""

import copy
import gc
import logging
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
import transformers as hf
from tests.roles.test_gates import made
from tests.roles.test_layouts import T
from torch import nn
from torch.nn import functional as F

import wellposed as wp
from wellposed.constrain import MuonAndAdamW
from wellposed.errors import WellposedError
from wellposed.roles import find_roles


class CountedElsewhere(nn.Module):
    """Four weights called as in attention, whose heads have a count that no family knows."""

    def __init__(self, kind):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(16, 16))
        if kind == "counted":
            self.num_v_heads = 8
        elif kind == "convolves":
            self.conv = nn.Conv1d(16, 16, 4)


class DeltaMixer(CountedElsewhere):
    """A name that says the kind."""


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("counted", "its heads are counted by num_v_heads"),
        ("convolves", "it convolves over tokens"),
        ("named", "its name says another kind of attention"),
    ],
)
def test_names_alone_do_not_tell_the_heads_of_another_kind(kind, why):
    model = nn.Module()
    model.config = type("Config", (), {"num_attention_heads": 4})()
    model.mixer = DeltaMixer(kind) if kind == "named" else CountedElsewhere(kind)
    model.mlp = nn.ModuleDict({"fc1": nn.Linear(16, 32), "fc2": nn.Linear(32, 16)})
    roles = find_roles(model)
    assert not roles.attention
    assert len(roles.feedforward) == 1
    assert why in "\n".join(roles.notes)


class Convolving(nn.Module):
    """Attention, and a network with a depthwise convolution inside, as in PVT v2."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.first = nn.Linear(16, 32)
        self.last = nn.Linear(32, 16)
        self.between = nn.Conv1d(32, 32, 3, padding=1, groups=32)

    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        return x + self.last(F.gelu(self.between(self.first(x).mT).mT))


NOTE = "networks with a convolution inside, not read as feed-forward: first.weight, last.weight"


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), 0.1)


VERBS = {
    "find_roles": lambda model, x: find_roles(model, x),
    "measure": lambda model, x: wp.measure(model, x),
    "penalty": lambda model, x: wp.OrthogonalityPenalty(model, query=1.0, batch=x, form="gram"),
    "constrain": lambda model, x: wp.constrain_(
        model, optimizer_of(model), where=("query", "key"), batch=x
    ),
    "spectral": lambda model, x: wp.constrain_(model, optimizer_of(model), to="spectral", batch=x),
    "logits": lambda model, x: wp.constrain_(model, optimizer_of(model), to="logits", batch=x),
    "Monitor": lambda model, x: wp.Monitor(model, batch=x),
    "t_fixup": lambda model, x: wp.t_fixup_(model, batch=x),
    "muon": lambda model, x: MuonAndAdamW(model, batch=x),
    "remove_norms": lambda model, x: wp.remove_norms_(model, batch=x),
}


MAY_REFUSE = {"t_fixup"}
"""Verbs that may refuse the model after the note: a convolution is no matrix."""


@pytest.mark.parametrize("verb", VERBS)
def test_a_note_reaches_every_verb_that_uses_the_roles(verb, caplog):
    caplog.set_level(logging.WARNING)
    with suppress(WellposedError) if verb in MAY_REFUSE else nullcontext():
        VERBS[verb](Convolving().eval(), torch.randn(2, T, 16))
    assert NOTE in caplog.text


def levels_of(model, x, caplog):
    """Return the levels of the records about the roles, for two verbs on one model."""
    caplog.clear()
    for verb in ("find_roles", "measure"):
        VERBS[verb](model, x)
    records = [record for record in caplog.records if record.name == "wellposed.roles"]
    return [record.levelname for record in records if NOTE in record.getMessage()]


def test_a_note_on_a_model_is_a_warning_once_and_later_information(caplog):
    caplog.set_level(logging.INFO)
    model = Convolving().eval()
    x = torch.randn(2, T, 16)
    assert levels_of(model, x, caplog) == ["WARNING", "INFO"]
    assert levels_of(model, x, caplog) == ["INFO", "INFO"]
    assert levels_of(copy.deepcopy(model), x, caplog) == ["WARNING", "INFO"]
    assert NOTE in find_roles(model, x).notes


def test_another_note_on_the_same_model_is_a_warning(caplog):
    model = Convolving().eval()
    x = torch.randn(2, T, 16)
    find_roles(model)  # by name: no batch
    caplog.clear()
    find_roles(model, x)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert NOTE in caplog.text


def test_notes_on_a_model_do_not_keep_it_alive():
    model = Convolving().eval()
    find_roles(model, torch.randn(2, T, 16))
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_logits_are_constrained_after_one_look_at_the_roles(caplog):
    """Two looks would be two passes, and each note would be logged twice."""
    caplog.set_level(logging.INFO)
    VERBS["logits"](Convolving().eval(), torch.randn(2, T, 16))
    records = [record for record in caplog.records if NOTE in record.getMessage()]
    assert [record.levelname for record in records] == ["WARNING"]


def test_pvt_v2_says_that_its_networks_convolve():
    torch.manual_seed(0)
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2]}
    more = {"num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2]}
    config = hf.PvtV2Config(image_size=16, **sizes, **more, mlp_ratios=[2, 2])
    roles = find_roles(hf.PvtV2Model(config).eval(), {"pixel_values": torch.randn(1, 3, 16, 16)})
    (note,) = roles.notes
    assert note.count("dense1.weight") == note.count("dense2.weight") == 2
    assert any("dense1.weight" in line for line in roles.unnamed)


@pytest.mark.parametrize(
    ("name", "free"),
    [("gate_a_unit", "wg.weight"), ("gate_in_the_fused_weight", "fused.weight[48:64]")],
)
def test_the_summary_of_the_default_set_names_each_free_matrix_of_the_layers(name, free, caplog):
    caplog.set_level(logging.INFO)
    model, x, truth = made(name)
    used = {"wo", "wg", "up", "down", *(weight for weight, _ in truth.values())}
    for path, module in [*model.named_children()]:
        if isinstance(module, nn.Linear) and path not in used:
            delattr(model, path)
    wp.constrain_(model, optimizer_of(model), to="spectral", batch=x)
    assert "every matrix of the layers" not in caplog.text
    assert "unconstrained inside the layers: " in caplog.text
    assert free in caplog.text
    assert "wo.weight" not in caplog.text.partition("inside the layers: ")[2]
