"""Families that mix softmax attention with layers of another kind: by names alone and by a pass, each part has
its roles, or a note names it. Nothing that names cannot read hides the rest of the model."""

import re

import pytest
import torch
from tests.support.hybrids import HYBRIDS
from transformers import CONFIG_MAPPING

from wellposed.errors import ConfigError, RoleNotFoundError
from wellposed.roles import find_roles

pytestmark = pytest.mark.slow  # the whole table

ATTENTION = "layers.1.self_attn"
GATED = "layers.1.self_attn: the output weight reads 32 numbers, which 8 heads of 16 / 2 values"
OTHER = "says another kind of attention"

PLAIN = (
    "bamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "minimax",
    "olmo_hybrid",
    "inkling2_text",
)
BY_NAME = {
    **{name: [ATTENTION] for name in PLAIN},
    "falcon_h1": ["layers.0.self_attn", "layers.1.self_attn"],
    "nemotron_h": ["layers.1.mixer"],
    "recurrent_gemma": ["layers.1.temporal_block"],
    "hrm_text": ["L_module.layers.0.self_attn", "H_module.layers.0.self_attn"],
    "zamba": ["layers.1.shared_transf.self_attn", "layers.3.shared_transf.self_attn"],
    "zamba2": ["layers.1.shared_transformer.self_attn"],
}  # fmt: skip
"""Attention that names alone show; elsewhere none, as its query is factored, gated or convolved."""

ONLY_BY_PASS = {
    name: [ATTENTION]
    for name in (
        *("bailing_hybrid", "glm5_next_text", "kimi_linear"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text"),
    )
}

NOTES_BY_NAME = {
    **dict.fromkeys(("bailing_hybrid", "glm5_next_text", "kimi_linear"), f"layers.0.self_attn.*{OTHER}"),
    "olmo_hybrid": f"layers.0.linear_attn.*{OTHER}",
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text"), GATED),
    "inkling_text": "layers.0.self_attn.*it convolves over tokens.*layers.1.self_attn.*it convolves",
    "inkling2_text": "layers.0.self_attn.*it convolves over tokens",
}  # fmt: skip

WITHOUT = {"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"}
"""Families without attention or a feed-forward network that anything shows."""


def ids():
    return {"input_ids": torch.arange(3, 11)[None]}


def roles_of(name, *, run):
    """Return the roles, or None for a family without any, which is refused by its class."""
    model = HYBRIDS[name]()
    if name not in WITHOUT:
        return model, find_roles(model, ids() if run else None, run=run)
    fails = name == "xlstm" and run  # a model of transformers that fails at this width
    with pytest.raises(ConfigError if fails else RoleNotFoundError, match=type(model).__name__):
        find_roles(model, ids() if run else None, run=run)
    return model, None


@pytest.mark.parametrize("run", [False, True], ids=["names", "pass"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_each_part_of_a_hybrid_has_its_roles_or_a_note(name, run):
    model, roles = roles_of(name, run=run)
    if roles is None:
        return
    expected = BY_NAME.get(name, []) + (ONLY_BY_PASS.get(name, []) if run else [])
    assert [part.path for part in roles.attention] == expected
    assert roles.feedforward or not run
    notes = "\n".join(roles.notes)
    if not run:
        assert re.search(NOTES_BY_NAME.get(name, ""), notes, re.DOTALL)
    covered = {source for weight in roles.weights() for source in weight.view.sources}
    unnamed = "\n".join(roles.unnamed)
    for parameter, value in model.named_parameters():
        assert value.ndim < 2 or parameter in covered or parameter in unnamed


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "inkling2_text"])
def test_heads_by_name_are_those_of_the_pass(name):
    model = HYBRIDS[name]()
    by_name = find_roles(model, run=False)
    by_pass = find_roles(model, ids())
    for one, other in zip(by_name.attention, by_pass.attention, strict=True):
        assert (one.num_heads, one.num_key_value_heads) == (
            other.num_heads,
            other.num_key_value_heads,
        )
        for part in ("query", "key", "value"):
            assert getattr(one, part).key == getattr(other, part).key
            assert one.heads[part] == other.heads[part]


KIND_BY_FIELD = re.compile(
    r"mamba|ssm_|^linear_(num|key|head)|conv_L|lru_width|^state_size|block_types"
)
KIND_BY_LAYER = re.compile(r"linear|conv|recurrent|mamba")
NOT_TEXT = {"lfm3_vl_vision"}


def is_hybrid(config):
    fields = {name for base in config.__mro__ for name in getattr(base, "__annotations__", {})}
    if any(map(KIND_BY_FIELD.search, fields)):
        return True
    try:
        layers = getattr(config(), "layer_types", None) or []
    except Exception:  # a configuration made of others has no defaults
        return False
    return any(map(KIND_BY_LAYER.search, layers))


@pytest.mark.slow
def test_the_table_has_every_family_of_transformers_whose_configuration_names_such_layers():
    hybrids = {kind for kind in CONFIG_MAPPING if is_hybrid(CONFIG_MAPPING[kind])}
    assert len(hybrids) > 20
    assert hybrids <= HYBRIDS.keys() | NOT_TEXT


def test_patterns_name_a_part_that_names_do_not_tell():
    """Parts that names cannot read do not hide what where= says."""
    model = HYBRIDS["qwen3_next"]()
    where = {"key": "*.self_attn.k_proj.weight"}
    roles = find_roles(model, run=False, where=where)
    assert any(weight.role == "key" for weight in roles.weights())


def test_a_model_in_which_names_tell_nothing_is_refused_with_the_reason():
    model = HYBRIDS["qwen3_next"]().layers[1].self_attn
    with pytest.raises(ValueError, match="the output weight reads 32 numbers"):
        find_roles(model, run=False)
