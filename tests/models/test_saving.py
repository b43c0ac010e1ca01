"""Models come back as they were saved, those of earlier versions too, changes to models of others are made
again."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.close import within
from tests.support.tiny import SIZES, tiny
from tests.support.transject import IDS, MASK, SETTINGS, awake
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    GPT2Config,
)

import wellposed as wp
from wellposed.errors import CheckpointError
from wellposed.models import (
    AutoModelForSequencePairClassification,
    TransJectConfig,
    TransJectForCausalLM,
    TransJectForSequenceClassification,
    TransJectModel,
    WellposedConfig,
    WellposedForCausalLM,
    WellposedForSequenceClassification,
    build_model,
    load_saved_model,
)
from wellposed.nn import ATTENTIONS
from wellposed.presets import ngpt

RICH = dict(norm="pre", residual="rezero", qk_norm=True, activation="relu", pooling="max")
AUTO = {
    "encoder": AutoModel,
    "causal_lm": AutoModelForCausalLM,
    "masked_lm": AutoModelForMaskedLM,
    "token_classification": AutoModelForTokenClassification,
    "sequence_classification": AutoModelForSequenceClassification,
    "sequence_pair_classification": AutoModelForSequencePairClassification,
}
TRANSJECT = dict(vocab_size=13, max_position_embeddings=12, hidden_size=16, num_hidden_layers=3)
KINDS = [kind for kind in AUTO if kind != "encoder"]
ROWS = [
    *(("wellposed", kind, RICH) for kind in KINDS),
    *(("wellposed", "causal_lm", dict(attention=name)) for name in ATTENTIONS.names()),
    ("wellposed", "causal_lm", dict(norm="dyt", dyt_alpha=0.3)),
    ("wellposed", "causal_lm", dict(norm="derf", derf_alpha=0.3)),
    ("wellposed", "causal_lm", ngpt(0.1)),
    ("wellposed", "causal_lm", {"tie_word_embeddings": False, "position": "sinusoidal"}),
    ("wellposed", "causal_lm", dict(attention="l2_contractive", contractive=0.4, query_width=2)),
    *(("transject", kind, settings) for kind in AUTO for settings in SETTINGS[1:]),
]


def perturbed(model):
    """No weight keeps the value that a fresh model of the same configuration would have."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def build(family, kind, settings):
    torch.manual_seed(10)
    if family != "transject":
        return perturbed(build_model(family, kind, **SIZES, **settings))
    if kind == "encoder":
        return awake(TransJectModel(TransJectConfig(**TRANSJECT, **settings)))
    return awake(build_model(family, kind, **TRANSJECT, **settings))


@pytest.mark.parametrize(("family", "kind", "settings"), ROWS)
def test_a_model_comes_back_through_its_auto_class(family, kind, settings, tmp_path):
    model = build(family, kind, settings)
    model.save_pretrained(tmp_path)
    loaded, info = AUTO[kind].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(load_saved_model(tmp_path)) is type(model)
    assert type(AUTO[kind].from_config(model.config)) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    if "pair" in kind:
        inputs |= {"input_ids_pair": IDS, "attention_mask_pair": MASK}
    assert torch.equal(loaded.eval()(**inputs)[0], model(**inputs)[0])


def test_a_tied_output_layer_of_transject_is_the_embedding():
    model = TransJectForCausalLM(TransJectConfig(**TRANSJECT, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embeddings.token.weight
    free = TransJectForCausalLM(TransJectConfig(**TRANSJECT))
    assert free.lm_head.weight.shape == (13, 16)
    assert 0.1 < float(model(input_ids=IDS).logits.detach().std()) < 4.0


def test_a_classifier_comes_back_with_its_labels(tmp_path):
    labels = {0: "bad", 1: "fair", 2: "good"}
    numbers = {name: index for index, name in labels.items()}
    config = WellposedConfig(**SIZES, id2label=labels, label2id=numbers)
    WellposedForSequenceClassification(config).save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.id2label == labels


def test_a_classifier_takes_the_body_of_a_language_model(tmp_path):
    model = perturbed(tiny(WellposedForCausalLM))
    model.save_pretrained(tmp_path)
    states = model.model(input_ids=IDS).last_hidden_state
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    pair = AutoModelForSequencePairClassification.from_pretrained(tmp_path)
    for body in (classifier.model, pair.model, AutoModel.from_pretrained(tmp_path)):
        assert torch.equal(body.eval()(input_ids=IDS).last_hidden_state, states)
    bound = (6 / (12 + 4)) ** 0.5
    assert 0 < classifier.classifier.weight.abs().max() <= bound
    assert not classifier.classifier.bias.any()


def test_a_head_on_a_body_of_transject_is_fresh_and_the_body_is_not(tmp_path):
    body = build("transject", "encoder", SETTINGS[0])
    body.save_pretrained(tmp_path)
    model = TransJectForSequenceClassification.from_pretrained(tmp_path)
    state = model.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in body.state_dict().items())
    assert model.classifier.weight.any()
    assert not model.classifier.bias.any()


CHANGED_IDS = torch.randint(0, 40, (3, 11), generator=torch.Generator().manual_seed(0))


def gpt2():
    sizes = dict(n_layer=2, n_embd=16, n_head=2, vocab_size=40, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(GPT2Config(**sizes))


def bert():
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return transformers.BertForSequenceClassification(BertConfig(vocab_size=40, **sizes))


def t5():
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, **sizes))


