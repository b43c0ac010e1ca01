"""What is saved is what is loaded, of every family: in this process, in a fresh one, through the Auto
classes, tied and untied."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.support.tiny import SIZES, options, tiny
from tests.support.transject import IDS, MASK, SETTINGS, awake
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from wellposed.models import (
    ARCHITECTURES,
    AutoModelForSequencePairClassification,
    TransJectConfig,
    TransJectForCausalLM,
    TransJectForSequenceClassification,
    TransJectModel,
    WellposedConfig,
    WellposedForCausalLM,
    WellposedForSequenceClassification,
    WellposedForSequencePairClassification,
    build_model,
)
from wellposed.nn import ATTENTIONS

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
    ("lstm", "causal_lm", {}),
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
    given = {"input_ids": IDS, **({} if family == "lstm" else {"attention_mask": MASK})}
    if "pair" in kind:
        given |= {"input_ids_pair": IDS, "attention_mask_pair": MASK}
    assert torch.equal(loaded.eval()(**given)[0], model(**given)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_tying_is_kept(tmp_path, tied):
    model = perturbed(tiny(WellposedForCausalLM, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embeddings.token.weight) == tied
    before = loaded.lm_head.weight.detach().clone()
    with torch.no_grad():
        loaded.model.embeddings.token.weight.add_(1.0)
    assert torch.equal(loaded.lm_head.weight, before) != tied


def test_a_tied_output_layer_of_transject_is_the_embedding():
    model = TransJectForCausalLM(TransJectConfig(**TRANSJECT, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embeddings.token.weight
    free = TransJectForCausalLM(TransJectConfig(**TRANSJECT))
    assert free.lm_head.weight.shape == (13, 16)
    assert 0.1 < float(model(input_ids=IDS).logits.detach().std()) < 4.0


def test_a_classifier_comes_back_with_its_labels(tmp_path):
    labels = {0: "bad", 1: "fair", 2: "good"}
    config = WellposedConfig(
        **SIZES, id2label=labels, label2id={name: i for i, name in labels.items()}
    )
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


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_logits_through_the_auto_classes(tmp_path):
    models = {
        "wellposed": build("wellposed", "causal_lm", {"position": "sinusoidal"}),
        "transject": build("transject", "causal_lm", SETTINGS[0]),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    script = (
        "import sys, torch, wellposed.models\n"
        "from transformers import AutoModelForCausalLM\n"
        "for name in ('wellposed', 'transject'):\n"
        "    model = AutoModelForCausalLM.from_pretrained(f'{sys.argv[1]}/{name}')\n"
        "    found = model(torch.tensor([[3, 1, 4, 1, 5]])).logits, model.state_dict()\n"
        "    torch.save(found, f'{sys.argv[1]}/{name}.pt')\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, timeout=240
    )
    for name, model in models.items():
        logits, weights = torch.load(tmp_path / f"{name}.pt")
        assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
        # The same weights in other places of memory: some CPUs then sum in another order.
        assert_close(logits, model(input_ids=IDS[:1]).logits)


def test_the_auto_classes_build_from_a_configuration():
    config = AutoConfig.for_model("wellposed", **SIZES, norm="none")
    assert isinstance(AutoModelForCausalLM.from_config(config), WellposedForCausalLM)
    pair = AutoModelForSequencePairClassification.from_config(config)
    assert isinstance(pair, WellposedForSequencePairClassification)
    assert config.norm == "none"
    assert {"causal_lm", "sequence_pair_classification"} <= set(
        ARCHITECTURES.get("transject").kinds
    )


def test_the_vocabulary_can_grow():
    model = perturbed(tiny(WellposedForCausalLM))
    before = model(input_ids=IDS[:1]).logits
    model.resize_token_embeddings(20, mean_resizing=False)
    after = model(input_ids=torch.tensor([[3, 1, 4, 1, 19]])).logits
    assert model.config.vocab_size == 20
    assert after.shape == (1, 5, 20)
    assert_close(after[:, :4, :13], before[:, :4], rtol=1e-5, atol=1e-5)
