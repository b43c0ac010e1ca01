"""The real uploads and downloads of transformers and huggingface_hub, against a hub on 127.0.0.1."""

import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from tests.support.local_hub import Hub
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import wellposed as wp
from wellposed.errors import ConfigError
from wellposed.models import WellposedConfig, WellposedForCausalLM, model_card

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
BERT = BertConfig(**SMALL, intermediate_size=16, vocab_size=12)


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BERT).eval()


def capped(model, **options):
    return wp.constrain_(model, torch.optim.SGD(model.parameters(), 0.1), **options)


def test_the_card_has_sets_sizes_errors_and_how_to_load():
    model = bert()
    query = capped(model, where=("query", "key"), to="orthogonal", gain=0.5)
    rest = capped(model, where=("feedforward_in",), to="spectral", bound=2.0)
    text = model_card(model, "me/capped", constraints=[query, rest])
    assert "| orthogonal | 0.5 | 2: `bert.encoder.layer.0.attention.self.query.weight`" in text
    assert "| spectral | 2 | 1: `bert.encoder.layer.0.intermediate.dense.weight` | 0 |" in text
    assert f"{query.error().worst:.2g} |" in text
    assert "no Lipschitz bound of the model" in text
    assert "No Lipschitz bound comes with this model." in text
    assert 'AutoModelForSequenceClassification.from_pretrained("me/capped")' in text
    assert f"made with: wellposed {wp.__version__}, transformers" in text
    card = ModelCard(text)
    assert card.data.tags == ["wellposed"]
    assert card.data.library_name == "transformers"


def test_the_card_has_what_is_certified_and_what_is_not():
    sizes = {**SMALL, "vocab_size": 9, "max_position_embeddings": 8}
    model = WellposedForCausalLM(WellposedConfig(**sizes, norm="none", attention="l2_tied")).eval()
    certificate = wp.certify(model, seq_len=8)
    text = model_card(model, "me/mine", certificate=certificate)
    assert (
        f"Lipschitz bound {certificate.total:.4g} (certified): norm tok, at most 8 tokens" in text
    )
    assert "Not certified: rounding of the forward pass" in text
    assert 'load_saved_model("me/mine")' in text
    plain = WellposedForCausalLM(WellposedConfig(**sizes, norm="none")).eval()
    text = model_card(plain, "me/mine", certificate=wp.certify(plain, seq_len=8))
    assert "No Lipschitz bound: none is known for `model.layers.0.attention`" in text


def test_cards_of_models_with_changes_load_by_our_loader():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9))
    wp.t_fixup_(gpt2)
    text = model_card(gpt2, "me/fixed")
    assert 'load_saved_model("me/fixed")' in text
    assert "A plain `from_pretrained` gives another model" in text
    attending = bert()
    wp.integrations.set_attention_(attending, "wellposed_l2")
    text = model_card(attending, "me/l2")
    assert "- attention: `wellposed_l2` instead of dot-product attention" in text
    assert 'load_saved_model("me/l2")' in text


def test_the_text_and_header_of_an_author_stay_and_our_part_is_replaced():
    model = bert()
    mine = "---\nlicense: mit\ntags: [films]\n---\n# Films\n\nBy me.\n"
    first = model_card(model, "me/films", before=mine)
    handle = capped(model, to="columns", where=("query",))
    second = model_card(model, "me/films", before=f"{first}\nMore by me.\n", constraints=handle)
    card = ModelCard(second)
    assert card.data.license == "mit"
    assert card.data.tags == ["films", "wellposed"]
    assert second.count("By me.") == second.count("More by me.") == 1
    assert second.count("## Constraints") == 1
    assert "| columns | 1 | 1:" in second