def logits(model):
    inputs = {"decoder_input_ids": CHANGED_IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=CHANGED_IDS, **inputs).logits


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_models_without_norms_load_without_norms(make, tmp_path):
    model = make()
    removed = wp.t_fixup_(model).norms_removed
    model.save_pretrained(tmp_path)
    noted = json.loads((tmp_path / "config.json").read_text())["wellposed"]
    assert noted == {"removed_norms": list(removed)}
    loaded = load_saved_model(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert [*dict(loaded.named_parameters())] == [*dict(model.named_parameters())]
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load_saved_model(tmp_path / "again")), logits(model))


def test_without_the_loader_norms_come_back_and_can_be_taken_out(tmp_path):
    model = gpt2()
    wp.t_fixup_(model)
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (logits(plain) - logits(model)).abs().max() > 1e-2
    assert len(wp.initialize.remove_recorded_norms_(plain)) == 5
    assert torch.equal(logits(plain), logits(model))


def test_norms_kept_and_norms_taken_out_later_are_told_apart(tmp_path):
    model = bert()
    wp.remove_norms_(model, exclude="*.embeddings.LayerNorm")
    first = list(model.config.wellposed["removed_norms"])
    assert torch.equal(logits(_saved_and_loaded(model, tmp_path / "some")), logits(model))
    wp.remove_norms_(model)
    assert model.config.wellposed["removed_norms"] == [*first, "bert.embeddings.LayerNorm"]
    assert torch.equal(logits(_saved_and_loaded(model, tmp_path / "all")), logits(model))


def test_a_damaged_note_is_refused(tmp_path):
    bert().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    for damaged in ({"removed_norms": "bert"}, {"removed_norms": [3]}, {"attention": 3}, [1]):
        path.write_text(json.dumps({**json.loads(path.read_text()), "wellposed": damaged}))
        with pytest.raises(CheckpointError, match="expected removed_norms, a list of names"):
            load_saved_model(tmp_path)


def _saved_and_loaded(model, folder):
    model.save_pretrained(folder)
    return load_saved_model(folder)


SAVED = Path(__file__).parent / "saved"
LOGITS = load_file(SAVED / "logits.safetensors")
NOT_ATTRIBUTES = {"dtype", "id2label", "transformers_version"}  # of another type in memory
INPUTS = {
    "pair_cosine": {"input_ids_pair": torch.tensor([[5, 2]])},
    "seq2seq_l2": {"decoder_input_ids": torch.tensor([[1, 5]])},
}


@pytest.mark.parametrize("name", sorted(LOGITS))
def test_a_saved_model_gives_the_logits_it_gave(name):
    model = load_saved_model(SAVED / name)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[3, 1, 4, 1]]), **INPUTS.get(name, {})).logits
    # A few float32 roundings of other kernels: logits are below 10, and sums have at most 16 terms.
    within(logits, LOGITS[name], 10 * 16 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", sorted(LOGITS))
def test_every_option_of_a_saved_configuration_has_its_value(name, tmp_path):
    written = json.loads((SAVED / name / "config.json").read_text())
    config = load_saved_model(SAVED / name).config
    keys = written.keys() - NOT_ATTRIBUTES
    assert {key: getattr(config, key) for key in keys} == {key: written[key] for key in keys}
    config.save_pretrained(tmp_path)
    again = json.loads((tmp_path / "config.json").read_text())
    assert all(again[name] == written[name] for name in again.keys() & written.keys())
    assert written.keys() - again.keys() <= type(config).part_options().keys()
