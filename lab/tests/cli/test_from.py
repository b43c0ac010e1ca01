"""`--from`: the commands on a small Hugging Face model made here. It is trained, varied and saved for
other programs; models that cannot be used are refused."""

import json
import shutil
import sys

import pytest
import torch
import transformers
from tests.support.bert import make_checkpoint, make_table
from tests.support.edited import edited
from tests.support.tokenizer_folders import byte_level_bpe
from tests.support.words import TINY, python, succeed
from tests.support.words import words as typed

from wellposed.models import load_saved_model

pytestmark = pytest.mark.slow  # the whole table

CLASSIFY = "text_classification --data FILES/t.tsv --max-length 16"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a BERT, and folders that differ from it in one thing each."""
    folder = tmp_path_factory.mktemp("files")
    make_checkpoint(folder / "bert")
    make_table(folder / "t.tsv")
    for name, changes in (("wide", {"hidden_size": 32}), ("deep", {"num_hidden_layers": 3})):
        shutil.copytree(folder / "bert", folder / name)
        with edited(folder / name / "config.json") as config:
            config.update(changes)
    shutil.copytree(folder / "bert", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    bert = transformers.BertForSequenceClassification
    bert.from_pretrained(folder / "bert", num_labels=3).save_pretrained(folder / "three")
    transformers.AutoTokenizer.from_pretrained(folder / "bert").save_pretrained(folder / "three")
    tokenizer = byte_level_bpe(["a text"])
    tokenizer.save_pretrained(folder / "gpt2")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2Config(vocab_size=len(tokenizer), **sizes, **special)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    for name in ("vit", "t5"):  # only their configuration is read
        transformers.AutoConfig.for_model(name).save_pretrained(folder / name)
    (folder / "my.py").write_text("import nothing_of_this_name\n")
    return folder


WIDTHS = "embeddings.LayerNorm.bias is (16,) in the file and (32,) in the model"
OTHER_TOKENS = "its weights need the model's own tokens"
REFUSED = f"""
language_modeling --from FILES/bert --limit-chars 20000 --seq-len 16 | tokens of a BertLMHeadModel see later tokens
language_modeling --from FILES/t5 | a t5 model has no head for causal lm
translation --from FILES/bert --data FILES --src de --tgt en | a bert model has no head for seq2seq lm
char_lm --from FILES/gpt2 --limit-chars 20000 --seq-len 32 | {OTHER_TOKENS}, and the data of char_lm has others
{CLASSIFY} --from FILES/vit | a vit model has no head for sequence classification
{CLASSIFY} --from FILES/bert --tokenizer hf:FILES/gpt2 | {OTHER_TOKENS}
{CLASSIFY} --from FILES/three | give --new-head to draw a new one
{CLASSIFY} --from bert-base-uncased | it is not in the cache, and the Hugging Face hub cannot be reached
{CLASSIFY} --from FILES/wide | {WIDTHS}
{CLASSIFY} --from FILES/wide --new-head | {WIDTHS}
{CLASSIFY} --from FILES/deep | lacks bert.encoder.layer.1.
{CLASSIFY} --from FILES/cut | cut: cannot be loaded:
{CLASSIFY} --from FILES/bert --import FILES/my.py | ModuleNotFoundError: No module named 'nothing_of_this_name'
{CLASSIFY} --from FILES/bert --steps 3 --epochs 2 | --steps 3 and --epochs 2 both say how long to train
{CLASSIFY} --from FILES/bert --model.hidden-size 64 | has its own architecture, received also model.hidden_size
""".strip().splitlines()


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ("bad good", ""),
        ("good bad", "labels matched by name: bad, good"),
        ("GOOD Bad", "labels matched by name: bad, good"),
        ("LABEL_0 LABEL_1", "its labels have no names, taken as bad, good"),
    ],
)
def test_labels_of_a_checkpoint_are_matched_by_name(files, tmp_path, saved, expected):
    """Each label of the data has the logit that the checkpoint gave the label of its name."""
    from wellposed_lab.training.start import start_model

    names = saved.split()
    folder = tmp_path / "classifier"
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    kind = transformers.BertForSequenceClassification
    before = kind.from_pretrained(files / "bert", num_labels=2, **labels).eval()
    before.save_pretrained(folder)
    wanted = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    start = start_model(folder, "sequence_classification", wanted)
    assert (start.labels, start.model.config.id2label[1]) == (expected, "good")
    ids = torch.tensor([[2, 5, 6, 3]])
    logits = [model.eval()(input_ids=ids).logits[0].tolist() for model in (before, start.model)]
    by_name = dict(zip(map(str.lower, names), logits[0], strict=True))
    assert logits[1] == ([by_name["bad"], by_name["good"]] if "good" in by_name else logits[0])


@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_be_started_from_is_one_line(files, tmp_path, refused, cli):
    words, reason = refused.replace("FILES", str(files)).split(" | ")
    steps = [] if "--steps" in words else ["--steps", "2"]
    message = cli("train", words, steps, "--quiet --out", [tmp_path / "run"], status=None).err
    assert reason in message.replace(":\n  ", " ")
    assert message.count("\n") == 1
    assert not (tmp_path / "run/config.toml").exists()


def test_memory_that_ends_is_one_line_with_the_way_out(files, tmp_path, monkeypatch, cli):
    def full(self, *args, **inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", full)
    words = start(files, tmp_path / "run", "--steps 2 --batch-size 8 --quiet")
    message = cli(words, status=1).err
    assert "a smaller --batch-size with as much more --gradient-accumulation" in message
    assert message.count("out of memory") == 1


def test_texts_longer_than_the_model_are_cut_as_in_training_and_counted(files, tmp_path, cli):
    run = tmp_path / "run"
    lines = tmp_path / "lines.txt"
    succeed(start(files, run, "--steps 2"))
    beginning = f"good {' '.join(f'w{n}' for n in range(13))}"  # with both ends, 16 tokens
    lines.write_text(f"{beginning}\n{beginning} bad bad bad\nw1\n")
    captured = cli(["predict", "--from", str(run), "--input", str(lines)])
    first, second, _ = captured.out.splitlines()
    assert first == second
    assert "1 lines of more than 16 tokens were cut to their start: 2" in captured.err


def start(files, out, *more, command="train", source="bert"):
    words = typed(command, "text_classification --data", [files / "t.tsv"], "--max-length 16")
    return typed(words, "--from", [files / source], "--out", [out], *more)


def test_a_checkpoint_is_fine_tuned_with_its_own_tokenizer(files, tmp_path, cli):
    out = tmp_path / "run"
    messages = cli(start(files, out, "--epochs 2")).err.splitlines()
    (line,) = (line for line in messages if line.startswith("starts from "))
    assert line.endswith("bert; drawn at random: classifier.bias, classifier.weight")
    drawn = ["classifier.bias", "classifier.weight"]
    started = {"model": str(files / "bert"), "new_weights": drawn, "left_out": []}
    assert _result(out)["train_info"]["started_from"] == started
    config = (out / "config.toml").read_text()
    for line in ('schedule = "linear"', "epochs = 2", "steps = 12", "warmup_steps = 1"):
        assert line in config
    assert f'tokenizer = "hf:{files}/bert"' in config
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out / "final")
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.id2label == {0: "bad", 1: "good"}
    succeed(start(files, out, "--epochs 2 --resume auto"))  # finished: nothing to do
    succeed(["predict", str(out), "--text", "w1 good w2"])


def test_a_number_of_steps_takes_the_place_of_the_epochs_of_fine_tuning(files, tmp_path):
    out = tmp_path / "run"
    succeed(start(files, out, "--steps 3"))
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
    assert "epochs" not in (out / "config.toml").read_text()
    succeed(start(files, out, "--steps 5 --epochs None --resume auto"))


IDS = [[2, 5, 6, 3]]
SHOW = f"import torch; print(model(input_ids=torch.tensor({IDS})).logits.tolist())"


def _result(folder):
    return json.loads((folder / "result.json").read_text())


def _in_a_fresh_process(code, cache):
    """Return the JSON that the code prints."""
    environment = {"PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = python(["-c", code], env={**environment, "HF_MODULES_CACHE": str(cache)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _of_card(folder):
    """Return the code that the card of a model gives."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    return code.replace("FOLDER", str(folder))


