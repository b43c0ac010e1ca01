"""A folder from elsewhere with one odd file: one line of ours that names it, before anything is read."""

import json
import os

import pytest
import torch
import transformers as hf
from tests.support.edited import edited

from wellposed.errors import CheckpointError
from wellposed.models import load_pretrained, load_saved_model
from wellposed_lab.tasks.text.tokenizers import WordEncoder, load_tokenizer

INDEX = "model.safetensors.index.json"
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}


@pytest.fixture
def folder(tmp_path):
    config = hf.BertConfig(**SIZES, intermediate_size=8)
    hf.BertForSequenceClassification(config).save_pretrained(tmp_path / "m", max_shard_size="1KB")
    WordEncoder(["a", "b"]).tokenizer(max_length=8).save_pretrained(tmp_path / "m")
    (tmp_path / "outside.safetensors").write_bytes(b"of the user")
    return tmp_path / "m"


def shard(make):
    """Let the index name a file that ``make`` makes or names."""

    def harm(folder):
        with edited(folder / INDEX) as index:
            index["weight_map"]["classifier.bias"] = (
                make(folder / "odd.safetensors") or "odd.safetensors"
            )

    return harm


def value(file, **values):
    def harm(folder):
        path = folder / file
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **values}))

    return harm


def special(file, make):
    def harm(folder):
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return harm


def zero(path):
    path.symlink_to("/dev/zero")


OUT = "points outside the folder"
HARMS = {
    "index: a device": (shard(lambda _: "/dev/zero"), OUT),
    "index: above": (shard(lambda _: "../outside.safetensors"), OUT),
    "index: below": (shard(lambda _: "x/../../outside.safetensors"), OUT),
    "index: a null byte": (shard(lambda _: "a\0b"), OUT),
    "index: a pickle": (shard(lambda _: "odd.bin"), "is a pickle"),
    "index: a link to a device": (shard(zero), "is not a file of this folder"),
    "index: a pipe": (shard(os.mkfifo), "is not a file of this folder"),
    "index: a link outside": (
        shard(lambda path: path.symlink_to("../outside.safetensors")), "is not a file of this folder",
    ),
    "index: a number": (value(INDEX, weight_map={"classifier.bias": 7}), "cannot be loaded"),
    "index: a list": (value(INDEX, weight_map=[1]), "cannot be loaded"),
    "weights above": (value("config.json", transformers_weights="../outside.safetensors"), OUT),
    "weights pickled": (value("config.json", transformers_weights="a.bin"), "is a pickle"),
    "tokens above": (value("tokenizer_config.json", fast_tokenizer_files=["../tokenizer.1.json"]), OUT),
    **{f"{file} is a pipe": (special(file, os.mkfifo), f"{file}: is a pipe") for file in (
        "config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "generation_config.json", "adapter_model.safetensors", "vocab.txt")},
    "tokens without end": (special("tokenizer.json", zero), "tokenizer.json: is a pipe or a device"),
    "an adapter": (value("adapter_config.json", base_model_name_or_path="/"), "contains an adapter"),
    **{f"{file}: half a character": (value(file, x=["\ud800"]), f"{file}: contains text that")
       for file in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")},
    **{f"architectures = {odd!r}": (value("config.json", architectures=odd), "class names")
       for odd in ([True], True, {"a": 1}, [None], "x", [[]])},
    **{f"id2label = {odd!r}": (value("config.json", id2label=odd), "label names by number")
       for odd in ({"0": 1}, {"0": None}, {"0": {}}, ["a"], "x", 7)},
    "label2id": (value("config.json", label2id=7), "label numbers by name"),
    "chunks": (value("config.json", chunk_size_feed_forward="\n"), "expected a number"),
    **{f"kernels {odd!r}": (value("config.json", **odd), "runs code from the hub") for odd in (
        {"attn_implementation": "evil/kernel"}, {"attn_implementation": {"": "a/b:c"}},
        {"text_config": {"experts_implementation": "a/b"}})},
    "attention": (value("config.json", attn_implementation="x"), "cannot be loaded"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMS)
def test_an_odd_file_is_one_line_that_names_it(name, folder):
    harm, message = HARMS[name]
    harm(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        tuple(load(str(folder)) for load in (load_saved_model, load_tokenizer))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_panics_is_refused(folder):
    with edited(folder / "tokenizer.json") as tokens:
        single = [
            {"SpecialToken": {"id": "[X]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        tokens["post_processor"] = {
            "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {},
        }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"tokenizer fails on a text|cannot be loaded"):
        load_tokenizer(str(folder))


def test_what_loads_loads_as_before(folder, tmp_path):
    """Links into the hub's cache, a weight file that is a link, pickles beside safetensors."""
    original = load_saved_model(folder)
    cached = tmp_path / "hub" / "snapshots" / "0"
    blobs = tmp_path / "hub" / "blobs"
    cached.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (cached / path.name).symlink_to(f"../../blobs/{number}")
    torch.save({}, cached / "pytorch_model-1.bin")
    shards = {"weight_map": {"classifier.bias": "pytorch_model-1.bin"}}
    (cached / "pytorch_model.bin.index.json").write_text(json.dumps(shards))
    for name, weight in load_saved_model(cached).state_dict().items():
        assert torch.equal(weight, original.state_dict()[name])
    assert (
        load_pretrained(hf.AutoTokenizer, cached).get_vocab()
        == load_tokenizer(str(folder)).get_vocab()
    )
