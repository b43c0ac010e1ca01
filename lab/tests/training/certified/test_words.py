"""Changed words of finished runs: the commands, the files that they keep, and a user's own checkpoint
from training to the table."""

import copy
import re
from pathlib import Path

import pytest
import torch
from tests.support.tokenizer_folders import bert_words
from transformers import BertConfig, BertForSequenceClassification, BertModel

from wellposed.errors import ConfigError, DataError
from wellposed.models import WellposedConfig, WellposedForSequenceClassification, load_saved_model
from wellposed_lab.cli.main import main
from wellposed_lab.cli.prediction.labels import label_lines
from wellposed_lab.report.page import build_report
from wellposed_lab.tasks.task import build_task
from wellposed_lab.tasks.text.tokenizers import WordEncoder
from wellposed_lab.tasks.text.windows import WindowEncoder
from wellposed_lab.training.certified.record import WORDS_NAME, read_words
from wellposed_lab.training.config import RunConfig, StartOptions
from wellposed_lab.training.folder.result import read_result
from wellposed_lab.training.loop.build import build_start, load_run_model

WORDS = ("oil", "win", "bank", "goal", "x")


def test_of_classes_that_are_level_the_first_is_told_and_holds_against_nothing():
    sizes = {"hidden_size": 4, "num_hidden_layers": 0, "num_attention_heads": 1, "num_labels": 3}
    config = WellposedConfig(vocab_size=7, norm="none", position="none", **sizes)
    model = WellposedForSequenceClassification(config).eval()
    torch.nn.utils.vector_to_parameters(torch.zeros(15), model.classifier.parameters())
    tokenizer = WordEncoder(WORDS).tokenizer(max_length=9)
    lines = list(label_lines(model, tokenizer, ["oil win"], 1, certified=True))
    assert lines == ["LABEL_0\t0.3333\t0"]


def test_an_encoder_of_words_gives_what_windows_are_made_of():
    encoder = WindowEncoder(WordEncoder(WORDS), 2, ["oil win", "x"], 4)
    assert encoder.windows == {
        "window_words": 2,
        "word_tokens": 1,
        "word_mark": -2,
        "frame": [[], []],
    }
    assert encoder.longest == 2


