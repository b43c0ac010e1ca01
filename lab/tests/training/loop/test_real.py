"""The loop with the real tasks, models, penalty and measurements: they fit together, and what is
saved loads again."""

import json
from dataclasses import replace

import jsonschema
import pytest
import torch
from lab.tests.support.runs import flip, stop_at

from wellposed.errors import CheckpointError, ConfigError, DataError
from wellposed.model_options import ModelOptions
from wellposed.nn import L2SelfAttention
from wellposed_lab.report.page import build_report
from wellposed_lab.report.runs import read_metrics
from wellposed_lab.training.config import PenaltyOptions, RunConfig, TrainOptions
from wellposed_lab.training.folder.result import result_schema
from wellposed_lab.training.loop.build import load_run_model
from wellposed_lab.training.loop.train import train

SMALL = ModelOptions(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, dropout=0.1)
EVERY = {"eval_every": 2, "eval_batches": 1, "checkpoint_every": 2, "log_every": 1}
SHORT = TrainOptions(steps=4, batch_size=4, **EVERY)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the north wind and the sun were disputing which was the stronger. " * 60)
    return path


def language_model(text, **changes):
    data = {"data": str(text), "seq_len": 16}
    return RunConfig("char_lm", data, model=SMALL, train=SHORT, **changes)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "lm"
    penalty = PenaltyOptions(affinity=1e-3, attention=1e-3, feedforward=1e-3)
    result = train(language_model(text, penalty=penalty, variant="oc3"), out, progress=False)
    assert result.status == "success"
    jsonschema.validate(result.result, result_schema())
    return out


@pytest.mark.parametrize(("strength", "times"), [(1e-6, 0), (100.0, 1)])
def test_a_first_penalty_that_rules_the_loss_is_said_once(text, tmp_path, caplog, strength, times):
    penalty = PenaltyOptions(key=strength)
    with caplog.at_level("INFO", logger="wellposed_lab.training"):
        train(language_model(text, penalty=penalty), tmp_path / "run", progress=False)
    assert caplog.text.count("training will follow the penalty") == times


def test_vital_signs_are_rows_of_the_run_and_change_nothing(text, tmp_path, caplog):
    plain = language_model(text)
    watched = replace(plain, train=replace(SHORT, monitor=2, learning_rate=0.1))
    results = [
        train(config, tmp_path / name, progress=False)
        for name, config in (
            ("watched", watched),
            ("plain", replace(watched, train=replace(watched.train, monitor=0))),
        )
    ]
    assert results[0].result["results"] == results[1].result["results"]
    rows = [row for row in read_metrics(tmp_path / "watched") if row["split"] == "monitor"]
    assert [row["step"] for row in rows] == [1, 3]
    heads = [x for name, x in rows[0].items() if ".head" in name and name.endswith("/logit_max")]
    assert len(heads) == 2 * 2
    assert rows[0]["vital/logit_max"] == max(heads)
    assert rows[0]["vital/update"] > 0.1
    assert "one step moved a weight by more than a tenth" in caplog.text
    (alarm,) = [row for row in read_metrics(tmp_path / "watched") if row["split"] == "alarm"]
    assert alarm["step"] == 1
    assert [rows[0][name] for name in alarm if name.startswith("vital/")] == [
        rows[0]["vital/update"]
    ]
    assert not {row["split"] for row in read_metrics(tmp_path / "plain")} & {"monitor", "alarm"}


def test_the_first_module_that_is_not_finite_is_an_alarm_of_the_run_and_of_its_report(
    text, tmp_path, caplog
):
    options = replace(SHORT, monitor=1, learning_rate=1e30, schedule="constant", max_grad_norm=0)
    train(replace(language_model(text), train=options), tmp_path / "run", progress=False)
    alarms = [row for row in read_metrics(tmp_path / "run") if row["split"] == "alarm"]
    (name,) = [name for name in alarms[-1] if name.endswith("/finite")]
    assert (
        f"{name.removeprefix('vital/').removesuffix('/finite')}: the first module whose output held NaN"
        in caplog.text
    )
    page = build_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "alarms at 2 steps, the first at step 1: vital/decoder.0.query/update is" in page


def test_a_run_that_goes_on_watches_the_steps_it_would_have_watched(text, tmp_path, caplog):
    options = replace(SHORT, monitor=3, learning_rate=0.1, schedule="constant")
    for steps in (2, 4):
        config = replace(language_model(text), train=replace(options, steps=steps))
        train(config, tmp_path / "run", progress=False, resume="auto", longer=True)
    rows = [row for row in read_metrics(tmp_path / "run") if row["split"] == "monitor"]
    assert [row["step"] for row in rows] == [1, 4]
    alarms = [line for line in caplog.messages if "moved a weight" in line]
    assert [line.partition(":")[0] for line in alarms] == ["step 1", "step 4"]


def test_a_language_model_leaves_everything_a_report_reads(finished):
    from wellposed.measurement import Measurement

    files = (finished / f"measure-{when}.json" for when in ("initial", "final"))
    before, after = map(Measurement.from_json, files)
    assert len(before.rows) == len(after.rows) > 0
    sizes = [[row["sigma_max"] for row in measured.rows] for measured in (before, after)]
    assert sizes[0] != sizes[1]
    trained = [row for row in read_metrics(finished) if row["split"] == "train"]
    assert all(row["penalty"] > 0 for row in trained)


def test_the_final_model_loads_and_gives_the_same_logits(finished):
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_run_model(finished)
    assert not model.training
    ids = torch.tensor([tokenizer("the north")["input_ids"]])
    best = json.loads((finished / "result.json").read_text())["train_info"]["best_step"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        for folder in (finished / "final", finished / f"checkpoint-{best}"):
            loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
            assert torch.equal(loaded(input_ids=ids).logits, logits)
    flip(finished / "final" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: SHA-256"):
        load_run_model(finished)
    flip(finished / "final" / "model.safetensors")


def test_a_run_that_has_not_ended_has_no_model(text, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="not a run folder"):
        load_run_model(tmp_path / "run")
    stop_at(monkeypatch, 4)
    assert train(language_model(text), tmp_path / "run", progress=False).status == "cancelled"
    with pytest.raises(CheckpointError, match="the run has not ended; finish it with"):
        load_run_model(tmp_path / "run")


def test_bf16_trains_fp32_weights(text, tmp_path):
    config = replace(language_model(text), train=replace(SHORT, precision="bf16"))
    assert train(config, tmp_path / "run", progress=False).status == "success"
    model, _ = load_run_model(tmp_path / "run")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_missing_data_leaves_no_folder(tmp_path):
    config = RunConfig("char_lm", {"data": str(tmp_path / "nowhere.txt")})
    with pytest.raises(DataError, match=r"nowhere\.txt"):
        train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_an_evaluation_bounds_a_contractive_layer_once(text, tmp_path, monkeypatch):
    bounded = []
    divisor = L2SelfAttention._divisor
    monkeypatch.setattr(
        L2SelfAttention, "_divisor", lambda *args: bounded.append(1) or divisor(*args)
    )
    model = replace(SMALL, num_hidden_layers=1, attention="l2_contractive", dropout=0.0)
    counts = []
    for batches in (1, 8):
        options = replace(SHORT, steps=1, eval_every=1, eval_batches=batches)
        config = replace(language_model(text), model=model, train=options)
        assert train(config, tmp_path / str(batches), progress=False).status == "success"
        counts.append(len(bounded))
        bounded.clear()
    assert counts[0] == counts[1]
