"""`--from` files of every dtype: weights and moments are float32 in training, which the run says."""

import itertools
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.bert import make_checkpoint, make_table
from tests.support.edited import edited
from tests.support.images import draw_squares, image_config
from tests.support.tokenizer_folders import byte_level_bpe, word_level
from tests.support.words import succeed
from tests.support.words import words as typed

from wellposed.models import load_saved_model, stored_dtypes
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.config import RunConfig, StartOptions, TrainOptions
from wellposed_lab.training.folder import checkpoints
from wellposed_lab.training.loop import build
from wellposed_lab.training.loop.train import train

pytestmark = pytest.mark.slow  # the whole table

CLASSIFY = "text_classification --data FILES/t.tsv --max-length 16 --batch-size 16"
WRITE = "language_modeling --data FILES/text.txt --seq-len 16 --batch-size 4 --epochs None"
TRANSLATE = "translation --data FILES/de_en.tsv --src de --tgt en --batch-size 8 --epochs None"
LOOK = "image_classification --data FILES/squares --batch-size 8 --epochs None --processor config:FILES/vit"
ENTRIES = {
    "folder": f"{CLASSIFY} --from FILES/bert-DTYPE",
    "parts": f"{CLASSIFY} --from FILES/parts-DTYPE",
    "run": f"{CLASSIFY} --from FILES/run-DTYPE",
    "windows": f"{CLASSIFY} --from FILES/bert-DTYPE --certified-windows 1",
    "frozen windows": f"{CLASSIFY} --from FILES/bert-DTYPE --certified-windows 1 --frozen",
    "other attention": f"{CLASSIFY} --from FILES/bert-DTYPE --attention l2",
    "orthogonal": f"{CLASSIFY} --from FILES/bert-DTYPE --variant orthogonal",
    "spectral": f"{CLASSIFY} --from FILES/bert-DTYPE --variant spectral:2",
    "penalty": f"{CLASSIFY} --from FILES/bert-DTYPE --variant key:1e-2",
    "DT-Fixup": f"{CLASSIFY} --from FILES/bert-DTYPE --variant dt_fixup:1",
    "Muon": f"{CLASSIFY} --from FILES/bert-DTYPE --optimizer muon",
    "autocast": f"{CLASSIFY} --from FILES/bert-DTYPE --precision bf16",
    "language model": f"{WRITE} --from FILES/gpt2-DTYPE",
    "translation": f"{TRANSLATE} --from FILES/t5-DTYPE",
    "images": f"{LOOK} --from FILES/vit-DTYPE",
}
"""Commands whose weights are read from a file."""
DRAWN = {
    "config.json": f"{CLASSIFY} --from FILES/bert-DTYPE/config.json",
    "from scratch": f"{CLASSIFY} --from FILES/bert-DTYPE --from-scratch",
    "T-Fixup": f"{CLASSIFY} --from FILES/bert-DTYPE/config.json --variant t_fixup",
    "images": f"{LOOK} --from FILES/vit-DTYPE/config.json",
}
"""Commands that read only a configuration, which names a dtype."""
DTYPES = ("bfloat16", "float16", "float32", "float64")


def every_pair(entries):
    """Return every entry with every dtype; those of the rarer dtypes are slow together."""
    pairs = itertools.product(entries, DTYPES)
    rare = dict.fromkeys(("float16", "float64"), pytest.mark.slow)
    first = next(iter(entries))
    return [
        pytest.param(entry, dtype, marks=rare[dtype] if dtype in rare and entry != first else ())
        for entry, dtype in pairs
    ]


def recast(source, target, dtype, *, in_config=True):
    """Copy a saved model with its weights in another dtype, named by its configuration or not."""
    ignored = shutil.ignore_patterns("manifest.json")
    shutil.copytree(source, target, ignore=ignored)
    path = target / "model.safetensors"
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    with edited(target / "config.json") as config:
        config.pop("dtype", None)
        config.update({"dtype": dtype} if in_config else {})
    return target


