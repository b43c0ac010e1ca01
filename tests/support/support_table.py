"""What every verb does with a small random model of each family: tried, and written as a table."""

import contextlib
import io
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model

import wellposed as wp
from wellposed.errors import WellposedError
from wellposed.integrations import set_attention_
from wellposed.models import quiet_transformers
from wellposed_lab.cli.main import main
from wellposed_lab.tasks.task import TASKS

from . import hugging_face as hf
from .images import write_images
from .tokenizer_folders import bert_words, byte_level_bpe, word_level

WIDTH, TOKENS = 16, 6
WORDS = ("good", "bad", *(f"w{number}" for number in range(10)))
SEQ2SEQ = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
POSITIONS = {"max_position_embeddings": 32}


@dataclass(frozen=True)
class Family:
    """A model with the head of a task, and a part of the command's words for that task."""

    auto: Any
    config: Callable[[], transformers.PreTrainedConfig]
    task: str
    words: str = ""


CLASSIFY = ("text_classification", "--data {data}/labels.tsv --max-length 8")
CONTINUE = ("language_modeling", "--data {data}/text.txt --seq-len 8")
TRANSLATE = ("translation", "--data {data}/pairs.tsv --src de --tgt en --max-tokens 8")
IMAGES = ("image_classification", "--data {data}/images")
ENCODER = transformers.AutoModelForSequenceClassification
DECODER = transformers.AutoModelForCausalLM
SEQUENCES, PIXELS = transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForImageClassification


def _gated(kind):
    return lambda: hf.like(kind, hf.llama_config(WIDTH, vocab_size=300, **POSITIONS))


def _bart(kind, **options):
    sizes = {**SEQ2SEQ, **POSITIONS, "vocab_size": 16, "forced_eos_token_id": None}
    return hf.like(kind, hf.bart_config(WIDTH), **sizes, **options)


FAMILIES = {
    "BERT": Family(ENCODER, lambda: hf.bert_config(WIDTH, vocab_size=16, num_labels=2, **POSITIONS), *CLASSIFY),
    "RoBERTa": Family(
        ENCODER, lambda: hf.roberta_config(WIDTH, vocab_size=16, num_labels=2, max_position_embeddings=33), *CLASSIFY
    ),
    "DistilBERT": Family(
        ENCODER, lambda: hf.distilbert_config(WIDTH, vocab_size=16, num_labels=2, **POSITIONS), *CLASSIFY
    ),
    "GPT-2": Family(DECODER, lambda: hf.gpt2_config(WIDTH, vocab_size=300, n_positions=32), *CONTINUE),
    "Llama": Family(DECODER, _gated(transformers.LlamaConfig), *CONTINUE),
    "Mistral": Family(DECODER, _gated(transformers.MistralConfig), *CONTINUE),
    "Qwen2": Family(DECODER, _gated(transformers.Qwen2Config), *CONTINUE),
    "Phi-3": Family(DECODER, _gated(transformers.Phi3Config), *CONTINUE),
    "ViT": Family(
        PIXELS, lambda: hf.vit_config(WIDTH, image_size=32, patch_size=8, num_channels=3, num_labels=4), *IMAGES
    ),
    "T5": Family(SEQUENCES, lambda: hf.t5_config(WIDTH, **{**SEQ2SEQ, "vocab_size": 16}), *TRANSLATE),
    "BART": Family(SEQUENCES, lambda: _bart(transformers.BartConfig), *TRANSLATE),
    "Marian": Family(SEQUENCES, lambda: _bart(transformers.MarianConfig, decoder_vocab_size=16), *TRANSLATE),
}  # fmt: skip
"""Two layers, 16 wide, as the library initialises them."""


class RefusedError(Exception):
    """The command ended with this message."""


def build(family):
    """Return the model of a family, in eval mode, the same at each call."""
    torch.manual_seed(0)
    described = FAMILIES[family]
    with quiet_transformers():
        return described.auto.from_config(described.config()).eval()


def batch(family):
    """Return two inputs that the model of a family takes."""
    described = FAMILIES[family]
    torch.manual_seed(1)
    if described.auto is PIXELS:
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids = torch.randint(4, 16, (2, TOKENS))
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return tokens | ({"decoder_input_ids": ids[:, :4]} if described.auto is SEQUENCES else {})


def _penalize(family):
    model = build(family)
    penalty = wp.OrthogonalityPenalty(model, affinity=1.0, attention=1.0, feedforward=1.0)
    value = model(**batch(family)).logits.square().mean() * 0 + penalty()
    value.backward()
    assert value.item() > 0
    assert any(weight.grad is not None and weight.grad.any() for weight in model.parameters())


def _constrain(family):
    model = build(family)
    optimizer = torch.optim.AdamW(wp.parameter_groups(model, 0.01, roles=("query", "key")), lr=1e-2)
    handle = wp.constrain_(model, optimizer, roles=("query", "key"))
    model(**batch(family)).logits.square().mean().backward()
    optimizer.step()
    assert handle.error().worst < 1e-5


def _measure(family):
    model = build(family)
    rows = wp.measure(model, batch(family)).table()
    assert all(role in rows for role in ("query", "key", "value", "feedforward_in"))


