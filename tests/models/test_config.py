"""Every option changes something, those of L2 attention by kind; every bad value is named."""

import copy
import math
import re

import pytest
import torch
from tests.support.tiny import IDS, MASK, SIZES, tiny
from tests.support.words import words

from wellposed import models
from wellposed.certification import certify
from wellposed.errors import ConfigError
from wellposed.nn import ATTENTIONS, CosineSelfAttention, L2SelfAttention

# If a value does not show in the logits of a fresh model, the test below checks it otherwise.
CHANGES = [
    dict(vocab_size=14),
    dict(max_position_embeddings=11),
    dict(hidden_size=24),
    dict(num_hidden_layers=3),
    dict(num_hidden_layers=0),
    dict(num_attention_heads=2),
    dict(intermediate_size=20),
    dict(activation="relu"),
    dict(attention="other-for-this-test"),
    dict(attention="ball"),
    dict(feedforward="maxmin"),
    dict(norm="pre"),
    dict(norm="none"),
    dict(norm="dyt"),
    dict(norm="derf"),
    dict(residual="rezero"),
    dict(residual="convex"),
    dict(residual="budget"),
    dict(residual="ngpt"),
    dict(attention="ngpt"),
    dict(feedforward="ngpt"),
    dict(unit_embeddings=True),
    dict(ball_embeddings=True),
    dict(qk_norm=True),
    dict(position="sinusoidal"),
    dict(scale_embeddings=False),
    dict(dropout=0.5),
    dict(attention_dropout=0.5),
    dict(init="other-for-this-test"),
    dict(init="mimetic"),
    dict(pooling="first"),
    dict(pooling="max"),
    dict(is_causal=True),
    dict(layer_norm_eps=0.5),
    dict(num_labels=7),
]


def double_(module, config):
    models.xavier_(module, config)
    if isinstance(module, torch.nn.Linear):
        module.weight.mul_(2.0)


class Keep(torch.nn.Module):
    def forward(self, x, **_):
        return x


if "other-for-this-test" not in models.INITS:
    models.INITS.register("other-for-this-test")(models.Initializer(module=double_))
    ATTENTIONS.register("other-for-this-test")(lambda _: Keep())


def classify(**changes):
    model = tiny(models.WellposedForSequenceClassification, **changes)
    torch.manual_seed(1)
    return model(input_ids=IDS, attention_mask=MASK).logits


@pytest.mark.parametrize("change", CHANGES)
def test_every_option_changes_the_result(change):
    plain = classify()
    changed = classify(**change)
    assert plain.shape != changed.shape or (plain - changed).abs().max() > 1e-4


def test_every_field_of_the_configuration_is_in_the_table_or_tested_by_name():
    elsewhere = words(
        "tie_word_embeddings pad_token_id bos_token_id eos_token_id use_cache"  # saving, generate
        " num_decoder_layers share_embeddings cross_attention decoder_start_token_id"  # seq2seq
        " position_scale dyt_alpha derf_alpha contractive lipschitz_norm query_width l2_init_scale cosine_eps"
        " contractive_bound ball_temperature ball_max_temperature budget"  # l2_options, certification
        " ngpt_alpha logit_gain"  # nn/test_ngpt
    )
    hinted = set(models.WellposedConfig.hints()) - {"window_for_this_test"}
    changed = {name for change in CHANGES for name in change}
    assert hinted == (changed - {"num_labels"}) | {*elsewhere}


def test_all_bad_values_are_in_one_message():
    with pytest.raises(ConfigError) as caught:
        models.WellposedConfig(
            **dict(hidden_size=10, num_attention_heads=3, vocab_size=0, dropout=1.0, norm="per"),
            **dict(layer_norm_eps=0.0, hiden_size=3),
        )
    assert "6 values are not usable" in str(caught.value)
    assert "hiden_size: unknown key; nearest: hidden_size" in str(caught.value)
    assert "hidden_size = 10 is not divisible by num_attention_heads = 3" in str(caught.value)
    assert "vocab_size = 0, expected an integer >= 1" in str(caught.value)
    assert "dropout = 1.0, expected a finite number >= 0 and < 1" in str(caught.value)
    assert "norm: unknown norm 'per'; nearest: pre" in str(caught.value)
    assert "layer_norm_eps = 0.0" in str(caught.value)