def save_in_parts(folder):
    """Save the weights of a folder as two files and an index."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    parts = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, names in parts.items():
        save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
    places = {name: file for file, names in parts.items() for name in names}
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with data, and with models in every dtype."""
    folder = tmp_path_factory.mktemp("files")
    make_table(folder / "t.tsv")
    lines = [f"the {colour} {thing}" for colour in ("red", "green") for thing in ("cat", "hat")]
    (folder / "text.txt").write_text("\n".join(lines * 60))
    rows = ["de\ten", *(f"{line}\t{line}" for line in lines * 20)]
    (folder / "de_en.tsv").write_text("\n".join(rows))
    draw_squares(folder / "squares", count=40)
    make_checkpoint(folder / "bert")
    image_config(folder / "vit")
    vit = transformers.AutoConfig.from_pretrained(folder / "vit")
    transformers.AutoModelForImageClassification.from_config(vit).save_pretrained(folder / "vit")
    words = byte_level_bpe(lines)
    sizes = dict(n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    gpt2 = transformers.GPT2Config(vocab_size=len(words), **sizes)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0)
    t5 = transformers.T5Config(vocab_size=len(words), decoder_start_token_id=0, **sizes)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(folder / "t5")
    words.save_pretrained(folder / "gpt2")
    marks = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    word_level(["the", "red", "green", "cat", "hat"], "$A </s>", **marks).save_pretrained(
        folder / "t5"
    )
    succeed(
        f"train {CLASSIFY} --quiet --steps 1 --epochs None --from".replace("FILES", str(folder)),
        [folder / "bert"], "--out", [folder / "first"],
    )  # fmt: skip
    for dtype in DTYPES:
        for name in ("bert", "gpt2", "t5", "vit"):
            recast(folder / name, folder / f"{name}-{dtype}", dtype)
        save_in_parts(recast(folder / "bert", folder / f"parts-{dtype}", dtype))
        recast(folder / "first" / "final", folder / f"run-{dtype}", dtype)
    return folder


def train_words(files, out, words):
    return typed("train", words.replace("FILES", str(files)), "--steps 2 --out", [out])


def dtypes_in(path):
    tensors = load_file(path)
    return {tensor.dtype for name, tensor in tensors.items() if not name.endswith(".step")}


def info_of(run):
    return json.loads((run / "result.json").read_text())["train_info"]


def assert_all_float32(run):
    """Weights, moments and the saved model are float32; so are the configurations."""
    (checkpoint,) = checkpoints.all_checkpoints(run)
    for path in (checkpoint / "model.safetensors", run / "final" / "model.safetensors"):
        assert dtypes_in(path) == {torch.float32}
        assert json.loads((path.parent / "config.json").read_text())["dtype"] == "float32"
    moments = load_file(checkpoint / "optimizer.safetensors")
    assert {m.dtype for n, m in moments.items() if "exp_avg" in n} == {torch.float32}
    assert info_of(run)["weights_dtype"] == "float32"


@pytest.mark.parametrize(("entry", "dtype"), every_pair(ENTRIES))
def test_weights_of_a_file_are_trained_in_float32(entry, dtype, files, tmp_path, cli):
    printed = cli(train_words(files, tmp_path / "run", ENTRIES[entry].replace("DTYPE", dtype)))
    lines = [line for line in printed.err.splitlines() if "trained in" in line]
    differs = dtype != "float32"
    assert lines == [f"weights are stored in {dtype}; trained in float32"] * differs
    assert_all_float32(tmp_path / "run")
    assert info_of(tmp_path / "run")["started_from"].get("stored_dtype") == (
        dtype if differs else None
    )


@pytest.mark.parametrize(("entry", "dtype"), every_pair(DRAWN))
def test_weights_are_drawn_and_trained_in_float32(entry, dtype, files, tmp_path, cli):
    printed = cli(train_words(files, tmp_path / "run", DRAWN[entry].replace("DTYPE", dtype)))
    lines = [line for line in printed.err.splitlines() if "trained in" in line]
    differs = dtype != "float32"
    assert lines == [f"config.json says {dtype}; weights are trained in float32"] * differs
    assert_all_float32(tmp_path / "run")
    assert info_of(tmp_path / "run")["started_from"].get("config_dtype") == (
        dtype if differs else None
    )


def test_a_file_of_float32_is_read_whole_although_its_configuration_says_bfloat16(files, tmp_path):
    source = recast(files / "bert", tmp_path / "bert", "float32")
    with edited(source / "config.json") as config:
        config["dtype"] = "bfloat16"
    start = build.build_start(classify(files, source), task_of(files))
    stored = load_file(files / "bert" / "model.safetensors")
    state = start.model.state_dict()
    assert all(torch.equal(state[f"bert.{name}"], tensor) for name, tensor in stored.items())
    assert (start.stored_dtype, start.config_dtype) == ("", "bfloat16")


def test_a_file_of_bfloat16_without_a_dtype_in_its_configuration(files, tmp_path):
    source = recast(files / "bert", tmp_path / "bert", "bfloat16", in_config=False)
    start = build.build_start(classify(files, source), task_of(files))
    assert {weight.dtype for weight in start.model.parameters()} == {torch.float32}
    assert (start.stored_dtype, start.config_dtype) == ("bfloat16", "")


