"""Every family: the right parameter, rows and orientation; what the layer computes; gradients in
the right slice."""

import pytest
import torch
from tests.support.zoo import HEADS, ZOO, D
from torch import nn

from wellposed.roles import find_roles


def layer_one(roles, entry):
    found = (w for w in roles.weights() if (w.layer, w.stack) == (1, entry.stack))
    inside = [weight for weight in found if weight.kind != "cross"]
    return {weight.role: weight for weight in inside}


def agrees(view, known):
    assert (view.parameter_name, view.shape, view.rows, view.transposed) == (
        known.parameter, known.shape, known.rows, known.transposed,
    )  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_each_role_is_the_weight_a_reader_of_the_code_would_name(name):
    entry = ZOO[name]
    model = entry.build()
    roles = find_roles(model)
    assert (len(roles.attention), len(roles.feedforward), len(roles.embeddings)) == entry.counts
    found = layer_one(roles, entry)
    assert set(found) == set(entry.known)
    for role, known in entry.known.items():
        agrees(found[role].view, known)
        assert found[role].view.tensor().shape == known.shape
    for part in roles.attention:
        sizes = part.num_heads, part.num_key_value_heads, part.head_dim
        assert sizes == (HEADS, entry.key_value_heads, D // HEADS)
        assert isinstance(model.get_submodule(part.path), nn.Module)
    crossing = [part for part in roles.attention if part.kind == "cross"]
    assert bool(crossing) == (len(roles.attention) > len(roles.feedforward))
    if entry.cross:
        (part,) = [part for part in crossing if part.layer == 1]
        assert part.stack == "decoder"
        for role, known in entry.cross.items():
            agrees(getattr(part, role), known)


@pytest.mark.parametrize("name", ZOO)
def test_a_view_times_the_input_is_what_the_layer_computes(name):
    model = ZOO[name].build().double().eval()
    calls = {}

    def keep(module, args, output):
        if args:
            calls.setdefault(module, (args[0], output))

    for module in model.modules():
        module.register_forward_hook(keep)
    ZOO[name].run(model)
    checked = 0
    for weight in find_roles(model).weights():
        view = weight.view
        is_table = weight.role.endswith("embedding")
        if is_table or view.attribute != "weight" or view.owner not in calls:
            continue  # in_proj_weight has no layer of its own; test_torch.py checks it
        given, computed = calls[view.owner]
        rows = slice(*view.rows) if view.rows else slice(None)
        bias = 0 if view.owner.bias is None else view.owner.bias[rows]
        made = given @ view.tensor().T + bias
        torch.testing.assert_close(made, computed[..., rows], rtol=1e-12, atol=1e-12)
        checked += 1
    assert checked >= (4 if "torch" in name else len(ZOO[name].known))


def test_causal_models_of_ours_are_decoders():
    from wellposed.models import build_model

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2}
    model = build_model("wellposed", "causal_lm", **sizes)
    roles = find_roles(model)
    assert {part.stack for part in (*roles.attention, *roles.feedforward)} == {"decoder"}
    assert [table.kind for table in roles.embeddings] == ["token", "position"]


def test_cross_attention_of_gpt2_has_key_and_value_in_halves():
    from transformers import GPT2Config, GPT2Model

    sizes = {"vocab_size": 9, "n_embd": D, "n_layer": 1, "n_head": HEADS}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    config.add_cross_attention = True
    part = find_roles(GPT2Model(config)).attention[1]
    assert (part.kind, part.query.parameter_name) == ("cross", "h.0.crossattention.q_attn.weight")
    assert (part.key.rows, part.value.rows, part.value.shape) == ((0, D), (D, 2 * D), (D, D))
