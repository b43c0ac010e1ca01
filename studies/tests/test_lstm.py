"""The LSTM of Kim et al. (2021): against torch's, its loss, what it refuses, and old run folders."""

import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from wellposed.errors import ConfigError, ShapeError
from wellposed.model_options import ModelOptions
from wellposed.models import build_model, load_saved_model, model_keywords
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.training.config import RunConfig
from wellposed_studies.lstm import LSTMForCausalLM

SIZES = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
RUNS = sorted((Path(__file__).parent / "saved").glob("*lstm.toml"))


def lstm(**more):
    return build_model("lstm", "causal_lm", **SIZES, **more)


def test_logits_are_those_of_torchs_lstm_and_do_not_see_the_future():
    model = lstm().eval()
    assert isinstance(model, LSTMForCausalLM)
    ids = torch.randint(0, 11, (3, 6))
    logits = model(input_ids=ids).logits
    states, _ = model.lstm(model.token.weight[ids])
    assert torch.allclose(logits, states @ model.lm_head.weight.T, atol=1e-6)
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    assert torch.equal(model(input_ids=changed).logits[:, :4], logits[:, :4])


def test_loss_is_the_shifted_cross_entropy_and_trains_every_weight():
    model = lstm(tie_word_embeddings=False)
    ids = torch.randint(0, 11, (3, 6))
    output = model(input_ids=ids, labels=ids)
    logits = output.logits[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()
    assert torch.allclose(output.loss, torch.nn.functional.cross_entropy(logits, labels))
    output.loss.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(30)).loss
    assert torch.allclose(2 * loss, output.loss)


def test_what_it_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"(?s)attention: received 'l2'.*norm: received 'pre'"):
        lstm(attention="l2", norm="pre")
    with pytest.raises(ConfigError, match="num_hidden_layers = 0"):
        build_model("lstm", "causal_lm", **{**SIZES, "num_hidden_layers": 0})
    with pytest.raises(ConfigError, match="kind of lstm model"):
        build_model("lstm", "sequence_classification", **SIZES)
    with pytest.raises(ShapeError, match="expected it on the right"):
        lstm()(torch.ones(1, 3, dtype=torch.long), torch.tensor([[0, 1, 1]]))


def test_a_saved_model_comes_back(tmp_path):
    model = lstm().eval()
    ids = torch.randint(0, 11, (3, 6))
    model.save_pretrained(tmp_path)
    for load in (load_saved_model, AutoModelForCausalLM.from_pretrained):
        assert torch.equal(load(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_configuration_of_an_old_run_makes_its_model(path):
    values = tomllib.loads(path.read_text())
    config = RunConfig.from_dict(values, where=str(path))
    model = build_model("lstm", "causal_lm", vocab_size=5, **model_keywords(config.model))
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "dropout"):
        assert getattr(model.config, name) == values["model"][name]


def test_the_variant_has_the_sizes_of_the_baseline():
    model = ModelOptions(hidden_size=9, num_attention_heads=3, norm="pre", qk_norm=True)
    options = apply_variant("lstm", RunConfig("char_lm", model=model)).model
    assert options == ModelOptions(architecture="lstm", hidden_size=9, num_attention_heads=3)
