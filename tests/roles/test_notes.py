"""Layers of a second kind: found or refused by name in each family; notes reach the verbs; the summary of
the default set is true."""

import logging
from contextlib import nullcontext, suppress

import pytest
import torch
import transformers as hf
from tests.roles.test_gates import made
from tests.roles.test_layouts import T
from tests.support.many_families import model as of_transformers
from tests.support.many_families import rows_of
from torch import nn
from torch.nn import functional as F

import wellposed as wp
from wellposed.constrain import MuonAndAdamW
from wellposed.errors import WellposedError
from wellposed.roles import find_roles

_HYBRIDS = """
olmo-hybrid     OlmoHybrid GROUPED linear_num_key_heads=2 linear_num_value_heads=4 linear_key_head_dim=8
                linear_value_head_dim=8 layer_types=["linear_attention","full_attention"]
jamba           Jamba GROUPED attn_layer_period=2 attn_layer_offset=1 mamba_d_state=4 mamba_dt_rank=4
                num_experts=2 num_experts_per_tok=1
bamba           Bamba GROUPED mamba_n_heads=8 mamba_d_head=8 mamba_d_state=4 attn_layer_indices=[1]
minimax         MiniMax GROUPED head_dim=8 num_local_experts=2 num_experts_per_tok=2 block_size=4
                layer_types=["linear_attention","full_attention"]
lfm2            Lfm2 GROUPED layer_types=["conv","full_attention"]
recurrent-gemma RecurrentGemma GROUPED lru_width=32 block_types=["recurrent","attention"]
                attention_window_size=8 head_dim=8
"""
HYBRIDS = {name: of_transformers(*words) for name, *words in rows_of(_HYBRIDS)}


@pytest.mark.parametrize("run", [True, False])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_second_kind_of_layer_gets_no_heads(name, run):
    roles = find_roles(HYBRIDS[name](), run=run)
    (part,) = roles.attention
    assert part.path.startswith("layers.1.")
    assert (part.num_heads, part.num_key_value_heads, part.head_dim) == (4, 2, 8)
    assert part.heads["key"] == (((0, 8),), ((8, 16),))
    if name == "olmo-hybrid":
        assert "layers.0.linear_attn" in "\n".join(roles.notes)
        assert any("linear_attn.q_proj.weight" in line for line in roles.unnamed)


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
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
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
