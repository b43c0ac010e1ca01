"""Certificates of models of transformers: what is read and what is refused."""

import copy
import math
import subprocess
import sys

import pytest
import torch
import transformers
from tests.support.certificates import why
from tests.support.sample import ALL_NORMS, awake
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.roberta import modeling_roberta

from tests.support import hugging_face as hf
from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify, inherit_rule
from wellposed.models import embedding_radius, input_vectors
from wellposed.nn import DotProductAttention

WIDTH, TOKENS = 8, 5


@pytest.fixture
def bert():
    return awake(modeling_bert.BertModel(hf.bert_config(WIDTH)))


@pytest.fixture
def gpt2():
    return awake(modeling_gpt2.GPT2Model(hf.gpt2_config(WIDTH)))


@pytest.fixture
def llama():
    return awake(modeling_llama.LlamaModel(hf.llama_config(WIDTH)))


def row(certificate, path):
    return next(layer for layer in certificate.layers if layer.path == path)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_padding_is_covered_in_norm_2(kind, request):
    """Padded queries attend to the one real token, so its column of the attention matrix has every
    row in it."""
    model, count = request.getfixturevalue(kind), 12
    kept = torch.arange(count)[None] == 0
    certificate = certify(model, seq_len=count, norm=2)
    assert certificate.mask == "any"
    how = {"norm": 2, "restarts": 4, "steps": 20, "forward_kwargs": {"attention_mask": kept.long()}}
    assert lipschitz_lower_bound(model, (count, WIDTH), **how).ratio(certificate) <= 1 + 1e-6


@pytest.mark.parametrize("norm", ["tok", 2])
def test_an_attention_is_read_as_ours_with_the_same_weights(bert, gpt2, norm):
    """The rows of BERT and of GPT-2, whose weights are fused and transposed, are those of our own
    module."""
    ours = awake(DotProductAttention(WIDTH, 2))
    parts = [ours.q_proj, ours.k_proj, ours.v_proj]
    heads, output = bert.encoder.layer[0].attention.self, bert.encoder.layer[0].attention.output
    for theirs, mine in zip((heads.query, heads.key, heads.value), parts, strict=True):
        theirs.load_state_dict(mine.state_dict())
    output.dense.load_state_dict(ours.o_proj.state_dict())
    with torch.no_grad():
        fused = gpt2.h[0].attn
        fused.c_attn.weight.copy_(torch.cat([part.weight for part in parts]).mT)
        fused.c_attn.bias.copy_(torch.cat([part.bias for part in parts]))
        fused.c_proj.weight.copy_(ours.o_proj.weight.mT)
        fused.c_proj.bias.copy_(ours.o_proj.bias)
    for model, path in ((bert, "encoder.layer.0.attention.self"), (gpt2, "h.0.attn")):
        found = row(certify(model, seq_len=TOKENS, norm=norm), path)
        expected = certify(ours, seq_len=TOKENS, norm=norm, radius=found.radius)
        assert found.lipschitz == pytest.approx(expected.total, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.T5ForConditionalGeneration, hf.t5_config),
        (transformers.BartForConditionalGeneration, hf.bart_config),
    ],
)
def test_vectors_of_tokens_are_as_long_as_the_model_makes_them(kind, config):
    """BART multiplies the rows of its table by sqrt(d), if it is told to."""
    encoder = awake(kind(config(WIDTH, scale_embedding=True))).get_encoder()
    ids = torch.arange(encoder.config.vocab_size)[:, None]
    vectors = input_vectors(encoder, ids).detach()
    assert torch.equal(encoder(inputs_embeds=vectors)[0], encoder(input_ids=ids)[0])
    assert embedding_radius(encoder) == pytest.approx(float(vectors.norm(dim=-1).max()), rel=1e-6)


def test_shared_keys_and_values_are_repeated_heads():
    heads = ({}, {"num_key_value_heads": 2})
    configs = (hf.llama_config(WIDTH, attention_bias=True, **options) for options in heads)
    shared, apart = (awake(modeling_llama.LlamaModel(config)) for config in configs)
    state = shared.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = torch.cat([state[name]] * 2)
    apart.load_state_dict(state)
    x = torch.randn(1, TOKENS, WIDTH)
    assert torch.allclose(shared(inputs_embeds=x)[0], apart(inputs_embeds=x)[0], atol=1e-5)
    for norm in ALL_NORMS:
        totals = [certify(model, seq_len=TOKENS, norm=norm).total for model in (shared, apart)]
        assert totals[0] == pytest.approx(totals[1], rel=1e-9)


def test_at_constant_tokens_the_bound_of_a_post_norm_model_is_all_but_attained():
    """Every norm divides by sqrt(eps) at once where tokens are constant and biases are zero, as
    they are at first."""
    model = modeling_roberta.RobertaModel(hf.roberta_config(16, layer_norm_eps=1e-5)).eval()
    table = model.embeddings
    positions, kinds = table.position_embeddings.weight, table.token_type_embeddings.weight
    start = -(positions[1 : TOKENS + 1].detach().double() + kinds[:1].detach().double())[None]
    found = lipschitz_lower_bound(model, (TOKENS, 16), restarts=1, steps=1, start=start, inner=8)
    assert 0.85 < found.ratio(certify(model, seq_len=TOKENS)) <= 1