def test_the_command_counts_words_of_a_run_and_names_what_it_cannot(tmp_path, capsys):
    rows = [f"{p}\t{word} {word} film {word} x\n" for p, word in (("p", "good"), ("n", "bad"))]
    (tmp_path / "train.tsv").write_text("label\ttext\n" + "".join(rows * 40), encoding="utf-8")
    run = str(tmp_path / "run")
    typed = "--steps 30 --eval-every 30 --checkpoint-every 30 --batch-size 8 --quiet --max-length 9"
    sizes = "--model.hidden-size 8 --model.num-hidden-layers 0 --model.num-attention-heads 1"
    train = ["train", "text_classification", "--data", str(tmp_path / "train.tsv")]
    words = [*typed.split(), *sizes.split(), "--variant", "lipschitz", "--margin-loss", "words:1"]
    assert main([*train, *words, "--out", run]) == 0
    model, _ = load_run_model(Path(run))
    assert model.config.ball_embeddings
    assert model.config.position == "none"
    capsys.readouterr()
    kinds = ["--words", "1,2", "--examples", "999"]
    assert main(["certify", run, *kinds, "--text", "good bad good film"]) == 0
    output = capsys.readouterr().out
    table = re.findall(r"^words +(\d) +(\S+) +(\S+)$", output, re.MULTILINE)
    assert [k for k, _, _ in table] == ["1", "2"]
    assert table[0][1] == table[0][2], "exact: certified is attacked"
    assert table[1][1] <= table[1][2]
    assert "4 words" in output
    assert "words that matter most" in output
    assert main(["certify", run, "--text", "good \u7535\u5f71 bad"]) == 0
    carried = capsys.readouterr().out.split("words that matter most")[1]
    assert "\u7535\u5f71" in carried, "an unknown word is shown as it was typed"
    assert main(["predict", run, "--text", "good good film good x", "--certified"]) == 0
    label, _, count = capsys.readouterr().out.split("\t")
    assert (label, int(count) >= 1) == ("p", True)
    for wrong, message in (
        (["--words", "0"], "whole numbers"),
        (["--words", "2,1"], "increasing"),
        (["--words", "1", "--examples", "0"], "--examples >= 1"),
        (["--edits", "1"], "unknown option of wellposed certify '--edits'"),
        (["--text", " "], "expected one line of 1 word or more"),
    ):
        assert main(["certify", run, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_model_without_a_certificate_is_attacked_and_told_why(capsys, tmp_path):
    out = str(tmp_path / "plain")
    words = "train text_classification --data builtin --variant pre_ln --steps 2 --quiet"
    small = "--model.hidden-size 16 --model.num-hidden-layers 1 --model.num-attention-heads 2"
    assert main([*words.split(), *small.split(), "--out", out]) == 0
    asked = ["--words", "1", "--examples", "4", "--text", "send a message to the mail server"]
    capsys.readouterr()
    assert main(["certify", out, *asked]) == 0
    output = capsys.readouterr().out
    assert "no certificate: no bound in norm sum of DotProductAttention" in output
    assert re.search(r"words +1 +none +[01]\.\d{4}\n", output)
    assert re.search(r"the attack (needs \d+: \w+ -> \w+|finds none)", output)


@pytest.mark.slow
def test_a_comparison_counts_words_and_the_report_draws_them(tmp_path, capsys):
    out = tmp_path / "runs"
    words = (
        "compare text_classification --data builtin --variants lipschitz,rezero,windows:2 --seeds 1"
    )
    small = "--model.hidden-size 8 --model.num-hidden-layers 1 --model.num-attention-heads 2"
    asked = "--steps 4 --quiet"
    assert main([*f"{words} {small} {asked}".split(), "--out", str(out)]) == 0
    assert main([*words.split(), "--variants", "windows:two"]) == 2
    assert "certified_windows" in capsys.readouterr().err
    for variant in ("lipschitz", "rezero", "windows-2"):
        folder = out / variant / "seed-0"
        assert main(["certify", str(folder), "--words", "1,3", "--examples", "4"]) == 0
        date = str(read_result(folder).result["date"])
        curve = read_words(folder, run_date=date)
        assert (curve.counts, curve.split, curve.examples) == ([0, 1, 3], "test", 4)
        assert all(sure <= high for sure, high in zip(curve.certified, curve.attacked, strict=True))
        metrics = zip(("words@1,test", "words@3,test"), curve.certified[1:], strict=True)
        assert curve.metrics() == dict(metrics)
        assert len(curve.first_texts) == 4
        if variant == "rezero":
            assert curve.certified[1:] == [0.0, 0.0]
            assert not any("certified" in line for line in curve.first_texts)
        with pytest.raises(DataError, match="measure it again"):
            read_words(folder, run_date="another")
    page = build_report([out], tmp_path / "report.html").read_text("utf-8")
    assert "replaced words" in page
    assert "certified against any 3 words" in page
    (out / "lipschitz" / "seed-0" / WORDS_NAME).write_text('{"format": 1}')
    with pytest.raises(DataError, match=WORDS_NAME):
        read_words(out / "lipschitz" / "seed-0", run_date=date)


@pytest.fixture
def checkpoint(tmp_path):
    """A BERT of the user's, its tokenizer and texts."""
    config = BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=16, max_position_embeddings=16)  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    bert_words(WORDS).save_pretrained(tmp_path / "bert")
    rows = "p\toil bank x oil x\nn\twin goal x goal win x\n" * 40
    (tmp_path / "train.tsv").write_text("label\ttext\n" + rows, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_checkpoint_of_the_user_gets_a_certificate_in_words(checkpoint, capsys):
    bert = str(checkpoint / "bert")
    run = str(checkpoint / "run")
    data = ["--data", str(checkpoint / "train.tsv"), "--from", bert, "--tokenizer", f"hf:{bert}"]
    steps = "--steps 60 --eval-every 60 --checkpoint-every 60"
    small = f"{steps} --batch-size 8 --quiet".split()
    windows = ["--certified-windows", "2", "--learning-rate", "0.01", "--margin-loss", "words:1"]
    task = ["text_classification", *data, *small]
    assert main(["train", *task, *windows, "--out", run]) == 0
    model = load_saved_model(checkpoint / "run" / "final")
    assert (model.config.window_words, model.config.word_tokens) == (2, 1)
    capsys.readouterr()
    asked = ["--words", "1", "--examples", "6", "--text", "oil bank x oil"]
    assert main(["certify", run, *asked]) == 0
    output = capsys.readouterr().out
    assert re.search(r"words +1 +(?!0\.0000)", output)
    assert "no 0 replaced words" in output or "oil bank" in output
    assert main(["predict", run, "--text", "oil bank x oil bank x", "--certified"]) == 0
    label, _, count = capsys.readouterr().out.split("\t")
    assert (label, int(count) >= 1) == ("p", True)
    assert main(["measure", run]) == 0
    assert "token_embedding" in capsys.readouterr().out
    again = ["--from", str(checkpoint / "run" / "final"), "--tokenizer", f"hf:{bert}"]
    for wrong, message in (
        ([*task[:3], *again, *windows[:2]], "a model without windows"),
        ([*task, "--from-scratch", "--variant", "t_fixup", *windows[:2]], "another variant"),
    ):
        assert main(["train", *wrong, "--out", str(checkpoint / "out")]) == 2
        assert message in capsys.readouterr().err


def test_a_frozen_body_is_read_from_a_file_and_what_was_drawn_is_told(checkpoint):
    bert = checkpoint / "bert"
    options = {"data": str(checkpoint / "train.tsv"), "tokenizer": f"hf:{bert}"}
    task = build_task("text_classification", {**options, "certified_windows": 1, "max_length": 16})

    def started(source, **keywords):
        start = StartOptions(str(source), frozen=True, **keywords)
        return build_start(RunConfig("text_classification", start=start), task)

    with pytest.raises(ConfigError, match=r"drawn at random: bert\.emb.*a folder with weights"):
        started(bert / "config.json")
    begun = started(bert)
    learnt = [name for name, weight in begun.model.named_parameters() if weight.requires_grad]
    assert list(begun.new_weights) == learnt
    BertModel(BertConfig.from_pretrained(bert), add_pooling_layer=False).save_pretrained(bert)
    drawn = [f"model.{name}" for name in ("bert.pooler.dense", "classifier")]
    both = [f"{name}.{kind}" for name in drawn for kind in ("bias", "weight")]
    assert list(started(bert, new_head=True).new_weights) == [*both, *learnt]


@pytest.mark.slow
def test_a_frozen_checkpoint_is_read_once_a_window_and_stays_as_it_was(checkpoint, capsys):
    bert = str(checkpoint / "bert")
    run = checkpoint / "run"
    task = ["text_classification", "--data", str(checkpoint / "train.tsv"), "--from", bert]
    steps = "--steps 40 --eval-every 40 --checkpoint-every 40 --batch-size 8 --learning-rate 0.01"
    frozen = f"{steps} --frozen --margin-loss words:1 --quiet --max-length 16".split()
    assert main(["train", *task, *frozen, "--out", str(run)]) == 2
    assert "give --certified-windows 1" in capsys.readouterr().err
    windows = ["--certified-windows", "1"]
    assert main(["train", *task, *frozen, *windows, "--from-scratch", "--out", str(run)]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
    assert main(["train", *task, *frozen, *windows, "--out", str(run)]) == 0
    model = load_saved_model(run / "final")
    before = BertForSequenceClassification.from_pretrained(bert)
    for name, weight in before.base_model.state_dict().items():
        assert torch.equal(weight, model.model.base_model.state_dict()[name]), name
    ids = torch.tensor([[-2, 5, -2, 7, -2, 5, -2, 8]])
    read = []
    encoder = model.train().model.base_model
    encoder.register_forward_hook(lambda *a: read.append(len(a[2].last_hidden_state)))
    alone = encoder(torch.tensor([[2, 7, 3]])).last_hidden_state.mean(1)
    vector = encoder.get_input_embeddings()(torch.tensor([7]))
    norm = torch.nn.functional.layer_norm
    made = torch.cat([norm(part, (16,)) for part in (alone, vector)], 1)
    expected = model.eval().head(made).sigmoid()[0]
    for copied in (model, model, copy.deepcopy(model).double()):
        torch.testing.assert_close(copied.votes(ids)[0, 1].float(), expected)
    assert read == [1, 3, 3], "three words once, and once more in double precision"
    capsys.readouterr()
    assert main(["certify", str(run), "--words", "1", "--examples", "6"]) == 0
    assert re.search(r"words +1 +(?!0\.0000)", capsys.readouterr().out)