UNREAD = "= 0.5, which only"
BAD = [
    (dict(num_hidden_layers=-1), "num_hidden_layers = -1, expected an integer >= 0"),
    (
        dict(num_hidden_layers=100000000),
        "num_hidden_layers = 100000000, expected an integer >= 0 and <",
    ),
    (dict(num_labels=100000000), "num_labels = 100000000, expected an integer >= 1 and <"),
    (dict(num_labels=0), "num_labels = 0"),
    (dict(num_attention_heads=True), "num_attention_heads = True"),
    (dict(pad_token_id=13, vocab_size=13), "= 13, expected a token in [0, 13)"),
    (dict(eos_token_id=[1, 99], vocab_size=13), "eos_token_id = 99"),
    (dict(qk_norm=True, hidden_size=3, num_attention_heads=3), "heads of dimension 1"),
    (dict(pooling=None), "unknown pooling None"),
    (dict(lipschitz_norm="fro"), "= 'fro', expected 'tok', 'inf' or '2'"),
    (
        dict(contractive=0.5),
        f"contractive {UNREAD} attention 'l2_contractive' reads; leave it None",
    ),
    (dict(contractive=0.5, attention="l2_tied"), f"contractive {UNREAD}"),
    (dict(lipschitz_norm="inf", attention="l2"), "lipschitz_norm = 'inf'"),
    (dict(query_width=2), "= 2, which only attention 'l2' or 'l2_tied' or 'l2_contractive'"),
    (dict(cosine_eps=0.5, attention="l2_tied"), f"{UNREAD} attention 'cosine' reads; leave it"),
    (dict(l2_init_scale=0.5, attention="l2"), f"l2_init_scale {UNREAD} init 'kim2021' reads"),
    (dict(l2_init_scale=0.5, init="kim2021"), f"l2_init_scale {UNREAD} attention 'l2' or"),
]


@pytest.mark.parametrize(("changes", "part"), BAD)
def test_a_bad_value_is_named(changes, part):
    with pytest.raises(ConfigError, match=re.escape(part)):
        models.WellposedConfig(**changes)


def test_a_value_spoilt_later_is_found_when_the_model_is_built():
    config = models.WellposedConfig(**SIZES)
    config.norm = "middle"
    with pytest.raises(ConfigError, match="unknown norm 'middle'"):
        models.WellposedForCausalLM(config)


def test_the_language_model_does_not_touch_the_callers_configuration():
    config = models.WellposedConfig(**SIZES)
    before = copy.deepcopy(config.to_dict())
    assert models.WellposedForCausalLM(config).config.is_causal
    assert config.to_dict() == before
    for family in ("wellposed", "transject"):
        with pytest.raises(ConfigError, match="is_causal=False; leave it None"):
            models.build_model(family, "causal_lm", is_causal=False)
    with pytest.raises(ConfigError, match="received is_causal=True; leave it None"):
        models.build_model("wellposed", "seq2seq_lm", is_causal=True)


def test_build_model_names_what_is_unknown():
    with pytest.raises(ConfigError, match="unknown architecture 'welposed'; nearest: wellposed"):
        models.build_model("welposed", "causal_lm")
    with pytest.raises(
        ConfigError, match="unknown kind of wellposed model 'causal'; nearest: causal_lm"
    ):
        models.build_model("wellposed", "causal")
    with pytest.raises(ConfigError, match="unknown kind of transject model 'seq2seq_lm'"):
        models.build_model("transject", "seq2seq_lm")


def test_xavier_bounds_and_spread():
    sizes = {"vocab_size": 500, "hidden_size": 64, "norm": "pre", "residual": "rezero"}
    model = models.WellposedForCausalLM(models.WellposedConfig(**sizes))
    layer = model.model.layers[0]
    bound = (6 / (64 + 256)) ** 0.5
    weight = layer.feedforward.up_proj.weight
    assert bound * 0.99 < weight.abs().max() <= bound
    # The variance of n draws of U(-b, b) is b^2/3 up to about b^2 * 0.3 / sqrt(n); n = 16384.
    assert weight.square().mean().item() == pytest.approx(bound**2 / 3, rel=0.05)
    assert model.model.embeddings.token.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    zeros = ("bias", "residual.scale")
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith(zeros))
    assert (layer.attention_norm.weight == 1).all()
    states = model(input_ids=torch.arange(100)[None], output_hidden_states=True).hidden_states[0]
    assert states.var().item() == pytest.approx(2.0, rel=0.1)


