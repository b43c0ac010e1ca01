"""Norms that were removed stay out, and another attention stays, when a model is saved and loaded
again."""

import json

import pytest
import torch
import transformers
from tests.support.tiny import options
from transformers import AutoModelForSequenceClassification, BertConfig, GPT2Config

import wellposed as wp
from wellposed.errors import CheckpointError
from wellposed.models import load_saved_model, start_model

IDS = torch.randint(0, 40, (3, 11), generator=torch.Generator().manual_seed(0))


def gpt2():
    sizes = options("n_layer=2 n_embd=16 n_head=2 vocab_size=40 bos_token_id=0 eos_token_id=0")
    return transformers.GPT2LMHeadModel(GPT2Config(**sizes))


def bert():
    sizes = options("hidden_size=16 num_hidden_layers=2 num_attention_heads=2 intermediate_size=32")
    return transformers.BertForSequenceClassification(BertConfig(vocab_size=40, **sizes))


def t5():
    sizes = options("d_model=16 d_kv=8 d_ff=32 num_layers=2 num_heads=2 decoder_start_token_id=0")
    config = transformers.T5Config(vocab_size=40, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def logits(model):
    inputs = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **inputs).logits


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_models_without_norms_load_without_norms(make, tmp_path):
    model = make()
    removed = wp.t_fixup_(model).norms_removed
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["wellposed"] == {
        "removed_norms": list(removed)
    }
    loaded = load_saved_model(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert [name for name, _ in loaded.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
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
        states = [
            each.bert(input_ids=IDS).last_hidden_state
            for each in (start.model.eval(), model.eval())
        ]
        assert torch.equal(*states)


@pytest.mark.parametrize("name", ["wellposed_l2", "wellposed_cosine"])
def test_another_attention_is_loaded_again(name, tmp_path):
    model = bert()
    before = logits(model)
    wp.integrations.set_attention_(model, name)
    loaded = _saved_and_loaded(model, tmp_path)
    assert loaded.config._attn_implementation == name
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(before, logits(model))
    assert torch.equal(logits(AutoModelForSequenceClassification.from_pretrained(tmp_path)), before)


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
