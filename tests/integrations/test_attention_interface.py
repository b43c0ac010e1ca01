"""``attn_implementation="wellposed_..."`` against attention by explicit float64 loops, in models of
every family."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from tests.support.words import python
from tests.support.zoo import PLAIN, ZOO, D, V
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

import wellposed as wp
from wellposed.errors import ConfigError

pytestmark = pytest.mark.slow  # the whole table

NAMES = wp.integrations.register_attention()
ENCODERS = ("bert", "distilbert")
DECODERS = ("gpt2", "llama", "mistral, a window of 3", "phi3")
SEQ2SEQ = ("t5", "bart")
EPS = 0.01


def normalized(tokens):
    return tokens / (tokens.square().sum(-1, keepdim=True) + EPS).sqrt()


def loops(kind, tokens, added, *, scaling, groups):
    """Return (batch, queries, heads, width): one softmax for each batch, head and query; a row of
    -inf gives zero."""
    query, key, value = tokens
    batch, heads, length, width = query.shape
    out = value.new_zeros(batch, length, heads, value.shape[-1])
    added = added.expand(batch, heads, length, key.shape[2])
    if kind == "wellposed_cosine":
        query, key, value = map(normalized, tokens)
    for b in range(batch):
        for h in range(heads):
            keys = key[b, h // groups]
            values = value[b, h // groups]
            for i in range(length):
                q = query[b, h, i]
                if kind == "wellposed_l2":
                    logits = torch.stack([-scaling * (q - k).dot(q - k) for k in keys])
                else:
                    logits = torch.stack([math.sqrt(width) * q.dot(k) for k in keys])
                weights = (logits + added[b, h, i]).softmax(0).nan_to_num(0.0)
                out[b, i, h] = sum(w * v for w, v in zip(weights, values, strict=True))
    return out


def reference(kind):
    """Attention as transformers calls it, with the additive masks that it makes for ``eager``."""

    def forward(module, query, key, value, attention_mask, scaling, position_bias=None, **_):  # fmt: skip
        added = query.new_zeros(1, 1, query.shape[2], key.shape[2])
        for part in (attention_mask, position_bias):
            added = added if part is None else added + part
        groups = getattr(module, "num_key_value_groups", 1)
        return loops(kind, (query, key, value), added, scaling=scaling, groups=groups), None

    return forward


for _name in NAMES:
    AttentionInterface.register(f"loops_{_name}", reference(_name))
    AttentionMaskInterface.register(f"loops_{_name}", AttentionMaskInterface()["eager"])


def padded(*, left=False, rows=2, length=7):
    """Tokens and their mask: the first text has three tokens of padding, the others none."""
    ids = torch.randint(3, V, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, slice(None, 3) if left else slice(-3, None)] = 0
    return ids, mask


def config_of(family):
    if family != "mistral, a window of 3":
        return ZOO[family].build().config
    sizes = {"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return hf.MistralConfig(**PLAIN, **sizes, num_key_value_heads=2, sliding_window=3)


def model_of(family, implementation, kind=hf.AutoModel):
    """A model in float64 whose queries and keys are long, so that attention is far from uniform."""
    model = kind.from_config(config_of(family), attn_implementation=implementation).eval().double()
    with torch.no_grad():
        for role in wp.find_roles(model).attention:
            for view in (role.query, role.key):
                view.tensor().normal_(std=0.7)
    return model


def inputs_of(family):
    """Return what the model takes, and the mask of the output's real tokens."""
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8).double()}, None
    ids, mask = padded(left=family in DECODERS)
    if family in SEQ2SEQ:
        target = torch.randint(3, V, (2, 5))
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}, None
    return {"input_ids": ids, "attention_mask": mask}, mask


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS, *SEQ2SEQ, "vit"])
def test_every_family_computes_what_the_loops_compute(family, name):
    """Padding, causal masks, grouped heads, position bias and cross-attention included; gradients
    as well."""
    ours = model_of(family, name)
    slow = copy.deepcopy(ours)
    slow.set_attn_implementation(f"loops_{name}")
    inputs, real = inputs_of(family)
    outputs = [model(**inputs).last_hidden_state for model in (ours, slow)]
    if real is not None:
        outputs = [output[real.bool()] for output in outputs]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    weight = torch.randn_like(outputs[0])
    for output in outputs:
        (output * weight).sum().backward()
    for (path, one), two in zip(ours.named_parameters(), slow.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), path
        if one.grad is not None and two.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-8, msg=path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_mask_of_four_dimensions_may_be_bool_or_additive(family, name):
    model = model_of(family, name)
    ids, _ = padded()
    allowed = (torch.rand(2, 1, 7, 7) < 0.5) | torch.eye(7, dtype=torch.bool)
    added = torch.zeros(2, 1, 7, 7).double().masked_fill(~allowed, torch.finfo(torch.float64).min)
    with torch.no_grad():
        boolean = model(ids, attention_mask=allowed).last_hidden_state
        additive = model(ids, attention_mask=added).last_hidden_state
        model.set_attn_implementation(f"loops_{name}")
        slow = model(ids, attention_mask=added).last_hidden_state
    torch.testing.assert_close(boolean, slow, rtol=0, atol=1e-10)
    torch.testing.assert_close(additive, slow, rtol=0, atol=1e-10)