@pytest.mark.slow
def test_variants_of_a_checkpoint_are_compared(files, tmp_path, cli):
    out = tmp_path / "runs"
    options = "--epochs 1 --variants plain,key:1e-2,orthogonal --seeds 2 --quiet"
    output = cli(start(files, out, options, command="compare")).out
    assert (out / "report.html").is_file()
    assert all(name in output for name in ("plain", "key:1e-2", "orthogonal"))
    assert _result(out / "orthogonal" / "seed-1")["train_info"]["isometry_error"] < 1e-5
    assert _result(out / "key-1e-2" / "seed-0")["config"]["penalty"]["key"] == 0.01


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["t_fixup", "l2"])
def test_a_changed_model_is_predicted_with_as_it_was_trained(files, tmp_path, variant, cli):
    out = tmp_path / "run"
    source = "bert/config.json" if variant == "t_fixup" else "bert"
    errors = cli(start(files, out, "--epochs 1 --variant", [variant], source=source)).err
    assert errors.count("starts from ") == 1
    card = (out / "final" / "README.md").read_text()
    assert ("**A plain `from_pretrained` gives another model**" in card) == (variant == "t_fixup")
    assert ("a plain `from_pretrained` refuses" in card) == (variant == "l2")
    with torch.no_grad():
        expected = load_saved_model(out / "final")(input_ids=torch.tensor(IDS)).logits
    logits = _in_a_fresh_process(_of_card(out / "final") + SHOW, tmp_path / "cache")
    assert torch.allclose(torch.tensor(logits), expected, atol=1e-6)
    succeed(["predict", str(out), "--text", "w1 good w2"])