def test_a_file_of_two_dtypes_names_both(files, tmp_path):
    source = recast(files / "bert", tmp_path / "bert", "bfloat16")
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors = {n: t.float() if "LayerNorm" in n else t for n, t in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    assert stored_dtypes(source) == ("bfloat16", "float32")
    start = build.build_start(classify(files, source), task_of(files))
    assert start.stored_dtype == "bfloat16 and float32"


@pytest.mark.slow
def test_variants_that_are_compared_start_from_the_same_float32_weights(files, tmp_path, cli):
    words = f"compare {CLASSIFY} --variants plain,orthogonal --seeds 1 --steps 2 --from"
    printed = cli(
        words.replace("FILES", str(files)), [files / "bert-bfloat16", "--out", tmp_path / "c"]
    )
    assert printed.err.count("weights are stored in bfloat16; trained in float32") == 2
    runs = sorted(path.parent for path in (tmp_path / "c").rglob("result.json"))
    assert len(runs) == 2
    for run in runs:
        assert_all_float32(run)


def test_verbs_that_train_nothing_keep_the_dtype_of_the_file(files):
    dtypes = {weight.dtype for weight in load_saved_model(files / "run-bfloat16").parameters()}
    assert dtypes == {torch.bfloat16}


def task_of(files):
    return build_task("text_classification", data_of(files, files / "bert"))


def data_of(files, source):
    return {"data": str(files / "t.tsv"), "max_length": 16, "tokenizer": f"hf:{source}"}


def classify(files, source, **options):
    settings = {"steps": 4, "batch_size": 16, "checkpoint_every": 2, "eval_every": 2}
    settings |= {"keep_checkpoints": 9, "schedule": "constant", **options}
    start = StartOptions(str(source))
    data = data_of(files, source)
    return RunConfig("text_classification", data, start=start, train=TrainOptions(**settings))


def test_as_many_entries_move_from_a_file_of_bfloat16_as_from_one_of_float32(files, tmp_path):
    """The same values in both files: 20 steps at 3e-5 end in the same weights, bit for bit."""
    same = recast(files / "bert-bfloat16", tmp_path / "same", "float32")
    ended = {}
    for source in (files / "bert-bfloat16", same):
        rates = {"steps": 20, "learning_rate": 3e-5, "eval_every": 20}
        result = train(
            classify(files, source, **rates), tmp_path / f"run-{source.name}", progress=False
        )
        ended[source.name] = load_file(result.out / "final" / "model.safetensors")
    begun = load_file(same / "model.safetensors")
    first, second = ended.values()
    assert all(torch.equal(first[name], second[name]) for name in first)
    layer = "encoder.layer.0.intermediate.dense.weight"
    moved = first[f"bert.{layer}"] != begun[layer]
    assert moved.float().mean() > 0.99
    # The same steps added to bfloat16 weights.
    rounded = first[f"bert.{layer}"].bfloat16() != begun[layer].bfloat16()
    assert rounded.float().mean() < 0.99


def weights_and_moments(run, step):
    folder = run / f"checkpoint-{step}"
    files = [folder / name for name in ("model.safetensors", "optimizer.safetensors")]
    return {f"{path.name} {name}": t for path in files for name, t in load_file(path).items()}


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_resumed_run_is_that_without_an_interruption(dtype, files, tmp_path):
    source = files / f"bert-{dtype}"
    train(classify(files, source), tmp_path / "whole", progress=False)
    train(classify(files, source, steps=2), tmp_path / "parts", progress=False)
    train(classify(files, source), tmp_path / "parts", progress=False, resume="auto", longer=True)
    assert_same_bits(*(weights_and_moments(tmp_path / name, 4) for name in ("whole", "parts")))


def test_a_run_that_an_earlier_version_began_in_bfloat16_continues_so(
    files, tmp_path, monkeypatch, caplog
):
    source = files / "bert-bfloat16"

    def as_before(out, steps, **options):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "dtype_of", lambda _: torch.bfloat16)
            train(classify(files, source, steps=steps), out, progress=False, **options)

    as_before(tmp_path / "whole", 4)
    as_before(tmp_path / "parts", 2)
    with caplog.at_level("INFO"):
        result = train(
            classify(files, source), tmp_path / "parts", progress=False, resume="auto", longer=True
        )
    ended = weights_and_moments(tmp_path / "parts", 4)
    assert_same_bits(weights_and_moments(tmp_path / "whole", 4), ended)
    assert {t.dtype for n, t in ended.items() if "exp_avg" in n} == {torch.bfloat16}
    assert result.result["train_info"]["weights_dtype"] == "bfloat16"
    lost = "trained weights are bfloat16: steps below 1/512 of an entry are rounded away"
    assert f"{lost}; the run was begun so and continues so" in caplog.text

    caplog.clear()
    train(classify(files, source), tmp_path / "parts", progress=False, resume="auto")
    assert "its weights were trained in bfloat16, which loses small steps" in caplog.text


def test_a_model_of_bfloat16_that_the_caller_makes_is_trained_as_it_is_and_named(
    files, tmp_path, caplog
):
    def half(config, task):
        return build.build_run_model(config, task).bfloat16()

    with caplog.at_level("INFO"):
        result = train(
            classify(files, files / "bert"), tmp_path / "run", progress=False, model=half
        )
    assert result.result["train_info"]["weights_dtype"] == "bfloat16"
    assert "rounded away; give a float32 model, and --precision bf16" in caplog.text