def test_refusals():
    model = bert()
    with pytest.raises(ConfigError, match="expected a model of transformers"):
        model_card(nn.Linear(2, 2), "a/b")
    handle = capped(bert(), to="columns", where=("query",))
    with pytest.raises(ConfigError, match="another model than this Bert"):
        model_card(model, "a/b", constraints=handle)
    layer = bert().classifier.eval()
    certificate = wp.certify(layer, seq_len=4)
    with pytest.raises(ConfigError, match="is of other weights"):
        model_card(model, "a/b", certificate=certificate)


PUSH = """
import copy, sys, torch, transformers as hf, wellposed as wp
from tokenizers import Tokenizer, models, pre_tokenizers
from wellposed.models import WellposedConfig, WellposedForCausalLM, load_saved_model, push_to_hub
from wellposed.words import WordCertificate, read_in_windows

torch.manual_seed(0)
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 12}
words = dict.fromkeys(["[PAD]", "[UNK]", *"they win the late goal bank oil prices".split()])
inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")
ids = torch.arange(2, 8)[None]


def bert():
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL, intermediate_size=16)).eval()


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = wp.constrain_(model, optimizer, where=("query", "key"), to=sys.argv[1])
    model(ids).logits.square().mean().backward()
    optimizer.step()
    return handle


def same(model, again, batch):
    for weight, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other)
    # Copies lie in memory alike: where a file is mapped to, kernels may round otherwise.
    first, second = (copy.deepcopy(one).eval()(**batch).logits for one in (model, again))
    assert torch.equal(first, second)


constrained = bert()
handle = step(constrained)
if sys.argv[1] == "orthogonal":
    constrained.push_to_hub("me/plain")  # the call of transformers alone
    same(constrained, hf.AutoModelForSequenceClassification.from_pretrained("me/plain"), {"input_ids": ids})
url = push_to_hub(constrained, "me/capped", tokenizer=tokenizer, constraints=handle, private=True)
assert url.endswith("/commit/" + "0" * 40), url
push_to_hub(constrained, "me/capped", constraints=handle, commit_message="again")
again = hf.AutoModelForSequenceClassification.from_pretrained("me/capped")
same(constrained, again, {"input_ids": ids})
assert hf.AutoTokenizer.from_pretrained("me/capped").get_vocab() == tokenizer.get_vocab()

ours = WellposedForCausalLM(WellposedConfig(**SMALL, norm="none", attention="l2_tied")).eval()
push_to_hub(ours, "me/ours", certificate=wp.certify(ours, seq_len=4))
same(ours, load_saved_model("me/ours"), {"input_ids": ids})
if sys.argv[1] == "orthogonal":
    ours.push_to_hub("me/ours-plain")
    same(ours, load_saved_model("me/ours-plain"), {"input_ids": ids})

windows = read_in_windows(bert(), tokenizer, ["they win the late goal", "oil prices"], words=1).eval()
batch = tokenizer.pad(
    {"input_ids": WordCertificate(windows, tokenizer).encode(["win the goal"])}, return_tensors="pt"
)
push_to_hub(windows, "me/windows", tokenizer=tokenizer)
batch = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
same(windows, load_saved_model("me/windows"), batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
def test_uploads_load_again_to_the_same_numbers(to, tmp_path):
    with Hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HOME": str(tmp_path), "HF_TOKEN": "hf_local", "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-c", PUSH, to]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        files = hub.files
        titles = [title for name, title in hub.commits if name == "me/capped"]
    assert titles == ["Upload model, with its card", "again"]
    assert hub.private["me/capped"] is True
    card = files["me/capped"]["README.md"].decode()
    assert card.count("<!-- wellposed: begin -->") == 1
    assert f"| {to} | 1 | 2: `bert.encoder.layer.0.attention.self.query.weight`" in card
    assert 'from_pretrained("me/capped")' in card
    assert "Lipschitz bound" in files["me/ours"]["README.md"].decode()
    windows = files["me/windows"]["README.md"].decode()
    assert "Certified: answers to replaced words" in windows
    assert "WordCertificate(model, tokenizer).encode(texts)" in windows
