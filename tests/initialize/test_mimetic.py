"""Mimetic initialisation: products of attention weights by hand, by head and group, against their target."""

import copy
import math

import pytest
import torch
import transformers as hf
from torch import nn

from wellposed.errors import ConfigError, RoleNotFoundError
from wellposed.initialize import mimetic_
from wellposed.models import WellposedConfig, WellposedForCausalLM

WIDTH = 64
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
SIZES |= {"vocab_size": 20, "pad_token_id": 0, **ENDS}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 20, **ENDS}
NEOX = {**SIZES, "max_position_embeddings": 16}


def gpt2(model, layer):
    attention = model.transformer.h[layer].attn
    return *attention.c_attn.weight.mT.chunk(3), attention.c_proj.weight.mT


def llama(model, layer):
    attention = model.model.layers[layer].self_attn
    return tuple(getattr(attention, f"{name}_proj").weight for name in "qkvo")


def bert(model, layer):
    attention = model.bert.encoder.layer[layer].attention
    parts = (attention.self.query, attention.self.key, attention.self.value, attention.output.dense)
    return tuple(part.weight for part in parts)


def neox(model, layer):
    attention = model.gpt_neox.layers[layer].attention
    by_head = attention.query_key_value.weight.reshape(4, 3, 16, WIDTH)
    parts = (by_head[:, index].reshape(WIDTH, WIDTH) for index in range(3))
    return *parts, attention.dense.weight


# Model, its query, key, value and output by hand, and heads to a key.
FAMILIES = {
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), gpt2, 1),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), llama, 1),
    "grouped": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), llama, 2),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)), bert, 1),
    "mixtral": (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=3)), llama, 2),
    "neox": (lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**NEOX)), neox, 1),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_near_multiples_of_the_identity(family):
    """Without noise, the product of a head of width k is 0.7 times a projection of rank k."""
    build, parts, group = FAMILIES[family]
    torch.manual_seed(0)
    model = build()
    other = {name: weight.clone() for name, weight in model.named_parameters()}
    report = mimetic_(model, query_key=(0.0, 0.7), value_output=(0.0, 0.4))
    assert {row.role for row in report.rows} == {"query", "key", "value", "output"}
    for layer in (0, 1):
        query, key, value, output = (part.detach().double() for part in parts(model, layer))
        keys = key.reshape(-1, 16, WIDTH).repeat_interleave(group, 0)
        for one, two in zip(query.reshape(-1, 16, WIDTH), keys, strict=True):
            values = torch.linalg.svdvals(one.mT @ two)
            torch.testing.assert_close(
                values[:16], torch.full((16,), 0.7).double(), atol=1e-5, rtol=0
            )
            assert values[16] <= 1e-5
        values = value.reshape(-1, 16, WIDTH).repeat_interleave(group, 0).reshape(-1, WIDTH)
        product = output @ values
        rank = WIDTH // group
        expected = torch.cat([torch.full((rank,), -0.4), torch.zeros(WIDTH - rank)]).double()
        actual = torch.linalg.eigvals(product).real.sort().values
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    moved = {
        name for name, weight in model.named_parameters() if not torch.equal(weight, other[name])
    }
    assert len(moved) == 2 * (2 if family in ("gpt2", "neox") else 4)
    assert all("att" in name and "bias" not in name for name in moved)


def test_the_noise_and_the_identity_have_the_sizes_of_the_paper():
    """Full-width heads keep the whole target, whose mean diagonal and spread are known."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(400, 1, 8)
    mimetic_(layer)
    query, key, value = layer.self_attn.in_proj_weight.detach().double().chunk(3)
    output = layer.self_attn.out_proj.weight.detach().double()
    for product, identity, noise in [(query.mT @ key, 0.7, 0.7), (output @ value, -0.4, 0.4)]:
        off = product - torch.diag(product.diagonal())
        assert product.diagonal().mean() == pytest.approx(identity, abs=0.01)
        assert off.std() == pytest.approx(noise / 20, rel=0.02)


def test_a_seed_repeats_it_and_an_error_leaves_the_model():
    model = FAMILIES["gpt2"][0]()
    twin = copy.deepcopy(model)
    for copied in (model, twin):
        torch.manual_seed(3)
        mimetic_(copied)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)


def frozen():
    model = FAMILIES["llama"][0]()
    model.model.layers[1].self_attn.k_proj.requires_grad_(requires_grad=False)
    return model


def tied():
    config = WellposedConfig(
        attention="l2_tied", hidden_size=16, num_attention_heads=2, vocab_size=9
    )
    return WellposedForCausalLM(config)


REFUSED = {
    "frozen": (frozen, ConfigError, r"layers\.1\.self_attn\.k_proj", {}),
    "tied": (tied, (ConfigError, RoleNotFoundError), "layers.0.attention", {}),
    "no attention": (lambda: nn.Linear(4, 4), RoleNotFoundError, "mimetic_", {}),
    **{
        f"query_key = {pair}": (
            lambda: nn.TransformerEncoderLayer(8, 2, 16),
            ConfigError,
            r"query_key = .*, expected two finite numbers \(a, b\)",
            {"query_key": pair},
        )
        for pair in (0.7, (1.0,), (1.0, 2.0, 3.0), (math.nan, 0.1), "ab", (True, 0.1))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_change_nothing(case):
    build, kind, message, options = REFUSED[case]
    model = build()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(kind, match=message):
        mimetic_(model, **options)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_a_model_of_ours_takes_it_as_init():
    sizes = {"hidden_size": 16, "num_attention_heads": 1, "vocab_size": 9, "init": "mimetic"}
    model = WellposedForCausalLM(WellposedConfig(**sizes))
    attention = model.model.layers[0].attention
    product = (attention.q_proj.weight.mT @ attention.k_proj.weight).detach()
    assert product.diagonal().mean() == pytest.approx(0.7, abs=0.2)
