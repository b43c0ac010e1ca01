"""Loading restores L2 and cosine attention, however saved; a message names what files cannot
store."""

import json
import logging
import subprocess
import sys

import peft
import pytest
import torch
import transformers as hf

import wellposed as wp
from wellposed.errors import CheckpointError
from wellposed.models import load_saved_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
L2 = "wellposed_l2"
COSINE = "wellposed_cosine"
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}
SIZES |= {"intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PICTURES = {**SIZES, "image_size": 8, "patch_size": 4}
IDS = {"input_ids": torch.arange(3, 9)[None]}
TWICE = {**IDS, "decoder_input_ids": IDS["input_ids"]}
BOTH = {**IDS, "pixel_values": torch.linspace(-1, 1, 192).view(1, 3, 8, 8)}


def bert():
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 32}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, vocab_size=30))


def clip():
    parts = {"text_config": {**SIZES, "max_position_embeddings": 16}, "vision_config": PICTURES}
    return hf.CLIPModel(hf.CLIPConfig(**parts, projection_dim=8))


def llava():
    parts = {
        "text_config": hf.LlamaConfig(**SIZES),
        "vision_config": hf.CLIPVisionConfig(**PICTURES),
    }
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(**parts, image_token_index=29))


def pair():
    both = (hf.BertConfig(**SIZES), hf.BertConfig(**SIZES))
    return hf.EncoderDecoderModel(hf.EncoderDecoderConfig.from_encoder_decoder_configs(*both))


def built(name):
    config = hf.BertConfig(**SIZES)
    return hf.AutoModelForSequenceClassification.from_config(config, attn_implementation=name)


def adapted():
    model = peft.get_peft_model(built(L2), peft.LoraConfig(target_modules=["query"]))
    torch.nn.init.normal_(
        model.base_model.model.bert.encoder.layer[0].attention.self.query.lora_B.default.weight
    )
    return model.merge_and_unload()  # fmt: skip


def noted_by_an_older_version():
    model = built("sdpa")
    model.config.wellposed = {"attention": L2}
    return model  # and set to dot products since


SET = {
    "when built": (lambda: built(L2), IDS, None),
    "later": (bert, IDS, lambda model: model.set_attn_implementation(COSINE)),
    "by us": (bert, IDS, lambda model: wp.integrations.set_attention_(model, L2)),
    "and taken back": (lambda: built(L2), IDS, lambda model: model.set_attn_implementation("sdpa")),
    "in a stale note": (noted_by_an_older_version, IDS, None),
    "below an adapter that was merged": (adapted, IDS, None),
    "in all of an encoder-decoder": (t5, TWICE, lambda model: model.set_attn_implementation(L2)),
    "in one of two models": (pair, TWICE, lambda m: m.set_attn_implementation({"decoder": L2})),
    "in a part of two": (clip, BOTH, lambda model: model.vision_model.set_attn_implementation(L2)),
    "in every part another": (
        clip, BOTH, lambda m: m.set_attn_implementation({"": L2, "text_config": COSINE, "vision_config": "eager"}),
    ),
    "in the text of pictures": (llava, IDS, lambda m: m.set_attn_implementation({"text_config": L2})),
}  # fmt: skip
SAVED = {
    "model": lambda model, folder: model.save_pretrained(folder),
    "trainer": lambda model, folder: hf.Trainer(
        model, hf.TrainingArguments(str(folder), report_to=[], use_cpu=True)
    ).save_model(),
    "by hand": lambda model, folder: (
        hf.AutoConfig.for_model(**model.config.to_dict()).save_pretrained(folder),
        model.save_pretrained(folder / "weights"),
        (folder / "weights" / "model.safetensors").rename(folder / "model.safetensors"),
    ),
}
LOADED = {
    "load_saved_model": lambda model, folder: load_saved_model(folder),
    "its class": lambda model, folder: type(model).from_pretrained(folder),
    "again": lambda model, folder: again(type(model).from_pretrained(folder), folder / "again"),
}


def close(actual, expected):
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


def again(model, folder):
    model.save_pretrained(folder)
    return load_saved_model(folder)


@pytest.mark.parametrize("way", SET)
def test_the_attention_that_was_saved_comes_back(way, tmp_path):
    build, inputs, change = SET[way]
    torch.manual_seed(0)
    model = build().eval()
    if change:
        change(model)
    for weight in model.parameters():  # far from uniform
        weight.data *= 8 if weight.ndim == 2 else 1
    before = model(**inputs)[0]
    for saver, save in SAVED.items():
        save(model, tmp_path / saver)
        for loader, load in LOADED.items():
            loaded = load(model, tmp_path / saver).eval()
            assert close(loaded(**inputs)[0], before), (saver, loader)
    plain = type(model).from_pretrained(tmp_path / "model", attn_implementation="sdpa").eval()
    taken_back = way in ("and taken back", "in a stale note")
    assert close(plain(**inputs)[0], before) == taken_back


@pytest.mark.slow
def test_without_the_adapters_the_name_is_refused_and_may_be_overruled(tmp_path):
    built(L2).save_pretrained(tmp_path)
    load = "import wellposed, transformers as t\n"
    load += f"load = lambda **options: t.AutoModel.from_pretrained({str(tmp_path)!r}, **options)\n"
    load += "load(attn_implementation='sdpa')\nprint('loaded')\nload()"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert done.stdout == "loaded\n"
    assert 'attn_implementation="wellposed_l2"` is not supported' in done.stderr


def test_what_files_cannot_carry_is_said_and_not_loaded(tmp_path, caplog):
    encoder = t5()
    adapter = built(L2)
    inside = built(L2)
    encoder.encoder.set_attn_implementation(L2)
    adapter = peft.get_peft_model(adapter, peft.LoraConfig(target_modules=["query"]))
    inside.add_adapter(peft.LoraConfig(target_modules=["query"]))
    for model, message in (
        (encoder, "encoder: wellposed_l2"),
        (adapter, L2),
        (inside, L2),
        (bert(), ""),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model.save_pretrained(tmp_path / type(model).__name__)
        assert ("do not carry the attention of" in caplog.text) == bool(message)
        assert message in caplog.text
    with pytest.raises(CheckpointError, match="contains an adapter without its model"):
        load_saved_model(tmp_path / type(adapter).__name__)


def test_a_note_of_an_older_version_is_read(tmp_path):
    model = bert()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "wellposed": {"attention": L2}}))
    assert load_saved_model(tmp_path).config._attn_implementation == L2
