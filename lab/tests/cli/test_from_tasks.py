"""`train --from` on every task that a Hugging Face model has a head for, and `predict` with what it
leaves."""

import itertools
import json
import math
import random

import pytest
import torch
import transformers
from tests.support.bert import make_checkpoint, make_table
from tests.support.images import draw_squares, image_config
from tests.support.tokenizer_folders import bert_words, byte_level_bpe, word_level
from tests.support.words import SMALLEST, succeed
from tests.support.words import words as typed

from wellposed_lab.tasks.task import build_task

pytestmark = pytest.mark.slow  # the whole table

THINGS = itertools.product(("red", "green"), ("cat", "hat"), "ab")
LINES = [f"the {colour} {thing} is {size}" for colour, thing, size in THINGS]


def results(run):
    (metrics,) = json.loads((run / "result.json").read_text())["results"].values()
    return metrics


def gpt2_folder(folder):
    tokenizer = byte_level_bpe(LINES)
    tokenizer.save_pretrained(folder)
    sizes = dict(n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    config = transformers.GPT2Config(vocab_size=len(tokenizer), **sizes)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_a_gpt2_goes_on_learning_a_text_and_continues_one(tmp_path, cli):
    source = gpt2_folder(tmp_path / "gpt2")
    run = tmp_path / "run"
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LINES * 30), encoding="utf-8")
    words = typed("train language_modeling --from", [source], "--data", [text], "--seq-len 32")
    succeed(words, "--epochs 12 --batch-size 8 --learning-rate 1e-2 --out", [run], "--quiet")
    metrics = results(run)
    options = {"data": str(text), "seq_len": 32, "tokenizer": f"hf:{source}"}
    task = build_task("language_modeling", options)
    assert 0 < metrics["bits_per_byte,valid"] < task.reference()["bits_per_byte"]
    nats = metrics["nats_per_token,valid"]
    assert metrics["perplexity,valid"] == pytest.approx(math.exp(nats))
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "final")
    assert type(model).__name__ == "GPT2LMHeadModel"
    output = cli("predict", [run], "--text", ["the red"], "--max-new-tokens 4 --temperature 0").out
    assert output.startswith("the red")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Phi3"])
def test_a_gated_decoder_goes_on_learning_a_text_and_continues_one(family, tmp_path, cli):
    source = tmp_path / "model"
    run = tmp_path / "run"
    text = tmp_path / "text.txt"
    tokenizer = byte_level_bpe(LINES)
    tokenizer.save_pretrained(source)
    sizes = dict(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=32,
        pad_token_id=0,
    )
    config = getattr(transformers, f"{family}Config")(vocab_size=len(tokenizer), **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
    text.write_text("\n".join(LINES * 30), encoding="utf-8")
    words = typed("train language_modeling --from", [source], "--data", [text], "--seq-len 16")
    succeed(words, "--steps 2 --epochs None --batch-size 4 --quiet --variant key:1e-2 --out", [run])
    assert (run / "final" / "README.md").is_file()
    assert cli("predict", [run], "--text", ["the red"], "--max-new-tokens 2").out[:7] == "the red"


WORDS = [f"w{number}" for number in range(12)]
SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
SIZES["max_position_embeddings"] = 32


def pair_table(path):
    """Pairs that are the same when they begin with the same word."""
    draw = random.Random(0)
    rows = ["sentence1\tsentence2\tis_duplicate"]
    for _ in range(120):
        first = draw.choice(WORDS[:2])
        second = draw.choice(WORDS[:2])
        ends = (draw.choice(WORDS), draw.choice(WORDS))
        same = ["no", "yes"][first == second]
        rows.append(f"{first} {ends[0]}\t{second} {ends[1]}\t{same}")
    path.write_text("\n".join(rows) + "\n")
    return path


def encoder_folder(folder):
    tokenizer = bert_words(WORDS)
    tokenizer.save_pretrained(folder)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=len(tokenizer)))
    model.save_pretrained(folder)
    return folder


def test_two_columns_are_no_pair(tmp_path, cli):
    source = encoder_folder(tmp_path / "bert")
    table = pair_table(tmp_path / "pairs.tsv")
    words = typed("train text_classification --max-length 12 --from", [source], "--data", [table])
    words += typed("--text-column sentence1,sentence2 --label-column is_duplicate")
    assert "join the two columns" in cli(words, status=2).err


def seq2seq_folder(folder, family):
    """A small model with random weights and a tokenizer with the ends of its family."""
    marks = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    single = "$A </s>"
    if family == "bart":
        marks = {**marks, "bos_token": "<s>"}
        single = "<s> $A </s>"
    tokenizer = word_level(WORDS, single, **marks)
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "d_model": 32, "pad_token_id": 0, "eos_token_id": 2}
    layers = {}
    for side in ("encoder", "decoder"):
        layers |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 64}
    drawn = {"forced_eos_token_id": None, "dropout": 0.0, "init_std": 0.1}
    bart = {**sizes, **layers, **drawn, "max_position_embeddings": 32, "bos_token_id": 3}
    t5 = {**sizes, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    kinds = {
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration, t5, 0),
        "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration, bart, 2),
        "marian": (transformers.MarianConfig, transformers.MarianMTModel, bart, 0),
    }
    config, model, options, start = kinds[family]
    torch.manual_seed(0)
    options = {**options, "decoder_start_token_id": start}
    options |= {"decoder_vocab_size": len(tokenizer)} if family == "marian" else {}
    model(config(**options)).save_pretrained(folder)
    return folder


