"""A part that a rule reads by itself has the exact class and form that the rule is proved for; else
it is named."""

import copy
import functools
import math

import pytest
import torch
from tests.support.sample import awake
from torch import nn
from transformers.integrations import sdpa_attention
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from tests.support import hugging_face as hf
from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import LayerBound, certify, register_rule
from wellposed.nn import DotProductAttention
from wellposed.nn.attention import HeadProjections


def _with_norms(**options):
    torch.manual_seed(0)
    module = DotProductAttention(8, 2, qk_norm=True, **options).double().eval()
    module.requires_grad_(False)
    return module


def _attacked(module, norm="tok", width=8):
    """Largest attack / certificate on the unit ball; 0 where it is refused."""
    certificate = certify(module, seq_len=6, norm=norm, radius=1.0, cross_check=False)
    if math.isinf(certificate.total):
        assert all(layer.reason for layer in certificate.uncertified)
        return 0.0
    found = lipschitz_lower_bound(
        module, (6, width), norm=norm, radius=1.0, restarts=8, steps=60, seed=1
    )
    return found.ratio(certificate)


@pytest.mark.parametrize("norm", ["tok", 2])
def test_the_bias_of_a_norm_of_queries_and_keys_counts(norm):
    module = _with_norms(eps=1e-2)
    plain = certify(module, seq_len=6, radius=1.0, norm=norm, cross_check=False).total
    for name in ("q_norm", "k_norm"):
        biased = nn.LayerNorm(4, eps=1e-2).double()
        biased.bias.data.copy_(30 * torch.randn(4))
        biased.weight.data.copy_(0.1 * torch.ones(4))
        setattr(module, name, biased)
    module.requires_grad_(False)
    assert 0.05 < _attacked(module, norm) <= 1
    assert certify(module, seq_len=6, radius=1.0, norm=norm, cross_check=False).total != plain


def test_a_wrapper_that_lends_its_name_is_seen():
    """`functools.wraps` copies the names of what it wraps on whatever runs in its place."""
    original = nn.Linear.forward

    @functools.wraps(original)
    def louder(self, x):
        return 1.76 * original(self, x)

    nn.Linear.forward = louder
    try:
        certificate = certify(nn.Sequential(nn.Linear(4, 4)), seq_len=2, cross_check=False)
    finally:
        nn.Linear.forward = original
    assert "class's forward" in certificate.uncertified[0].reason


def test_wrappers_of_torch_are_looked_through():
    class Guarded(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    @register_rule(Guarded)
    def rule(module: Guarded, site) -> LayerBound:
        return LayerBound(site.operator_norm(module.weight), "as Linear")

    assert math.isfinite(certify(Guarded(4, 4), seq_len=2).total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_in_float64_keeps_the_eps_of_a_norm_that_has_none(dtype):
    norm = nn.RMSNorm(4).to(dtype)
    certificate = certify(norm, seq_len=2)
    assert certificate.total == pytest.approx(torch.finfo(torch.float32).eps ** -0.5)
    start = torch.full((1, 2, 4), 1e-9, dtype=torch.float64)
    found = lipschitz_lower_bound(norm, (2, 4), start=start, restarts=1, steps=5)
    assert found.ratio(certificate) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_a_compiled_part_is_what_it_was(name):
    module = DotProductAttention(8, 2).eval()
    plain = certify(module, seq_len=4, radius=1.0)
    setattr(module, name, torch.compile(getattr(module, name), backend="eager"))
    module.v_proj.compile(backend="eager")
    assert certify(module, seq_len=4, radius=1.0).total == plain.total
    module.v_proj._compiled_call_impl = len
    assert "_compiled_call_impl" in certify(module, seq_len=4, radius=1.0).uncertified[0].reason


# What transformers reads from shapes, from modules of its own, and from its callers.


def test_queries_without_their_keys_are_refused():
    layer = awake(modeling_llama.LlamaModel(hf.llama_config(16, num_attention_heads=4))).layers[0]
    attention = layer.self_attn
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight[:12].detach())
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, :12].detach())
    (row,) = certify(layer, seq_len=4).uncertified
    assert row.path == "self_attn"
    assert "not the same number of heads of 4" in row.reason


def test_a_pruned_gpt2_is_read_as_it_is_cut():
    from transformers.pytorch_utils import Conv1D

    block = awake(modeling_gpt2.GPT2Model(hf.gpt2_config(12, num_attention_heads=4))).h[0]
    whole = copy.deepcopy(block)
    heads = block.attn
    fused, output = Conv1D(18, 12), Conv1D(12, 6)
    with torch.no_grad():
        parts = heads.c_attn.weight.split(12, dim=1)
        fused.weight.copy_(torch.cat([part[:, :6] for part in parts], dim=1))
        fused.bias.copy_(torch.cat([part[:6] for part in heads.c_attn.bias.split(12)]))
        output.weight.copy_(heads.c_proj.weight[:6])
    heads.c_attn, heads.c_proj, heads.split_size, heads.num_heads = fused, output, 6, 2
    assert certify(block, seq_len=4).total < certify(whole, seq_len=4).total
    heads.split_size = 12
    (row,) = certify(block, seq_len=4).uncertified
    assert "split_size" in row.reason


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.Module, "_call_impl"),
        (nn.Module, "_wrapped_call_impl"),
        (nn.Linear, "_call_impl"),
        (HeadProjections, "_tokens"),
        (modeling_bert.BertLayer, "feed_forward_chunk"),
    ],
)
def test_a_method_behind_forward_that_was_replaced(owner, name, monkeypatch):
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def twice(self, *args, **kwargs):
        return 2 * inner(self, *args, **kwargs)

    if owner is HeadProjections:
        module = DotProductAttention(8, 2)
    elif owner is modeling_bert.BertLayer:
        module = modeling_bert.BertModel(hf.bert_config(8)).eval().encoder.layer[0]
    else:
        module = nn.Linear(8, 8)
    assert certify(module, seq_len=3, radius=1.0).total < math.inf
    monkeypatch.setattr(owner, name, twice, raising=False)
    certificate = certify(module, seq_len=3, radius=1.0, cross_check=False)
    assert f"class's {name}" in certificate.uncertified[0].reason


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama, "repeat_kv"),
        (sdpa_attention, "repeat_kv"),
        (modeling_bert, "apply_chunking_to_forward"),
    ],
)
def test_a_replaced_function_of_transformers_is_noticed(place, name, monkeypatch):
    original = getattr(place, name)
    if place is modeling_bert:
        layer = awake(modeling_bert.BertModel(hf.bert_config(8))).encoder.layer[0]
    else:
        model = awake(modeling_llama.LlamaModel(hf.llama_config(8)))
        model.set_attn_implementation("sdpa")
        layer = model.layers[0]
    assert math.isfinite(certify(layer, seq_len=4, radius=1.0, cross_check=False).total)
    monkeypatch.setattr(place, name, functools.wraps(original)(lambda *x: original(*x)))
    (row,) = certify(layer, seq_len=4, radius=1.0, cross_check=False).uncertified
    assert f"transformers runs {name}" in row.reason


def test_a_certificate_says_that_it_leaves_out_prefixes():
    model = awake(modeling_gpt2.GPT2Model(hf.gpt2_config(8)))
    assert "without past_key_values" in certify(model, seq_len=4).table()
    assert "past_key_values" not in certify(nn.Linear(4, 4), seq_len=4).table()