def test_a_whole_model_initializer_runs_once_on_a_fresh_model_only(tmp_path):
    calls = []
    name = "counted-for-this-test"
    if name not in models.INITS:
        note = models.Initializer(models.xavier_, lambda model: calls.append(type(model).__name__))
        models.INITS.register(name)(note)
    model = models.WellposedForCausalLM(models.WellposedConfig(init=name, **SIZES))
    assert calls == ["WellposedForCausalLM"]
    model.save_pretrained(tmp_path)
    models.WellposedForCausalLM.from_pretrained(tmp_path)
    assert calls == ["WellposedForCausalLM"]


@pytest.mark.parametrize("name", ["eager", "flash_attention_2"])
def test_kernels_that_would_be_ignored_are_refused(name):
    with pytest.raises(
        ConfigError, match=f"received attn_implementation='{name}'; expected 'sdpa'"
    ):
        models.WellposedForCausalLM(models.WellposedConfig(attn_implementation=name, **SIZES))


L2_SIZES = dict(
    hidden_size=16, num_attention_heads=2, num_hidden_layers=1, max_position_embeddings=12
)


def attention(**changes):
    torch.manual_seed(0)
    return models.WellposedModel(models.WellposedConfig(**L2_SIZES, **changes)).layers[0].attention


def test_contractive_and_its_norm_reach_the_layer():
    for norm, expected in (("tok", "tok"), ("inf", "inf"), ("2", 2)):
        layer = attention(attention="l2_contractive", contractive=0.37, lipschitz_norm=norm)
        assert isinstance(layer, L2SelfAttention)
        assert (layer.contractive, layer.norm, layer.max_tokens) == (0.37, expected, 12)
        certificate = certify(layer.eval(), seq_len=12, norm=layer.norm)
        assert 0 < certificate.total <= 0.37
    assert attention(attention="l2_contractive").contractive == 0.9


@pytest.mark.parametrize("name", ["l2", "l2_tied", "l2_contractive"])
def test_query_width_gives_the_tied_layer_the_size_of_the_untied_one(name):
    one = attention(attention=name)
    two = attention(attention=name, query_width=2)
    assert two.q_proj.weight.shape == (2 * one.q_proj.weight.shape[0], 16)
    if name == "l2_tied":
        layers = (two, attention(attention="l2"))
        assert len({sum(p.numel() for p in layer.parameters()) for layer in layers}) == 1


def test_cosine_eps_reaches_the_layer_and_its_bound():
    layers = [attention(attention="cosine", cosine_eps=eps).eval() for eps in (0.01, 0.04)]
    assert [layer.eps for layer in layers if isinstance(layer, CosineSelfAttention)] == [0.01, 0.04]
    totals = [certify(layer, seq_len=12).total for layer in layers]
    # The bound is proportional to eps^-1/2 (theory note B6).
    assert totals[0] / totals[1] == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(("scale", "expected"), [(None, 2.0**-4), (0.5, 0.5)])
@pytest.mark.parametrize("name", ["l2", "l2_tied", "l2_contractive"])
def test_init_kim2021_draws_from_the_scale_and_leaves_the_rest_to_xavier(name, scale, expected):
    options = {} if scale is None else {"l2_init_scale": scale}
    config = models.WellposedConfig(**L2_SIZES, attention=name, init="kim2021", **options)
    model = models.WellposedModel(config)
    bound = expected / math.sqrt(16)
    layer = model.layers[0]
    for projection in (layer.attention.q_proj, layer.attention.v_proj, layer.attention.o_proj):
        largest = float(projection.weight.detach().abs().max())
        assert 0.9 * bound < largest <= bound
    glorot = math.sqrt(6 / (16 + 64))
    assert 0.9 * glorot < float(layer.feedforward.up_proj.weight.detach().abs().max()) <= glorot
