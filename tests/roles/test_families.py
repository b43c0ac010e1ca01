"""Every family: the right parameter, rows and orientation; what the layer computes; gradients in
the right slice."""

import pytest
from tests.support.zoo import HEADS, ZOO, D
from torch import nn

from wellposed.roles import find_roles


def layer_one(roles, entry):
    weights = (w for w in roles.weights() if (w.layer, w.stack) == (1, entry.stack))
    inside = [weight for weight in weights if weight.kind != "cross"]
    return {weight.role: weight for weight in inside}


def agrees(view, entry_weight):
    assert (view.parameter_name, view.shape, view.rows, view.transposed) == (
        entry_weight.parameter, entry_weight.shape, entry_weight.rows, entry_weight.transposed,
    )  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_each_role_is_the_weight_a_reader_of_the_code_would_name(name):
    entry = ZOO[name]
    model = entry.build()
    roles = find_roles(model)
    assert (len(roles.attention), len(roles.feedforward), len(roles.embeddings)) == entry.counts
    weights = layer_one(roles, entry)
    assert set(weights) == set(entry.weights)
    for role, entry_weight in entry.weights.items():
        agrees(weights[role].view, entry_weight)
        assert weights[role].view.tensor().shape == entry_weight.shape
    for part in roles.attention:
        sizes = part.num_heads, part.num_key_value_heads, part.head_dim
        assert sizes == (HEADS, entry.key_value_heads, D // HEADS)
        assert isinstance(model.get_submodule(part.path), nn.Module)
    crossing = [part for part in roles.attention if part.kind == "cross"]
    assert bool(crossing) == (len(roles.attention) > len(roles.feedforward))
    if entry.cross:
        (part,) = [part for part in crossing if part.layer == 1]
        assert part.stack == "decoder"
        for role, entry_weight in entry.cross.items():
            agrees(getattr(part, role), entry_weight)


def test_causal_models_of_ours_are_decoders():
    from wellposed.models import build_model

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2}
    model = build_model("wellposed", "causal_lm", **sizes)
    roles = find_roles(model)
    assert {part.stack for part in (*roles.attention, *roles.feedforward)} == {"decoder"}
    assert [table.kind for table in roles.embeddings] == ["token", "position"]