@pytest.fixture(scope="module")
def final(tmp_path_factory):
    """Return the saved model of a finished run of ours."""
    run = tmp_path_factory.mktemp("ours") / "run"
    succeed("train char_lm --limit-chars 20000 --seq-len 64 --steps 3", TINY, "--out", [run])
    return run / "final"


@pytest.mark.slow
def test_a_model_of_ours_loads_where_wellposed_is_only_installed(final, tmp_path):
    with torch.no_grad():
        expected = load_saved_model(final)(input_ids=torch.tensor(IDS)).logits
    trusted = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer; "
        f"tokenizer = AutoTokenizer.from_pretrained({str(final)!r}, trust_remote_code=True); "
        f"model = AutoModelForCausalLM.from_pretrained({str(final)!r}, trust_remote_code=True)\n"
    )
    imported = _of_card(final)
    for code in (trusted, imported):
        logits = _in_a_fresh_process(code + SHOW, tmp_path / "cache")
        assert torch.allclose(torch.tensor(logits), expected, atol=1e-6)


def test_the_card_tells_what_was_made_and_how_without_paths_of_this_machine(files, tmp_path):
    out = tmp_path / "run"
    succeed(start(files, out, "--epochs 1 --variant key:1e-2 --seed 3"))
    card = (out / "final" / "README.md").read_text()
    result = _result(out)
    accuracy = result["results"]["text_classification"]["accuracy,test"]
    examples = result["n-samples"]["text_classification"]["test"]
    assert f"| test | {examples} | accuracy | {accuracy:.6g} |" in card
    for line in ("task: text_classification", "data: t.tsv", "variant: `key:1e-2`", "seed: 3"):
        assert f"- {line}\n" in card
    assert "wellposed train text_classification --data t.tsv" in card
    assert str(files) not in card
    assert str(tmp_path) not in card
    assert "license" not in card
    (out / "final" / "README.md").write_text("mine\n" + card)  # not damage
    succeed(["predict", str(out), "--text", "w1 good w2"])