def _certify(family):
    model = build(family)
    certificate = wp.certify(model, seq_len=TOKENS, cross_check=False)
    if certificate.label == "uncertified":
        certificate = wp.certify(model, seq_len=TOKENS, radius=1.0, cross_check=False)
    if certificate.label == "uncertified":
        raise RefusedError(certificate.uncertified[0].reason)


def _plug(family):
    model, given = build(family), batch(family)
    with torch.no_grad():
        before = model(**given).logits
        set_attention_(model, "wellposed_l2")
        after = model(**given).logits
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)


def _lora(family):
    model = get_peft_model(build(family), LoraConfig(r=2, target_modules="all-linear"))
    wp.OrthogonalityPenalty(model, query=1.0, key=1.0, form="paper")().backward()
    named = model.named_parameters()
    grown = {name for name, weight in named if weight.grad is not None and weight.grad.any()}
    assert grown
    assert all("lora_" in name for name in grown)


def _t_fixup(family):
    model = build(family)
    wp.t_fixup_(model)
    assert torch.isfinite(model(**batch(family)).logits).all()


def _train(family):
    described = FAMILIES[family]
    with _files(family) as (folder, data):
        once = "--steps 1 --epochs None --batch-size 4 --variant key:1e-2 --quiet"
        words = f"train {described.task} --from {folder} {described.words} {once} --out {data}/run"
        _command(*words.format(data=data).split())
        assert (data / "run" / "final" / "README.md").is_file()


def _predict(family):
    with _files(family) as (folder, data):
        if FAMILIES[family].auto is PIXELS:
            from PIL import Image

            Image.new("RGB", (32, 32)).save(data / "image.png")
            given = ["--input", str(data / "image.png")]
        else:
            more = ["--max-new-tokens", "3"] if FAMILIES[family].auto is DECODER else []
            given = ["--text", "w1 good", *more]
        assert _command("predict", str(folder), *given).strip()


VERBS = {
    "train --from": _train,
    "penalize": _penalize,
    "constrain": _constrain,
    "measure": _measure,
    "certify": _certify,
    "L2 attention": _plug,
    "LoRA": _lora,
    "T-Fixup": _t_fixup,
    "predict": _predict,
}


def _command(*words):
    """Run the command and return what it printed."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        status = main(words)
    if status:
        raise RefusedError(complained.getvalue().strip().removeprefix("wellposed: "))
    return said.getvalue()


@contextlib.contextmanager
def _files(family):
    """Yield a folder with the model of a family and its tokenizer, and one with data for every
    task."""
    described = FAMILIES[family]
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name) / "model", Path(name) / "data"
        data.mkdir()
        with quiet_transformers():
            build(family).save_pretrained(folder)
        if described.auto is not PIXELS:
            _tokenizer(described).save_pretrained(folder)
        elif described.task in TASKS:
            transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
        rows = [f"{word}\tw{number % 7} {word}" for number in range(30) for word in ("bad", "good")]
        pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32), np.uint8)
        write_images(data / "images", pixels, "abcd" * 10)
        (data / "labels.tsv").write_text("label\ttext\n" + "\n".join(rows) + "\n")
        (data / "text.txt").write_text(" ".join(WORDS * 40))
        pairs = [f"w{number % 7} good\tbad w{number % 5}" for number in range(60)]
        (data / "pairs.tsv").write_text("de\ten\n" + "\n".join(pairs) + "\n")
        yield folder, data


def _tokenizer(described):
    if described.auto is ENCODER:
        return bert_words(WORDS)
    if described.auto is DECODER:
        return byte_level_bpe(WORDS)
    ends = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    return word_level(WORDS, "$A </s>", **ends)


def cell(family, verb):
    """Try a verb on the model of a family: "yes", or the reason why not from what it says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            VERBS[verb](family)
    except (RefusedError, WellposedError) as error:
        return _reason(str(error))
    return "yes"


def _reason(message):
    """Return the first statement of a refusal, without paths of this machine."""
    first = re.sub(r"^(\S*/(model|data)\b|\w+): ", "", message.splitlines()[0])
    return re.split(r"; |:$", first)[0].rstrip(".")


def row(family):
    """Return the cells of a family in the order of `VERBS`."""
    return [cell(family, verb) for verb in VERBS]


def table(rows):
    """Return rows as Markdown: yes, or the number of the reason below the table."""
    every = dict.fromkeys(cell for cells in rows.values() for cell in cells)
    reasons = [cell for cell in every if cell != "yes"]
    marks = {"yes": "yes", **{reason: f"no ({number})" for number, reason in enumerate(reasons, 1)}}
    lines = [["family", *(f"`{verb}`" for verb in VERBS)]]
    lines += [[family, *(marks[cell] for cell in cells)] for family, cells in rows.items()]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    notes = ["", *notes] if notes else []
    return "\n".join([head, "|" + "---|" * (1 + len(VERBS)), *body, *notes])


def read_table(text):
    """Return the rows that a `table` was made of."""
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    lines = [line.strip("|").split("|") for line in text.splitlines() if line[:1] == "|"]
    reasons = {f"no ({number})": reason for number, reason in reasons.items()}
    rows = [list(map(str.strip, parts)) for parts in lines[2:]]
    return {name: [reasons.get(found, found) for found in marks] for name, *marks in rows}