def pairs_table(path):
    """Sentences of one word and their translation, the next word twice."""
    follows = zip(WORDS[:4], (*WORDS[1:4], WORDS[0]), strict=True)
    rows = [f"{word}\t{following} {following}" for word, following in follows]
    path.write_text("\n".join(["de\ten", *rows * 30]) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_an_encoder_decoder_learns_to_translate_with_its_own_start_token(tmp_path, family, cli):
    source = seq2seq_folder(tmp_path / family, family)
    run = tmp_path / "run"
    words = typed("train translation --from", [source], "--data", [pairs_table(tmp_path / "p.tsv")])
    options = "--src de --tgt en --max-tokens 16 --epochs 15 --batch-size 12 --learning-rate 1e-2"
    succeed(words, options, "--generate-beams 1 --eval-every 1000 --quiet --out", [run])
    assert results(run)["perplexity,valid"] < 1.2
    starts = {"t5": 0, "bart": 2, "marian": 0}
    config = json.loads((run / "final" / "config.json").read_text())
    assert config["decoder_start_token_id"] == starts[family]
    assert f'tokenizer = "hf:{source}"' in (run / "config.toml").read_text()
    assert cli(["predict", str(run), "--text", "w0", "--beams", "1"]).out.strip() == "w1 w1"


def test_the_loss_of_a_translation_batch_is_that_of_the_model_itself(tmp_path):
    table = pairs_table(tmp_path / "p.tsv")
    for family in ("t5", "bart", "marian"):
        source = seq2seq_folder(tmp_path / family, family)
        options = {"data": str(table), "src": "de", "tgt": "en", "tokenizer": f"hf:{source}"}
        task = build_task("translation", {**options, "max_tokens": 16})
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(source).eval()
        batch = task.collate([task.dataset("train")[index] for index in range(6)])
        labels = batch.pop("labels")
        with torch.no_grad():
            total, count = task.loss_sum(model(**batch).logits, {"labels": labels})
            # Hugging Face moves the targets right by itself if it gets labels alone.
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            expected = model(**inputs, labels=labels).loss
        assert float(total / count) == pytest.approx(float(expected), rel=1e-5)


def test_a_folder_without_tokenizer_is_refused_by_predict_and_by_train(tmp_path, cli):
    config = transformers.BertConfig(**SIZES, vocab_size=20)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bare")
    errors = cli(["predict", str(tmp_path / "bare"), "--text", "w0"], status=1).err
    assert "the folder has no tokenizer; expected one of" in errors
    table = pair_table(tmp_path / "pairs.tsv")
    words = ["train", "text_classification", "--from", str(tmp_path / "bare"), "--data", str(table)]
    errors = cli([*words, "--out", str(tmp_path / "run")], status=None).err
    assert "name it with --tokenizer hf:FOLDER" in errors


def test_predict_refuses_a_model_without_a_classifier(tmp_path, cli):
    source = encoder_folder(tmp_path / "bert")
    errors = cli(["predict", str(source), "--text", "w0"], status=2).err
    assert "a BertModel gives no label of a text" in errors


NEW = ["dt_fixup:2", "value:1e-2", "embedding", "attention:1e-3", "feedforward:1e-3"]
ROUTES = f"""
char_lm --limit-chars 9000 --seq-len 32 {SMALLEST} | |
text_classification --data FILES/t.tsv {SMALLEST} | |
translation --data FILES/p.tsv --src de --tgt en {SMALLEST} | dt_fixup:2 | a source and a target
retrieval --num-train 24 --num-valid 8 --num-test 8 --max-length 12 {SMALLEST} | |
text_classification --data FILES/t.tsv --from FILES/bert --max-length 16 | |
text_classification --data FILES/t.tsv --from FILES/bert --certified-windows 1 | dt_fixup:2 | windows of words
language_modeling --data FILES/t.tsv --seq-len 16 --from FILES/gpt2 | |
image_classification --data FILES/sq --from FILES/vit/config.json | dt_fixup:2 embedding | patches of images
""".strip().splitlines()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    makers = (make_checkpoint, make_table, gpt2_folder, image_config, pairs_table, draw_squares)
    for name, make in zip(["bert", "t.tsv", "gpt2", "vit", "p.tsv", "sq"], makers, strict=True):
        make(folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_a_variant_is_in_the_report_or_is_refused_by_one_line(route, files, tmp_path, cli):
    words, refused, read = (part.strip() for part in route.replace("FILES", str(files)).split("|"))
    first = "plain" if "--from" in words else "post_ln"
    out = tmp_path / "runs"
    words = typed("compare", words, "--steps 2 --batch-size 4 --eval-batches 1 --seeds 1 --quiet")
    for name in refused.split():
        error = cli(words, "--variants", [f"{first},{name}"], "--out", [out], status=2).err
        assert error.endswith(f"read {read}; give another variant, such as plain\n")
        assert (error.count("\n"), error.count(f"{name}: "), out.exists()) == (1, 1, False)
    rest = [first, *(name for name in NEW if name not in refused.split())]
    cli(words, "--variants", [",".join(rest)], "--out", [out])
    files = [out / name.replace(":", "-") / "seed-0/result.json" for name in rest]
    infos = [json.loads(file.read_text())["train_info"] for file in files]
    assert [info["status"] for info in infos] == ["success"] * len(rest)
    assert ["dt_fixup" in info for info in infos] == [name == "dt_fixup:2" for name in rest]
    assert all(name in (out / "report.html").read_text("utf-8") for name in rest)
