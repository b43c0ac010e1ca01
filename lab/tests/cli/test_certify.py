"""``wellposed certify``: the table of any model, certified accuracy of a classifier's run, and bad
input."""

import csv
import json

import pytest
from tests.support.words import SMALLEST, succeed
from tests.support.words import words as typed
from torch import nn
from transformers import BartConfig, BartModel, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from wellposed.certification import certify
from wellposed.models import WellposedConfig, WellposedForCausalLM
from wellposed_lab.cli.certify import print_losses

SHORT = "--max-length 6 --steps 6 --eval-every 6 --checkpoint-every 6 --batch-size 8 --quiet"


def test_a_classifier_run_gives_table_curve_and_files(small_run, tmp_path, cli):
    words = typed("certify", [small_run], "--examples 8 --attack-steps 3 --out", [tmp_path])
    text = cli([*words, "--require"]).out
    assert "total, norm tok" in text
    assert "certified accuracy on test of text_classification" in text
    assert "for scale: embedded tokens have 2-norm" in text
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["label"] == "certified"
    assert certificate["tokens"] == 6
    rows = _rows(tmp_path)
    assert all(row["attacked"] >= row["certified"] for row in rows)
    assert rows[1]["radius"] > 0


def test_norm_length_and_radii_are_those_asked_for(small_run, cli):
    words = ["certify", str(small_run), "--norm", "2", "--seq-len", "4", "--radii", "0,0.5"]
    text = cli([*words, "--examples", "0"]).out
    assert "total, norm 2" in text
    assert "<= 4 tokens" in text
    assert "certified accuracy" not in text
    output = cli("certify", [small_run], "--radii 0,0.5 --examples 4 --split valid").out
    assert "       0.5  " in output


SMALL = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
UNBOUNDED = {
    "bert": lambda: BertModel(BertConfig(**SMALL, intermediate_size=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9)),
    "ours": lambda: WellposedForCausalLM(WellposedConfig(norm="none", **SMALL)),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_without_a_bound_the_reason_comes_once_and_nothing_contradicts_it(name, tmp_path, cli):
    UNBOUNDED[name]().save_pretrained(tmp_path / "model")
    captured = cli("certify", [tmp_path / "model"], "--seq-len 8")
    reasons = {"ours": "dot-product attention has no global"}
    reason = reasons.get(name, "models of transformers have no bound on all inputs")
    assert (captured.out + captured.err).count(reason) == 1
    assert "no module enlarges" not in captured.out
    _, _, listed = captured.out.partition("modules that enlarge a change")
    assert "inf" not in listed
    assert bool(listed) == (name == "ours")


def scaled(weight):
    layer = nn.Linear(2, 2)
    nn.init.eye_(layer.weight).data.mul_(weight)
    return layer.requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (scaled(3.0), "(1 of 1):\n           3  . (Linear)"),
        (scaled(0.5), "no module enlarges a change of its input"),
        (nn.Sequential(scaled(0.5), nn.LSTM(2, 2)), "no module with a bound enlarges a change"),
        (nn.Sequential(scaled(3.0), nn.LSTM(2, 2)), "(1 of 2):\n           3  0 (Linear)"),
        (nn.LSTM(2, 2), ""),
    ],
)
def test_what_enlarges_a_change_is_said_of_modules_with_a_bound_alone(module, expected, capsys):
    print_losses(certify(module.eval(), seq_len=4))
    printed = capsys.readouterr().out
    assert expected in printed
    assert bool(printed) == bool(expected)


def test_a_layer_without_a_bound_is_named(tmp_path, cli):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    config = WellposedConfig(norm="none", **sizes)
    WellposedForCausalLM(config).save_pretrained(tmp_path / "model")
    words = typed("certify", [tmp_path / "model"], "--seq-len 8")
    captured = cli(words)
    assert "uncertified" in captured.out
    assert "model.layers.0.attention" in captured.err
    assert "--radius" in captured.err
    cli(words, "--require", status=1)
    assert "mask causal, tokens with |x_i| <= 9" in cli(words, "--radius 9 --require").out


def test_a_total_of_no_use_says_so_first_and_costs_no_attack(small_run, tmp_path, cli):
    words = typed("train text_classification --data", [small_run.parent / "train.tsv"], SHORT)
    succeed(words, SMALLEST, "--variant l2_tied --out", [tmp_path / "run"])
    text = cli(["certify", str(tmp_path / "run"), "--out", str(tmp_path / "out")]).out
    first = text.splitlines()[0]
    assert first.startswith("vacuous: L = ")
    assert len(first) <= 100
    assert "smaller weights" in text
    assert "certified accuracy" not in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["certificate.json"]


def test_lengths_of_the_data_are_checked(small_run, cli):
    """Every text has 4 tokens."""
    words = typed("certify", [small_run], "--norm 2 --examples 8 --attack-steps 2")
    assert "4 to 6 tokens" in cli(words, "--min-tokens 4").out
    captured = cli(words, "--min-tokens 5", status=1)
    assert "at least 5 real tokens, received 4 (4 of 4 inputs are shorter)" in captured.err
    assert "certified accuracy on" not in captured.out
    errors = cli(words, "--seq-len 3", status=1).err
    assert "at most 3 tokens, received 4 (4 of 4 inputs are longer)" in errors


@pytest.fixture(scope="module")
def plain_folder(small_run, tmp_path_factory):
    """Return the run of a classifier with dot-product attention, which has a bound on a ball
    only."""
    out = tmp_path_factory.mktemp("plain") / "run"
    words = typed("train text_classification --data", [small_run.parent / "train.tsv"], SHORT)
    succeed(words, SMALLEST, "--model.norm none --out", [out])
    return out


def _rows(folder):
    with (folder / "certified_accuracy.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_without_a_bound_nothing_is_certified_and_the_reason_is_said(plain_folder, tmp_path, cli):
    words = typed("certify", [plain_folder], "--examples 8 --attack-steps 2 --out", [tmp_path])
    first, *others = cli(words).out.splitlines()
    assert first.startswith("vacuous: L = inf")
    assert not any("certified accuracy" in line or "in words" in line for line in others)
    captured = cli([*words, "--radii", "0,0.1"])
    why = "no bound (model.layers.0.attention), so nothing is certified at any radius above 0"
    assert why in captured.out
    assert "try --radius" in captured.err
    rows = _rows(tmp_path)
    assert rows[0]["certified"] == rows[0]["attacked"] > 0
    assert all(row["certified"] == 0 for row in rows[1:])


def test_no_ball_is_suggested_where_none_helps(tmp_path, cli):
    config = BartConfig(
        d_model=8, vocab_size=11, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    BartModel(config).save_pretrained(tmp_path / "bart")
    errors = cli(["certify", str(tmp_path / "bart"), "--seq-len", "4"]).err
    assert "there is no bound on a ball either" in errors
    assert "--radius" not in errors


def test_on_a_ball_radii_stay_inside(plain_folder, tmp_path, cli):
    words = typed("certify", [plain_folder], "--examples 8 --attack-steps 2 --out", [tmp_path])
    text = cli(words, "--radius 9 --radii 0,1e-9,9").out
    assert "mask full, tokens with |x_i| <= 9" in text  # a classifier sees both sides
    assert json.loads((tmp_path / "certificate.json").read_text())["ball"] == 9.0
    zero, tiny, nine = (row["certified"] for row in _rows(tmp_path))
    assert zero == tiny > nine == 0
