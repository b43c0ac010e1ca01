"""What is saved is what is loaded: in this process, in a fresh one, through the Auto classes, tied
and untied."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.support.tiny import SIZES, options, tiny
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from wellposed.models import (
    WellposedConfig,
    WellposedForCausalLM,
    WellposedForSequenceClassification,
)

IDS = torch.tensor([[3, 1, 4, 1, 5]])
RICH = options("norm=pre residual=rezero qk_norm=True activation=relu pooling=max")


def perturbed(model):
    """No weight keeps the value that a fresh model of the same configuration would have."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"position": "sinusoidal"}, RICH]
)
def test_a_language_model_comes_back(tmp_path, changes):
    model = perturbed(tiny(WellposedForCausalLM, **changes))
    model.save_pretrained(tmp_path)
    loaded, info = WellposedForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert (
        loaded.config.to_diff_dict()
        == WellposedForCausalLM.from_pretrained(tmp_path).config.to_diff_dict()
    )
    assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


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


def test_a_classifier_comes_back_with_its_labels(tmp_path):
    labels = {0: "bad", 1: "fair", 2: "good"}
    config = WellposedConfig(
        **SIZES, **RICH, id2label=labels, label2id={name: i for i, name in labels.items()}
    )
    model = perturbed(WellposedForSequenceClassification(config))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.id2label == labels
    assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_classifier_takes_the_body_of_a_language_model(tmp_path):
    model = perturbed(tiny(WellposedForCausalLM))
    model.save_pretrained(tmp_path)
    states = model.model(input_ids=IDS).last_hidden_state
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    assert torch.equal(classifier.model(input_ids=IDS).last_hidden_state, states)
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(input_ids=IDS).last_hidden_state, states)
    bound = (6 / (12 + 4)) ** 0.5
    assert 0 < classifier.classifier.weight.abs().max() <= bound
    assert not classifier.classifier.bias.any()


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_logits_through_the_auto_classes(tmp_path):
    torch.manual_seed(0)
    language = perturbed(tiny(WellposedForCausalLM, position="sinusoidal"))
    classifier = perturbed(tiny(WellposedForSequenceClassification, num_labels=3))
    language.save_pretrained(tmp_path / "language")
    classifier.save_pretrained(tmp_path / "classifier")
    script = (
        "import sys, torch, wellposed.models\n"
        "from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification\n"
        "folder, ids = sys.argv[1], torch.tensor([[3, 1, 4, 1, 5]])\n"
        "language = AutoModelForCausalLM.from_pretrained(folder + '/language')\n"
        "classifier = AutoModelForSequenceClassification.from_pretrained(folder + '/classifier')\n"
        "torch.save([language(ids).logits, classifier(ids).logits], folder + '/logits.pt')\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, timeout=240
    )
    expected = [language(input_ids=IDS).logits, classifier(input_ids=IDS).logits]
    for received, logits in zip(torch.load(tmp_path / "logits.pt"), expected, strict=True):
        assert torch.equal(received, logits)


def test_the_auto_classes_build_from_a_configuration():
    config = AutoConfig.for_model("wellposed", **SIZES, norm="none")
    assert isinstance(AutoModelForCausalLM.from_config(config), WellposedForCausalLM)
    assert config.norm == "none"


def test_the_vocabulary_can_grow():
    model = perturbed(tiny(WellposedForCausalLM))
    before = model(input_ids=IDS).logits
    model.resize_token_embeddings(20, mean_resizing=False)
    after = model(input_ids=torch.tensor([[3, 1, 4, 1, 19]])).logits
    assert model.config.vocab_size == 20
    assert after.shape == (1, 5, 20)
    assert_close(after[:, :4, :13], before[:, :4], rtol=1e-5, atol=1e-5)
