"""Models come back as they were saved, those of earlier versions too, changes to models of others are made
again, and models of the user's are started from."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.close import within
from tests.support.edited import edited
from tests.support.refusal import bad_config
from tests.support.tiny import SIZES, options, tiny
from tests.support.transject import IDS, MASK, SETTINGS, awake
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
)

import wellposed as wp
from wellposed.errors import CheckpointError, ConfigError, ShapeError
from wellposed.model_options import ModelOptions
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
    model_keywords,
    start_model,
)
from wellposed.nn import ATTENTIONS
from wellposed.training.config import RunConfig

RICH = options("norm=pre residual=rezero qk_norm=True activation=relu pooling=max")
AUTO = {
    "encoder": AutoModel,
    "causal_lm": AutoModelForCausalLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "sequence_pair_classification": AutoModelForSequencePairClassification,
}
TRANSJECT = options("vocab_size=13 max_position_embeddings=12 hidden_size=16 num_hidden_layers=3")
KINDS = [kind for kind in AUTO if kind != "encoder"]
ROWS = [
    *(("wellposed", kind, RICH) for kind in KINDS),
    *(("wellposed", "causal_lm", options(f"attention={name}")) for name in ATTENTIONS.names()),
    ("wellposed", "causal_lm", options("norm=dyt dyt_alpha=0.3")),
    ("wellposed", "causal_lm", {"tie_word_embeddings": False, "position": "sinusoidal"}),
    ("wellposed", "causal_lm", options("attention=l2_contractive contractive=0.4 query_width=2")),
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
    assert type(loaded) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    given = {"input_ids": IDS, "attention_mask": MASK}
    if "pair" in kind:
        given |= {"input_ids_pair": IDS, "attention_mask_pair": MASK}
    assert torch.equal(loaded.eval()(**given)[0], model(**given)[0])


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
    sizes = options("n_layer=2 n_embd=16 n_head=2 vocab_size=40 bos_token_id=0 eos_token_id=0")
    return transformers.GPT2LMHeadModel(GPT2Config(**sizes))


def bert():
    sizes = options("hidden_size=16 num_hidden_layers=2 num_attention_heads=2 intermediate_size=32")
    return transformers.BertForSequenceClassification(BertConfig(vocab_size=40, **sizes))


def t5():
    sizes = options("d_model=16 d_kv=8 d_ff=32 num_layers=2 num_heads=2 decoder_start_token_id=0")
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
    wp.remove_norms_(model, keep="*.embeddings.LayerNorm")
    first = list(model.config.wellposed["removed_norms"])
    assert torch.equal(logits(_saved_and_loaded(model, tmp_path / "some")), logits(model))
    wp.remove_norms_(model)
    assert model.config.wellposed["removed_norms"] == [*first, "bert.embeddings.LayerNorm"]
    assert torch.equal(logits(_saved_and_loaded(model, tmp_path / "all")), logits(model))


def test_a_run_starts_from_a_model_without_norms(tmp_path):
    model = bert()
    wp.t_fixup_(model)
    model.bert.save_pretrained(tmp_path / "body")
    model.save_pretrained(tmp_path / "whole")
    for folder in ("body", "whole"):
        start = start_model(tmp_path / folder, "sequence_classification", {"vocab_size": 40})
        assert not any("LayerNorm" in name for name, _ in start.model.named_parameters())
        models = (start.model.eval(), model.eval())
        states = [each.bert(input_ids=CHANGED_IDS).last_hidden_state for each in models]
        assert torch.equal(*states)


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
RUNS = sorted(SAVED.glob("run_configs/*.toml"))
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
    own = written.keys() - NOT_ATTRIBUTES
    assert {name: getattr(config, name) for name in own} == {name: written[name] for name in own}
    config.save_pretrained(tmp_path)
    again = json.loads((tmp_path / "config.json").read_text())
    assert all(again[name] == written[name] for name in again.keys() & written.keys())
    assert written.keys() - again.keys() <= type(config).part_options().keys()


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_configuration_of_a_run_comes_back_and_makes_its_model(path):
    values = tomllib.loads(path.read_text())
    config = RunConfig.from_dict(values, where=str(path))
    again = config.to_dict()
    grown = ("model", "train", "constrain", "penalty")  # options were added since
    for section in grown:
        assert again[section].items() >= values[section].items()
    assert all(again[name] == values[name] for name in values if name not in grown)
    sizes = {"vocab_size": 5, **model_keywords(config.model)}
    model = build_model(config.model.architecture, "causal_lm", **sizes)
    for name, value in values["model"].items():
        assert getattr(model.config, name, value) == value


def test_options_are_the_same_on_the_command_line_as_they_were():
    options = {name for path in RUNS for name in tomllib.loads(path.read_text())["model"]}
    assert options <= set(ModelOptions.__dataclass_fields__)


SMALL = options(
    "hidden_size=16 num_hidden_layers=2 num_attention_heads=2 intermediate_size=32 vocab_size=50"
)
CLASSES = "sequence_classification"
NAMES = dict(enumerate("abc"))
LABELS = {"num_labels": 3, "id2label": NAMES, "label2id": {"a": 0, "b": 1, "c": 2}}


@pytest.fixture
def body(tmp_path):
    """A BERT without a head."""
    config = transformers.BertConfig(**SMALL, max_position_embeddings=24)
    transformers.BertModel(config).save_pretrained(tmp_path)
    return tmp_path


def test_the_body_is_read_bit_for_bit_and_the_head_is_drawn(body):
    start = start_model(body, CLASSES, LABELS)
    saved = load_file(body / "model.safetensors")
    state = start.model.state_dict()
    assert all(torch.equal(state[f"bert.{name}"], tensor) for name, tensor in saved.items())
    assert set(start.new_weights) == {"classifier.weight", "classifier.bias"}
    assert start.model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert start.model.training


def test_another_head_that_was_saved_is_named_as_left_out(tmp_path):
    transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    start = start_model(tmp_path, CLASSES, LABELS)
    assert any(name.startswith("cls.predictions") for name in start.left_out)
    assert all("pooler" in name or "classifier" in name for name in start.new_weights)


def test_a_configuration_alone_gives_random_weights_with_the_vocabulary_of_the_data(body):
    wanted = {**LABELS, "vocab_size": 71, "pad_token_id": 0}
    for source, scratch in ((body / "config.json", False), (body, True)):
        start = start_model(source, CLASSES, wanted, from_scratch=scratch)
        assert start.model.get_input_embeddings().weight.shape == (71, 16)
        assert len(start.new_weights) == len(list(start.model.named_parameters()))


def test_a_tensor_of_the_body_that_is_gone_is_an_error(body):
    path = body / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.layer.0.attention.self.query.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    said = r"lacks bert\.encoder\.layer\.0\..*query\.weight of the body"
    with pytest.raises(CheckpointError, match=said):
        start_model(body, CLASSES, LABELS)


@pytest.mark.parametrize(("entry", "whole"), [("num_labels", False), ("num_hidden_layers", True)])
def test_a_size_without_end_is_refused_beside_weights_without_tensors(body, entry, whole):
    weights = body / "model.safetensors"
    save_file({}, weights) if whole else weights.write_bytes(b"cut")
    with edited(body / "config.json") as config:
        config[entry] = 10**9
    with pytest.raises(CheckpointError, match=f"config.json: {entry} = 1000000000"):
        start_model(body, CLASSES, LABELS)


MISFITS = [
    ("seq2seq_lm", {}, ConfigError, "a bert model has no head for seq2seq lm"),
    ("sequence_pair_classification", {}, ConfigError, "no head 'sequence_pair_class"),
    (CLASSES, {"vocab_size": 51}, ShapeError, r"51 tokens .* embedding 50 rows"),
    (CLASSES, {"max_position_embeddings": 25}, ConfigError, "--max-length 24"),
]


@pytest.mark.parametrize(("kind", "wanted", "error", "message"), MISFITS)
def test_what_does_not_fit_is_refused(body, kind, wanted, error, message):
    with pytest.raises(error, match=message):
        start_model(body, kind, {**LABELS, **wanted} if kind == CLASSES else wanted)


def test_labels_that_differ_need_a_new_head(tmp_path):
    config = transformers.BertConfig(
        **SMALL, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1}
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    with bad_config(match="labels no, yes and the data a, b, c; give --new-head"):
        start_model(tmp_path, CLASSES, LABELS)
    start = start_model(tmp_path, CLASSES, LABELS, new_head=True)
    assert set(start.new_weights) == {"classifier.weight", "classifier.bias"}
    same = {"num_labels": 2, "id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    assert start_model(tmp_path, CLASSES, same).new_weights == ()