def test_both_ways_of_running_attention_have_the_same_bound(bert):
    bounds = set()
    for implementation in ("eager", "sdpa"):
        bert.set_attn_implementation(implementation)
        bounds.add(certify(bert, seq_len=TOKENS).total)
    assert len(bounds) == 1
    plain = certify(bert, seq_len=TOKENS, norm=2).total
    bert.config.is_decoder = True  # eager attention is causal by it
    assert certify(bert, seq_len=TOKENS, norm=2, mask="full").total == plain


def test_attention_of_another_make_is_refused(bert, monkeypatch):
    bert.config._attn_implementation = "flex_attention"
    assert "attn_implementation='flex_attention'" in why(bert)
    bert.config._attn_implementation = "eager"
    with monkeypatch.context() as patch:
        patch.setattr(modeling_bert, "eager_attention_forward", lambda *args, **how: None)
        assert "stands where transformers runs eager" in why(bert)
    bert.config._attn_implementation = "sdpa"
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **how: None)
        assert "stands where transformers runs sdpa" in why(bert)
    assert math.isfinite(certify(bert, seq_len=TOKENS).total)


def test_hidden_states_may_have_been_asked_for(bert):
    """transformers then leaves hooks behind that only look."""
    total = certify(bert, seq_len=TOKENS).total
    bert(inputs_embeds=torch.randn(1, TOKENS, WIDTH), output_hidden_states=True)
    assert any(part._forward_hooks for part in bert.modules())
    assert certify(bert, seq_len=TOKENS).total == total


def test_a_namesake_is_another_class(bert):

    Namesake = type("Namesake", (modeling_bert.BertModel,), {})
    Namesake.__module__, Namesake.__qualname__ = modeling_bert.__name__, "BertModel"
    other = copy.deepcopy(bert)
    other.__class__ = Namesake
    assert math.isinf(certify(other, seq_len=TOKENS).total)
    Namesake.__qualname__ = "Namesake"
    assert certify(inherit_rule(Namesake)(bert.config).eval(), seq_len=TOKENS).label == "certified"


def test_a_part_behind_a_refused_one_is_told_that_no_ball_reaches_it(bert):
    bert.encoder.layer[0].attention.self = modeling_roberta.RobertaSelfAttention(bert.config).eval()
    certificate = certify(bert, seq_len=TOKENS)
    reason = "no ball reaches it, as encoder.layer.0 has no bound"
    assert reason in certificate.uncertified[1].reason
    assert "radius=" not in certificate.table()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("bias", [True, False])
def test_an_encoder_of_torch_with_padding(bias):
    """The fused kernel of eval mode included, which cuts padded tokens out."""
    how = {"batch_first": True, "bias": bias, "layer_norm_eps": 0.1}
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, **how)
    encoder = awake(nn.TransformerEncoder(layer, 2, enable_nested_tensor=bias))
    padded = torch.arange(TOKENS)[None] >= 2
    how = {"restarts": 4, "steps": 15, "forward_kwargs": {"src_key_padding_mask": padded}}
    for norm in ALL_NORMS:
        certificate = certify(encoder, seq_len=TOKENS, norm=norm, radius=2.0)
        found = lipschitz_lower_bound(encoder, (TOKENS, WIDTH), norm=norm, radius=2.0, **how)
        assert 0 < found.ratio(certificate) <= 1 + 1e-9


def test_the_fused_kernel_goes_by_a_flag():
    """It runs a GELU where the layer was built with one, whatever stands in ``activation`` by
    now."""
    layer = awake(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, activation="gelu"))
    before = certify(layer, seq_len=TOKENS, radius=1.0).total
    layer.activation = nn.Identity()
    after = certify(layer, seq_len=TOKENS, radius=1.0, cross_check=False).total
    assert after == pytest.approx(before, rel=1e-9)


def test_a_part_that_the_fused_kernel_does_not_call_is_refused():
    """A map by 0.001 in place of a dropout made the constant 0.001 times that of the kernel."""
    layer = awake(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True))
    layer.dropout2 = awake(nn.Linear(WIDTH, WIDTH))
    assert "its dropout2 is a Linear" in why(layer, radius=1.0)
    layer.self_attn.num_heads = 1  # the kernel takes even numbers alone
    by_one = certify(layer, seq_len=TOKENS, radius=1.0).total
    layer.self_attn.num_heads, layer.activation_relu_or_gelu = 2, 0
    assert max(by_one, certify(layer, seq_len=TOKENS, radius=1.0).total) < math.inf


def test_transformers_is_not_imported_for_its_rules():
    code = (
        "import sys, torch\nfrom wellposed.certification import certifiable_classes, certify\nlayer"
        " = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True,"
        " norm_first=True).eval()\nassert certify(layer, seq_len=4).total < float('inf')\nassert"
        " not any(kind.__module__.startswith('transformers') for kind in"
        " certifiable_classes())\nassert 'transformers' not in sys.modules, 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
