"""What find_roles does off the beaten path: torch's fused attention, patterns, wrappers, sharing,
errors."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from wellposed.errors import ConfigError, RoleNotFoundError, ShapeError
from wellposed.roles import find_roles, joined_views

D = 8
HEADS = 2


class Odd(nn.Module):
    """A Transformer with names of its own."""

    def __init__(self, n_heads=HEADS):
        super().__init__()
        self.tokens = nn.Embedding(11, D)
        self.layers = nn.ModuleList([OddLayer(n_heads) for _ in range(2)])


class OddLayer(nn.Module):
    def __init__(self, n_heads):
        super().__init__()
        self.mix = nn.ModuleDict({name: nn.Linear(D, D) for name in ("aq", "ak", "av", "ao")})
        if n_heads:
            self.mix.n_heads = n_heads
        self.mlp = nn.ModuleDict({"m1": nn.Linear(D, 12), "m2": nn.Linear(12, D)})


PATTERNS = {
    "query": "*.aq.weight", "key": "*.ak.weight", "value": "*.av.weight", "output": "*.ao.weight",
    "feedforward_in": ["*.mlp.m1.weight"], "feedforward_out": ["*.mlp.m2.weight"],
}  # fmt: skip


@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 6}], ids=["fused", "separate"])
def test_views_of_multihead_attention_rebuild_its_output(widths):
    module = nn.MultiheadAttention(D, HEADS, batch_first=True, bias=False, **widths).double()
    (role,) = find_roles(module).attention
    x = torch.randn(2, 3, D).double()
    y = torch.randn(2, 4, widths.get("kdim", D)).double()
    z = torch.randn(2, 4, widths.get("vdim", D)).double()

    def split(tensor):
        return tensor.unflatten(-1, (HEADS, role.head_dim)).transpose(1, 2)

    pairs = ((x, role.query), (y, role.key), (z, role.value))
    query, key, value = (split(part @ view.tensor().T) for part, view in pairs)
    mixed = (query @ key.mT / role.head_dim**0.5).softmax(-1) @ value
    expected = mixed.transpose(1, 2).flatten(2) @ role.output.tensor().T
    torch.testing.assert_close(module(x, y, z)[0], expected, rtol=1e-12, atol=1e-12)


def test_patterns_find_a_model_of_no_family():
    model = Odd()
    roles = find_roles(model, where=PATTERNS)
    assert [(part.path, part.layer, part.num_heads) for part in roles.attention] == [
        ("layers.0.mix", 0, HEADS), ("layers.1.mix", 1, HEADS),
    ]  # fmt: skip
    assert roles.attention[1].key.parameter is model.layers[1].mix["ak"].weight
    downs = [part.down.parameter_name for part in roles.feedforward]
    assert downs == [f"layers.{layer}.mlp.m2.weight" for layer in range(2)]
    assert [table.path for table in roles.embeddings] == ["tokens"]
    assert not roles.loose


def test_patterns_for_some_roles_or_without_heads_leave_loose_weights():
    roles = find_roles(Odd(), where={"key": "layers.0.mix.ak.weight"})
    assert [(weight.role, weight.layer) for weight in roles.loose] == [("key", 0)]
    assert [weight.role for weight in roles.weights()] == ["token_embedding", "key"]
    model = Odd()
    model.layers[0].mix["al"] = nn.Linear(D, D)
    matched = find_roles(model, where={**PATTERNS, "latent": "*.al.weight"})
    assert [part.layer for part in matched.attention] == [0, 1]
    assert [weight.role for weight in matched.loose] == ["latent"]
    unknown = find_roles(Odd(n_heads=None), where=PATTERNS)
    assert (unknown.attention, len(unknown.loose)) == ((), 8)


def test_a_pattern_replaces_one_role_of_a_family():
    model = nn.Sequential(nn.TransformerEncoderLayer(D, HEADS, 12), nn.Linear(D, 12))
    roles = find_roles(model, where={"feedforward_in": "1.weight"})
    names = {weight.role: weight.view.parameter_name for weight in roles.weights()}
    assert names["feedforward_in"] == "1.weight"
    assert names["feedforward_out"] == "0.linear2.weight"
    assert len(roles.attention) == 1


def test_no_match_lists_what_was_seen_and_how_to_go_on():
    with pytest.raises(RoleNotFoundError, match="where=") as caught:
        find_roles(nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, 4, 3)))
    assert "*.weight (4, 3)" in str(caught.value)


@pytest.mark.parametrize(
    ("patterns", "error", "words"),
    [
        (
            PATTERNS | {"query": "*.mix.aqq.weight", "key": ["*.ak.weight", "nothing"]},
            RoleNotFoundError,
            ["'*.mix.aqq.weight'", "'nothing'", "layers.0.mix.aq.weight"],
        ),
        ({"query": "*.aq.*"}, ConfigError, ["layers.0.mix.aq.bias"]),
        ({"feed_forward_in": "*.m1.weight"}, ConfigError, ["nearest: feedforward_in"]),
        ("abc", ConfigError, ["where: received 'abc'"]),
        ({"query": 3}, ConfigError, ["where['query']: received 3"]),
    ],
    ids=["match nothing", "match a bias", "unknown role", "no mapping", "no pattern"],
)
def test_patterns_that_cannot_be_used_are_all_named(patterns, error, words):
    with pytest.raises(error) as caught:
        find_roles(Odd(), where=patterns)
    assert all(word in str(caught.value) for word in words)


def test_heads_that_do_not_divide_are_an_error_and_without_heads_weights_are_whole():
    with pytest.raises(ShapeError, match="3 heads"):
        find_roles(_family_like(num_heads=3))
    roles = find_roles(nn.Sequential(_family_like(num_heads=0)))
    assert [weight.role for weight in roles.loose] == ["query", "key", "value", "output"]
    assert not any(weight.heads for weight in roles.loose)
    assert any("no heads: 0 (Module)" in note for note in roles.notes)


def _family_like(num_heads):
    module = nn.Module()
    module.num_heads = num_heads
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(module, name, nn.Linear(D, D))
    return module


def test_quantised_layers_are_refused():
    module = _family_like(HEADS)
    module.q_proj.weight = nn.Parameter(torch.zeros(D, D, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"q_proj.*quantised"):
        find_roles(module)


def test_views_follow_a_parametrized_weight():
    module = _family_like(HEADS)
    parametrizations.weight_norm(module.v_proj)
    parametrizations.orthogonal(module.q_proj)
    role = find_roles(module).attention[0]
    assert role.query.parameter_name == "q_proj.parametrizations.weight.original"
    role.query.tensor().sum().backward()
    assert module.q_proj.parametrizations.weight.original.grad is not None


def test_views_follow_a_replaced_parameter_and_a_dtype():
    module = _family_like(HEADS)
    role = find_roles(module).attention[0]
    module.q_proj.weight = nn.Parameter(torch.ones(D, D))
    module.double()
    assert role.query.parameter is module.q_proj.weight
    assert role.query.tensor().dtype == torch.float64


def test_the_table_shows_every_weight():
    text = str(find_roles(nn.TransformerEncoderLayer(D, HEADS, 12)))
    assert len(text.splitlines()) == 8
    assert "self_attn.in_proj_weight" in text
    assert "found by name; nothing was run: no batch was given" in text


def test_tied_l2_attention_has_one_weight_for_query_and_key():
    from wellposed.nn import L2SelfAttention

    (role,) = find_roles(L2SelfAttention(D, HEADS)).attention
    assert role.key == role.query
    assert role.value.parameter_name == "v_proj.weight"
    (untied,) = find_roles(L2SelfAttention(D, HEADS, tied=False)).attention
    assert untied.key.parameter_name == "k_proj.weight"


def test_neighbouring_rows_of_a_fused_weight_join_into_one_view():
    (role,) = find_roles(nn.MultiheadAttention(D, HEADS)).attention
    fused, output = joined_views((role.query, role.key, role.value, role.output))
    assert (fused.rows, fused.shape) == (None, (3 * D, D))
    assert fused.tensor() is role.query.parameter
    assert output is role.output
    assert [view.rows for view in joined_views((role.key, role.value))] == [(D, 3 * D)]
    apart = joined_views((role.query, role.value))
    assert [view.rows for view in apart] == [(0, D), (2 * D, 3 * D)]


def test_heads_that_are_left_are_counted_by_their_width():
    """BERT and Llama with one head of four cut away: their configurations still say four."""
    from tests.support.zoo import ZOO

    for name in ("bert", "llama"):
        model = ZOO[name].build()
        (full, _) = find_roles(model).attention
        pruned = (full.query,) if name == "llama" else (full.query, full.key, full.value)
        for view in pruned:
            rest = view.parameter[: 3 * full.head_dim]
            view.owner.weight = nn.Parameter(rest.detach().clone())
        rest = full.output.parameter[:, : 3 * full.head_dim]
        full.output.owner.weight = nn.Parameter(rest.detach().clone())
        role = find_roles(model).attention[0]
        assert (role.num_heads, role.head_dim) == (3, full.head_dim)
        assert role.num_key_value_heads == (3 if name == "bert" else 2)


@pytest.mark.parametrize("model", ["bert", None, 3, nn.Linear, {}])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ConfigError, match=r"expected a model \(torch\.nn\.Module\), received"):
        find_roles(model)
    with pytest.raises(ConfigError, match="'wher'; nearest: where"):
        find_roles(Odd(), wher=model)
