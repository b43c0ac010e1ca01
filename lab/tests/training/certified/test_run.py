"""``compare --certify``, ``certified.json``: certified is never above attacked."""

import json
import random

import pytest
import torch
from tests.support.html_page import Page
from tests.support.words import words as typed

from wellposed.certification import certify
from wellposed.errors import DataError
from wellposed.models import WellposedConfig, WellposedForSequenceClassification
from wellposed_lab.cli.main import main
from wellposed_lab.report.aggregate import aggregate
from wellposed_lab.report.page import build_report
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.certified.record import NAME, TOKEN_SHARES, read_certified
from wellposed_lab.training.certified.run import certify_runs
from wellposed_lab.training.folder.run_folder import read_config
from wellposed_lab.training.loop.build import load_run_model
from wellposed_lab.training.loop.step import certified_logits

pytestmark = pytest.mark.slow  # the whole table

TINY = typed("--model.hidden-size 8 --model.num-hidden-layers 1 --model.num-attention-heads 2")
SMALL = {"hidden_size": 4, "num_attention_heads": 2}
SHORT = [*typed("--steps 20 --eval-every 20 --checkpoint-every 20 --batch-size 8 --quiet"), *TINY]


def write_texts(folder):
    rng = random.Random(0)
    folder.mkdir(parents=True)
    pairs = [("pos", "good"), ("neg", "bad")] * 40
    rows = "".join(f"{label}\ta {word} film {rng.choice('xyz')}\n" for label, word in pairs)
    (folder / "train.tsv").write_text(f"label\ttext\n{rows}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return the folder of a comparison of a variant with a certificate and one with a bound on a
    ball only."""
    folder = tmp_path_factory.mktemp("compared")
    write_texts(folder / "data")
    assert main(texts(folder / "out", "compare", "--seeds", "2", "--certify", "4")) == 0
    return folder / "out"


def texts(out, *words):
    """Return a command on the texts beside ``out``."""
    data = str(out.parent / "data" / "train.tsv")
    variants = ["--variants", "rezero,lipschitz"] if words[0] == "compare" else []
    command = [words[0], "text_classification", "--data", data, "--max-length", "6", *SHORT]
    return [*command, *variants, *words[1:], "--out", str(out)]


def curve_of(folder):
    return json.loads((folder / NAME).read_text())


def test_every_run_of_a_comparison_holds_its_curve(compared):
    runs = list(compared.glob("*/seed-*"))
    assert len(runs) == 4
    for values in map(curve_of, runs):
        certified = values["certified"]
        attacked = values["attacked"]
        assert values["shares"] == list(TOKEN_SHARES)
        assert all(sure <= broken for sure, broken in zip(certified, attacked, strict=True))
        assert certified == sorted(certified, reverse=True)
        assert certified[0] == attacked[0]
        assert values["examples"] == 4


def test_the_total_is_at_most_one_and_of_its_tokens_one(compared):
    values = curve_of(compared / "lipschitz" / "seed-0")
    model, _ = load_run_model(compared / "lipschitz" / "seed-0")
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            assert float(torch.linalg.matrix_norm(weight.detach().double(), 2)) <= 1
    assert certify(model, seq_len=6).total == pytest.approx(values["total"], rel=1e-6)
    assert values["total"] <= 1
    assert values["median_token"] == pytest.approx(1, abs=1e-5)


def test_the_report_has_the_curves_and_the_named_radius(compared, tmp_path):
    assert "test accuracy certified at radius 0.1" in aggregate([compared]).table()
    page = build_report([compared], tmp_path / "report.html").read_text()
    assert "certified, and under the attack" in page
    rows = Page(page).csv("1-text_classification-certified")
    curves = [curve_of(compared / "lipschitz" / f"seed-{seed}")["certified"] for seed in (0, 1)]
    mine = [row for row in rows if row["variant"] == "lipschitz"]
    assert [float(row["radius"]) for row in mine] == list(TOKEN_SHARES)
    expected = [(first + second) / 2 for first, second in zip(*curves, strict=True)]
    assert [float(row["certified"]) for row in mine] == pytest.approx(expected, abs=1e-12)
    assert all(float(row["certified"]) <= float(row["attacked"]) for row in rows)


def test_certify_says_what_radii_mean(compared, capsys):
    run = compared / "rezero" / "seed-1"
    (run / NAME).unlink()
    words = ["--examples", "4", "--attack-steps", "2", "--radius", "9"]
    assert main(["certify", str(run), *words]) == 0
    output = capsys.readouterr().out
    assert "modules that enlarge a change, largest first" in output
    assert "of a token" in output
    assert "kept for `wellposed report`" in output
    assert curve_of(run)["shares"] == list(TOKEN_SHARES)
    assert main(["certify", str(compared / "lipschitz" / "seed-0"), "--examples", "0"]) == 0
    assert "no module enlarges a change of its input" in capsys.readouterr().out


def test_numbers_made_in_another_way_are_not_taken(compared):
    """Of another split or attack they were, and printed beside those of the others."""
    folder = compared / "rezero" / "seed-1"
    config = read_config(folder)
    task = build_task(config.task, config.task_options)
    certified = []

    def certify_again(**asked):
        certified.clear()
        asked = {"examples": 4, **asked}
        return certify_runs([folder], task, announce=certified.append, **asked)[0]

    words = ["--examples", "4", "--attack-steps", "1", "--split", "valid", "--radius", "9"]
    assert main(["certify", str(folder), *words]) == 0
    assert curve_of(folder)["split"] == "valid"
    assert certify_again().split == "test"
    assert certified
    certify_again()
    assert not certified
    assert "20 steps" in certify_again().attack
    assert "1 steps" in certify_again(attack_steps=1).attack
    assert certify_again(examples=3, attack_steps=1).examples == 3
    old = {name: value for name, value in curve_of(folder).items() if name != "made_by"}
    (folder / NAME).write_text(json.dumps(old))  # as 0.2 wrote it
    assert read_certified(folder, run_date=str(old["run_date"])) is not None
    certify_again(examples=3, attack_steps=1)
    assert certified


def test_an_outdated_or_damaged_certificate_is_named(compared, tmp_path):
    values = curve_of(compared / "lipschitz" / "seed-0")
    shares = values["shares"]
    spoilt = {
        "belongs to the model of 2001": {"run_date": "2001"},
        "same length": {"certified": [1.0]},
        "increasing": {"shares": shares[::-1]},
        "above the attacked one at [0.0": {"certified": [2.0] * len(shares)},
        "finite numbers": {"certified": ["x"] * len(shares)},
        "format 1": {"format": 7},
    }
    for message, change in spoilt.items():
        (tmp_path / NAME).write_text(json.dumps({**values, **change}))
        with pytest.raises(DataError, match=message.replace("[", r"\[")):
            read_certified(tmp_path, run_date=str(values["run_date"]))
    (tmp_path / NAME).write_text("{")
    with pytest.raises(DataError, match=NAME):
        read_certified(tmp_path, run_date="")
    (tmp_path / NAME).write_text(json.dumps({"format": 1, "norm": "tok"}))
    with pytest.raises(DataError, match="option 'run_date' is missing"):
        read_certified(tmp_path, run_date="")


def test_tasks_without_a_label_or_a_next_token_are_refused_before_training(tmp_path, capsys):
    (tmp_path / "train.tsv").write_text("en\tfr\n" + "a b\tc d\n" * 60)
    words = typed(f"compare translation --data {tmp_path / 'train.tsv'} --src en --tgt fr")
    assert main([*words, *SHORT, "--certify", "4", "--out", str(tmp_path / "out")]) == 2
    assert "certify = 4 on translation" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_next_tokens_are_certified(tmp_path, capsys):
    words = typed("compare char_lm --limit-chars 20000 --seq-len 16 --variants lipschitz")
    words += [*SHORT, *typed(f"--certify 16 --seeds 1 --out {tmp_path / 'out'}")]
    assert main(words) == 0
    run = tmp_path / "out" / "lipschitz" / "seed-0"
    values = curve_of(run)
    assert values["examples"] == 30  # two blocks of 16 tokens
    assert values["total"] is not None
    assert main(["certify", str(run), "--examples", "4", "--attack-steps", "3"]) == 0
    assert "15 next tokens of 1 texts" in capsys.readouterr().out
    assert curve_of(run)["examples"] == 15


def test_the_loss_of_certified_logits_is_that_of_the_worst_shift_of_each_logit():
    """By hand: every other class gains what a vector of length r can add to it over the class that
    is right."""
    config = WellposedConfig(vocab_size=9, num_hidden_layers=0, num_labels=3, **SMALL)
    model = WellposedForSequenceClassification(config).double().eval()
    pooled = torch.randn(5, 4, dtype=torch.float64)
    radius = 0.3
    labels = torch.tensor([0, 2, 1, 1, 0])
    weight = model.classifier.weight
    logits = certified_logits(model.classifier(pooled), labels, model, radius)
    for row, label in enumerate(labels.tolist()):
        for k in range(3):
            away = weight[k] - weight[label]
            worst = pooled[row] + radius * away / away.norm().clamp_min(1e-30)
            gap = (model.classifier(worst)[k] - model.classifier(worst)[label]).item()
            assert (logits[row, k] - logits[row, label]).item() == pytest.approx(gap, abs=1e-12)
    logits.sum().backward()
    assert bool(weight.grad.isfinite().all())


def test_a_margin_is_trained_and_refused_where_nothing_has_one(compared, tmp_path, capsys):
    words = [*texts(compared, "train", "--variant", "lipschitz")[:-2]]
    first_losses = []
    for number, margin in enumerate((["0"], ["0.5"], ["0.5", "--margin-loss", "certified"])):
        out = tmp_path / f"run-{number}"
        asked = ["--margin-radius", *margin, "--log-every", "1", "--out", str(out)]
        assert main([*words, *asked]) == 0
        first_losses.append(json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert first_losses[1] > first_losses[0]
    assert first_losses[2] == first_losses[1]
    lm = typed("train char_lm --limit-chars 20000 --variant lipschitz --margin-radius 0.5")
    assert main([*lm, *SHORT, "--out", str(tmp_path / "lm")]) == 0
    pairs = tmp_path / "train.tsv"
    pairs.write_text("de\ten\n" + "ein Hund\ta dog\n" * 40)
    words = [*typed(f"train translation --data {pairs} --src de --tgt en --vocab-size 300"), *SHORT]
    assert main([*words, "--margin-radius", "0.1", "--out", str(tmp_path / "translation")]) == 2
    assert "received an encoder-decoder" in capsys.readouterr().err