@pytest.mark.parametrize("number", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf, None])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_token_that_any_number_masks_changes_not_one_bit(family, name, number):
    """Nor is it the key that L2 attention subtracts from all, which is the first that is not masked."""
    model = model_of(family, name).float()
    ids, real = padded(left=family == "bert")
    keep = real.bool()
    allowed = keep[:, None, None].expand(2, 1, 7, 7)
    allowed = allowed.tril() if family == "llama" else allowed
    mask = allowed if number is None else torch.zeros(2, 1, 7, 7).masked_fill(~allowed, number)
    changed = ids.clone()
    changed[~keep] = 1 + V // 2
    with torch.no_grad():
        before = model(ids, attention_mask=mask).last_hidden_state
        after = model(changed, attention_mask=mask).last_hidden_state
    assert torch.equal(before[keep], after[keep])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS, *SEQ2SEQ])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_token_changes_not_one_bit(family, name, dtype):
    """Another padding token, and where attention is causal another last token, leave the rest
    exactly as it is."""
    model = model_of(family, name).to(dtype)
    inputs, real = inputs_of(family)
    changed = inputs["input_ids"].clone()
    changed[inputs["attention_mask"] == 0] = 1 + V // 2
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        after = model(**(inputs | {"input_ids": changed})).last_hidden_state
    keep = torch.ones(before.shape[:2], dtype=torch.bool) if real is None else real.bool()
    assert torch.equal(before[keep], after[keep])
    if family in (*DECODERS, *SEQ2SEQ):
        tokens = "decoder_input_ids" if family in SEQ2SEQ else "input_ids"
        later = inputs[tokens].clone()
        later[:, -1] = 1 + V // 2
        with torch.no_grad():
            other = model(**(inputs | {tokens: later})).last_hidden_state
        keep[:, -1] = False
        assert torch.equal(before[keep], other[keep])
        assert not torch.equal(before[:, -1], other[:, -1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", [*DECODERS, *SEQ2SEQ])
def test_generation_has_the_same_logits_with_a_cache(family, cache, name):
    head = hf.AutoModelForSeq2SeqLM if family in SEQ2SEQ else hf.AutoModelForCausalLM
    model = model_of(family, name, head)
    assert model.config._attn_implementation == name
    ids, mask = padded(left=True)
    fixed = {
        "attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True,
        "return_dict_in_generate": True, "disable_compile": True,
    }  # fmt: skip
    cached = model.generate(ids, use_cache=True, cache_implementation=cache, **fixed)
    plain = model.generate(ids, use_cache=False, **fixed)
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(cached.logits, plain.logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads_far_from_the_origin_stay_accurate(name, dtype, masked):
    """Outputs err by the rounding of weights and values in the dtype, not by that of `|k|^2`, which
    is large here."""
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True, scaling=0.5)
    query, key = (torch.randn(2, heads, 9, 8).add(4).to(dtype) for heads in (6, 2))
    value = torch.randn(2, 2, 9, 5).to(dtype)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].expand(2, 1, 9, 9).clone()
    if masked:
        causal[0, :, :, :2] = False
    arguments = (module, query, key, value, causal if masked else None)
    out, weights = AttentionInterface()[name](*arguments, scaling=0.5, dropout=0.0)
    added = torch.zeros(causal.shape).double().masked_fill(~causal, -math.inf)
    wide = (query.double(), key.double(), value.double())
    slow = loops(name, wide, added, scaling=0.5, groups=3)
    assert weights is None
    assert out.dtype is dtype
    # Half precision: normalised vectors are themselves rounded, and the logits (up to sqrt 8) with
    # them.
    largest = value.abs().max().item() if name == "wellposed_l2" else 4
    tolerance = 4 * torch.finfo(dtype).eps * largest
    torch.testing.assert_close(out.double(), slow, rtol=0, atol=max(tolerance, 2e-5))


@pytest.mark.parametrize("name", NAMES)
def test_dropout_is_applied_in_training_alone(name):
    config = hf.BertConfig(**PLAIN, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    model = hf.BertModel._from_config(config, attn_implementation=name)
    ids, _ = padded()
    first, second = (model.train()(ids).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (model.eval()(ids).last_hidden_state for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", NAMES)
def test_the_penalty_sees_the_affinities(name):
    """Its value is that of the same attention written as a softmax over square logits."""

    def plain(_, *arguments, scaling, **__):
        query, key, value, mask = arguments
        assert mask is None
        if name == "wellposed_l2":
            logits = -scaling * (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
        else:
            query, key, value = map(normalized, (query, key, value))
            logits = math.sqrt(query.shape[-1]) * query @ key.mT
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("softmax_in_the_open", plain)
    AttentionMaskInterface.register("softmax_in_the_open", AttentionMaskInterface()["sdpa"])
    model = model_of("bert", name)
    ids = torch.randint(3, V, (2, 7))
    values = []
    for implementation in (name, "softmax_in_the_open"):
        model.set_attn_implementation(implementation)
        penalty = wp.OrthogonalityPenalty(model, affinity=1.0)
        output = model(ids)
        values.append(penalty())
        penalty.remove()
        del output
    assert values[0].requires_grad
    torch.testing.assert_close(*values, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"output_attentions": True}, "attention weights, which are never made"),
        ({"softcap": 30.0}, "a cap on the logits"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
        ({"cache": object()}, "a paged cache"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(name, call, message):
    ids, mask = padded()
    with pytest.raises(ConfigError, match=f"LlamaAttention.*\n.*{message}"):
        model_of("llama", name)(ids, attention_mask=mask, **call)


def test_l2_refuses_a_model_that_scales_its_queries_itself_and_cosine_takes_it():
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = hf.OPTModel(hf.OPTConfig(**PLAIN, **special, word_embed_proj_dim=D)).eval()
    ids, mask = padded(left=True)
    model.set_attn_implementation("wellposed_l2")
    expected = r"OPTAttention: it scales its queries itself.*wellposed_cosine"
    with pytest.raises(ConfigError, match=expected):
        model(ids, attention_mask=mask)
    model.set_attn_implementation("wellposed_cosine")
    fast = model(ids, attention_mask=mask).last_hidden_state
    model.set_attn_implementation("loops_wellposed_cosine")
    slow = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(fast[mask.bool()], slow[mask.bool()], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS, *SEQ2SEQ, "vit"])
def test_a_built_model_is_given_the_attention(family, name):
    changed = model_of(family, "sdpa")
    named = model_of(family, name)
    wp.integrations.set_attention_(changed, name)
    changed.load_state_dict(named.state_dict())
    inputs, _ = inputs_of(family)
    assert torch.equal(changed(**inputs).last_hidden_state, named(**inputs).last_hidden_state)


def test_a_family_that_would_ignore_the_name_is_refused_and_left_as_it_was():
    expected = r"would be ignored by these parts(.|\n)*mpnet: MPNetModel"
    for implementation in ("eager", "wellposed_l2"):
        config = hf.MPNetConfig(**PLAIN)
        model = hf.MPNetForMaskedLM._from_config(config, attn_implementation=implementation)
        with pytest.raises(ConfigError, match=expected):
            wp.integrations.set_attention_(model, "wellposed_l2")
        assert model.config._attn_implementation == implementation


def test_a_model_without_attention_is_refused():
    model = hf.ResNetModel(hf.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    with pytest.raises(ConfigError, match="ResNetModel asks transformers for no attention"):
        wp.integrations.set_attention_(model, "wellposed_l2")


def test_models_that_are_told_otherwise_and_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r"AttentionInterface for .* received Linear"):
        wp.integrations.set_attention_(nn.Linear(2, 2), "wellposed_l2")
    with pytest.raises(ConfigError, match="build wellposed's own with attention='l2'"):
        wp.integrations.set_attention_(ZOO["ours, classifier"].build(), "wellposed_l2")
    with pytest.raises(ConfigError, match="implementation 'l2'; nearest: wellposed_l2"):
        wp.integrations.set_attention_(model_of("bert", "sdpa"), "l2")


BUILD = """
import transformers
sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
config = transformers.BertConfig(**sizes)
model = transformers.AutoModel.from_config(config, attn_implementation="wellposed_l2")
import peft, tempfile
adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
adapted.save_pretrained(tempfile.mkdtemp())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    ["wellposed.integrations", "transformers, peft, wellposed.integrations", "wellposed.models"],
)
def test_the_names_are_known_once_the_adapters_are_imported(imports):
    """The order of imports is free; an adapter that is saved says what its files lack."""
    done = python(["-c", f"import {imports}{BUILD}"])
    assert done.returncode == 0, done.stderr
    assert "do not carry the attention of" in done.stderr
