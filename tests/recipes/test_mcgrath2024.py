"""The study of McGrath (2024) at toy size: the recipe, and a sweep that is stopped, shared and resumed."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tests.support.minbert import write_minbert
from tests.support.notebook import Notebook
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from wellposed.cli import main
from wellposed.errors import ConfigError, ConvergenceError
from wellposed.functional import gram_penalty, orthogonality_error
from wellposed.recipes.mcgrath2024 import encoders, multitask, results, sweep
from wellposed.recipes.mcgrath2024 import figures_1_3_table_1_qr as recipes
from wellposed.recipes.mcgrath2024 import grid as study
from wellposed.recipes.mcgrath2024.multitask_options import MultiTaskOptions, overall_score
from wellposed.recipes.reproduce import RECIPES, Reproduced, reproduce
from wellposed.tasks.data.minbert import read_minbert

TINY = MultiTaskOptions(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=120, max_length=16, batch_size=4, steps=3,
    measure_every=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_minbert(tmp_path_factory.mktemp("minbert"))


@pytest.fixture(scope="module")
def sets(data: Path) -> encoders.EncodedSets:
    return encoders.encode_sets(read_minbert(data), TINY)


@pytest.fixture(scope="module")
def encoder(sets: encoders.EncodedSets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights and the tokenizer of a BERT of one layer."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(5)
    model = BertModel(
        BertConfig(vocab_size=len(sets.tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=16, max_position_embeddings=16)
    )  # fmt: skip
    model.save_pretrained(folder)
    sets.tokenizer.save_pretrained(folder)
    return folder


def settings(data: Path, out: Path, *names: str, seeds: int = 1) -> sweep.SweepSettings:
    return sweep.SweepSettings(
        data=str(data), out=str(out), scale="mini", options=TINY, cells=study.chosen_cells(names),
        seeds=tuple(range(seeds)),
    )  # fmt: skip


def test_the_overall_score_gives_every_row_of_his_table() -> None:
    for row in study.PAPER_TABLE.values():
        assert overall_score(row) == pytest.approx(row["overall"], abs=6e-5)


def test_the_grid_is_his_sweep_and_the_qr_forms() -> None:
    cells = study.grid()
    assert len(cells) == 1 + 3 * 3 + 2 * 3
    assert len({cell.name for cell in cells}) == len({cell.folder for cell in cells}) == 16
    by_name = {cell.name: cell for cell in cells}
    assert by_name["baseline"].penalty() is None
    assert by_name["key+query:1e-4"].penalty() == {"key": 1e-4, "query": 1e-4, "form": "gram"}
    assert by_name["gram_schmidt:1e-6"].penalty() == {
        "key": 1e-6, "query": 1e-6, "form": "qr", "qr_method": "gram_schmidt",
    }  # fmt: skip
    assert [cell.name for cell in study.chosen_cells(["query:1e-2"])] == ["baseline", "query:1e-2"]
    value, embedding = study.chosen_cells(["value:1e-2", "embedding:1e-6"])[1:]
    assert (value.penalty(), embedding.penalty()) == (
        {"value": 1e-2, "form": "gram"}, {"embedding": 1e-6, "form": "gram"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="nearest: query:1e-2"):
        study.chosen_cells(["qury:1e-2"])


def test_losses_are_those_of_the_paper() -> None:
    logits = torch.randn(6, 5)
    labels = torch.tensor([0.0, 1, 2, 3, 4, 0])
    torch.testing.assert_close(multitask.task_loss("sst", logits, labels), F.cross_entropy(logits, labels.long()))
    output, duplicate = torch.randn(6, 1), torch.tensor([1.0, 0, 1, 1, 0, 0])
    expected = -(duplicate * F.logsigmoid(output[:, 0]) + (1 - duplicate) * F.logsigmoid(-output[:, 0])).mean()
    torch.testing.assert_close(multitask.task_loss("para", output, duplicate), expected)
    expected = (5 / (1 + torch.exp(-output[:, 0])) - labels).square().mean()
    torch.testing.assert_close(multitask.task_loss("sts", output, labels), expected)
    cosine = multitask.task_loss("sts", 3 * labels[:, None], labels, sts_loss="cosine")
    assert cosine.item() == pytest.approx(0, abs=1e-6)


def test_the_cosine_of_one_output_node_has_no_gradient() -> None:
    output = torch.randn(6, 1, requires_grad=True)
    F.cosine_embedding_loss(output, torch.rand(6, 1) + 0.1, torch.ones(6)).backward()
    assert output.grad is not None
    assert output.grad.abs().max() < 1e-6
    multitask.task_loss("sts", output, torch.rand(6), sts_loss="cosine").backward()
    assert output.grad.abs().max() > 1e-3


def test_pearson_agrees_with_numpy_and_a_constant_orders_nothing() -> None:
    x, y = torch.randn(50), torch.randn(50)
    assert multitask.pearson(x, y) == pytest.approx(
        torch.corrcoef(torch.stack([x, y]).double())[0, 1].item(), abs=1e-12
    )
    assert multitask.pearson(torch.full((50,), 0.3), y) == 0.0


def test_batches_hold_every_row_once_a_pass() -> None:
    stream = multitask.endless_batches(10, 4, seed=1)
    drawn = [index for _ in range(5) for index in next(stream)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    again = multitask.endless_batches(10, 4, seed=1)
    assert [next(again) for _ in range(2)] == [drawn[:4], drawn[4:8]]


def test_affinity_errors_leave_padding_out(sets: encoders.EncodedSets) -> None:
    torch.manual_seed(0)
    model = encoders.build_multitask_model(TINY, sets.tokenizer).eval()
    rows = sets.valid["sst"]
    short, _ = encoders.batch_of(rows, [0], sets.tokenizer.pad_token_id)
    padded = {name: F.pad(column, (0, 4), value=0) for name, column in short.items()}
    found = multitask.affinity_errors(model, short)
    assert list(found) == ["affinity.0"]
    assert multitask.affinity_errors(model, padded) == pytest.approx(found, rel=1e-5)
    assert model.encoder.config._attn_implementation == "sdpa"


def test_training_lowers_the_loss_and_reaches_the_reference_scores(data: Path) -> None:
    import dataclasses

    options = dataclasses.replace(TINY, steps=30, learning_rate=2e-2, batch_size=8, dropout=0.0)
    found = multitask.train_multitask(encoders.encode_sets(read_minbert(data), options), options)
    assert found["train_loss"] < 3  # from ln 5 + ln 2 + the variance of the scores, about 4
    assert found["errors"][0]["step"] == 0
    assert found["errors"][-1]["step"] == 30
    assert {"encoder.0.query", "encoder.0.key", "encoder.0.value", "token_embedding", "affinity.0"} <= found["errors"][
        0
    ].keys()


def test_a_seed_decides_weights_and_batches_whatever_the_penalty(
    sets: encoders.EncodedSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[int]] = []
    real = multitask.batch_of
    monkeypatch.setattr(
        multitask, "batch_of", lambda rows, which, pad: drawn.append(list(which)) or real(rows, which, pad)
    )
    baseline = multitask.train_multitask(sets, TINY, seed=1)
    plain = list(drawn)
    drawn.clear()
    penalised = multitask.train_multitask(sets, TINY, seed=1, penalty={"key": 10.0, "form": "gram"})
    assert drawn == plain
    assert penalised["errors"][0] == baseline["errors"][0]
    assert penalised["errors"][-1] != baseline["errors"][-1]
    assert penalised["penalty"] > 0 == baseline["penalty"]
    again = multitask.train_multitask(sets, TINY, seed=1)
    assert again["scores"] == baseline["scores"]
    assert again["errors"] == baseline["errors"]


def test_the_penalty_of_a_cell_is_his_equation(sets: encoders.EncodedSets) -> None:
    from wellposed import OrthogonalityPenalty

    model = encoders.build_multitask_model(TINY, sets.tokenizer)
    key = model.encoder.encoder.layer[0].attention.self.key.weight
    cell = study.chosen_cells(["key:1e-2"])[1]
    expected = 1e-2 * torch.linalg.matrix_norm(key @ key.T - torch.eye(16))
    torch.testing.assert_close(OrthogonalityPenalty(model.encoder, **cell.penalty())(), expected)
    assert gram_penalty(key, squared=False, side="rows").item() > 0
    assert orthogonality_error(key).item() > 0


def test_a_pretrained_encoder_is_loaded_from_a_folder(
    data: Path, sets: encoders.EncodedSets, encoder: Path, tmp_path: Path
) -> None:
    import dataclasses

    options = dataclasses.replace(TINY, encoder=str(encoder), steps=1)
    loaded = encoders.encode_sets(read_minbert(data), options)
    assert loaded.train["sts"].columns == sets.train["sts"].columns
    model = encoders.build_multitask_model(options, loaded.tokenizer)
    torch.testing.assert_close(
        model.encoder.embeddings.word_embeddings.weight,
        BertModel.from_pretrained(encoder).embeddings.word_embeddings.weight,
    )
    assert multitask.train_multitask(loaded, options)["scores"].keys() == {"sst", "para", "sts", "overall"}
    with pytest.raises(ConfigError, match="cannot be loaded"):
        encoders.encode_sets(read_minbert(data), dataclasses.replace(TINY, encoder=str(tmp_path / "nothing")))


def test_a_pretrained_encoder_is_fine_tuned_gently_unless_asked(
    data: Path, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[MultiTaskOptions] = []
    monkeypatch.setattr("wellposed.cli._sweep.open_sweep", lambda settings, _: asked.append(settings.options))
    monkeypatch.setattr("wellposed.cli._sweep.run_sweep", lambda *_, **__: False)
    words = ["sweep", "mcgrath2024", "--data", str(data), "--out", str(tmp_path)]
    for more in ([], ["--encoder", str(encoder)], ["--encoder", str(encoder), "--learning-rate", "1e-4"]):
        assert main([*words, *more, "--sts-loss", "cosine"]) == 130
    assert [options.learning_rate for options in asked] == [1e-3, 5e-5, 1e-4]
    assert {options.sts_loss for options in asked} == {"cosine"}


def test_bad_options_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"(?s)steps = 0.*learning_rate = -1.*sts_loss = 'l1'"):
        MultiTaskOptions(steps=0, learning_rate=-1, sts_loss="l1")


def test_a_sweep_stopped_in_the_middle_goes_on_and_ends_as_if_it_had_not(data: Path, tmp_path: Path) -> None:
    whole = settings(data, tmp_path / "whole", "key:1e-2")
    sweep.open_sweep(whole, "never")
    assert sweep.run_sweep(whole, jobs=1, announce=lambda _: None)

    parts = settings(data, tmp_path / "parts", "key:1e-2")
    sweep.open_sweep(parts, "never")
    asked: list[int] = []
    with pytest.raises(sweep.Cancelled):
        sweep.work(parts, announce=lambda _: None, stop=lambda: asked.append(1) or len(asked) > 5)
    assert len(sweep.finished_results(parts)) == 1
    with pytest.raises(ConfigError, match="--resume auto"):
        sweep.open_sweep(parts, "never")
    sweep.open_sweep(parts, "auto")
    assert sweep.work(parts, announce=lambda _: None, stop=lambda: False) == 1
    timeless = [
        [{k: v for k, v in run.items() if "seconds" not in k} for run in sweep.finished_results(one)]
        for one in (whole, parts)
    ]
    assert timeless[0] == timeless[1]


def test_cells_of_values_and_embeddings_join_a_sweep_that_began_without_them(data: Path, tmp_path: Path) -> None:
    import dataclasses

    one = settings(data, tmp_path / "out", "key:1e-2")
    sweep.open_sweep(one, "never")
    assert sweep.run_sweep(one, jobs=1, announce=lambda _: None)
    more = dataclasses.replace(one, cells=study.chosen_cells(["key:1e-2", "value:1e-2", "embedding:1e-2"]))
    sweep.open_sweep(more, "auto")
    assert sweep.run_sweep(more, jobs=1, announce=lambda _: None)
    baseline, key, value, embedding = sweep.finished_results(more)
    assert [run["cell"] for run in (baseline, key, value, embedding)] == [cell.name for cell in more.cells]
    for run, moved in ((value, "encoder.0.value"), (embedding, "token_embedding")):
        assert run["penalty"] > 0
        assert run["errors"][-1][moved] != baseline["errors"][-1][moved]


def test_a_trial_whose_process_died_is_trained_again_and_a_living_one_is_not(data: Path, tmp_path: Path) -> None:
    one = settings(data, tmp_path / "out", "key:1e-2")
    sweep.open_sweep(one, "never")
    taken = sweep._take(one)
    assert taken is not None
    sweep.open_sweep(one, "auto")  # its lock is held: it is at work
    assert waiting(one) == 1
    taken[2].close()  # as the system does when the process dies
    sweep.open_sweep(one, "auto")
    assert waiting(one) == 2
    sweep.open_sweep(one, "auto")  # nothing is enqueued twice
    assert waiting(one) == 2


def waiting(one: sweep.SweepSettings) -> int:
    from optuna.trial import TrialState

    return len(sweep._study(one).get_trials(states=(TrialState.WAITING,)))


def test_other_settings_and_foreign_folders_are_refused_and_seeds_may_be_added(data: Path, tmp_path: Path) -> None:
    import dataclasses

    one = settings(data, tmp_path / "out", "key:1e-2")
    sweep.open_sweep(one, "never")
    other = dataclasses.replace(one, options=dataclasses.replace(TINY, steps=9))
    with pytest.raises(ConfigError, match="steps: 3 then, 9 now"):
        sweep.open_sweep(other, "auto")
    sweep.open_sweep(dataclasses.replace(one, seeds=(0, 1)), "auto")
    assert waiting(one) == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="is no sweep to resume"):
        sweep.open_sweep(dataclasses.replace(one, out=str(tmp_path / "mine")), "auto")


def test_a_training_that_diverges_is_a_result(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: Any, penalty: Any, **__: Any) -> dict[str, Any]:
        if penalty is not None:
            raise ConvergenceError("step 2: not finite")
        scores = {"sst": 0.3, "para": 0.6, "sts": 0.1, "overall": 0.48}
        return {"scores": scores, "errors": [{"step": 0, "encoder.0.key": 1.0}], "cpu_seconds": 1.0}

    monkeypatch.setattr(multitask, "train_multitask", diverge)
    monkeypatch.setitem(study.SCALES, "mini", TINY)
    out = tmp_path / "out"
    words = [
        "sweep",
        "mcgrath2024",
        "--data",
        str(data),
        "--out",
        str(out),
        "--cells",
        "key:1e-2",
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    assert main(words) == 1
    assert "Failed: key:1e-2 seed 0: step 2: not finite" in (out / "results.md").read_text()


def test_a_tracker_is_told_of_every_training_and_of_the_tables(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any, penalty: Any, **__: Any) -> dict[str, Any]:
        if penalty is not None:
            raise ConvergenceError("step 2: not finite")
        scores = {"sst": 0.3, "para": 0.6, "sts": 0.1, "overall": 0.48}
        errors = [{"step": step, "encoder.0.key": 1.0 + step} for step in (0, 2)]
        return {"scores": scores, "errors": errors, "cpu_seconds": 1.0}

    monkeypatch.setattr(Notebook, "records", [])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    monkeypatch.setattr(multitask, "train_multitask", train)
    monkeypatch.setitem(study.SCALES, "mini", TINY)
    words = ["sweep", "mcgrath2024", "--data", str(data), "--out", str(tmp_path / "out"), "--cells", "key:1e-2"]
    assert main([*words, "--seeds", "1", "--jobs", "1", "--track", "notebook"]) == 1
    baseline, failed, tables = Notebook.records
    assert baseline.config is not None
    assert (baseline.config["cell"], baseline.config["seed"]) == ("baseline", 0)
    assert baseline.rows[:2] == [(step, {"orthogonality_error/encoder.0.key": 1.0 + step}) for step in (0, 2)]
    assert baseline.rows[2][1]["final/valid/overall"] == 0.48
    assert failed.rows == [(0, {"final/succeeded": 0})]
    assert tables.rows[0][1]["final/baseline/sst"] == 0.3
    assert set(tables.shown) == {"figure-1", "figure-3", "table-1"}


def test_the_command_writes_his_figures_and_table(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(study.SCALES, "mini", TINY)
    out = tmp_path / "out"
    cells = "key:1e-2,householder:1e-6"
    words = [
        "sweep",
        "mcgrath2024",
        "--data",
        str(data),
        "--out",
        str(out),
        "--seeds",
        "2",
        "--jobs",
        "1",
        "--cells",
        cells,
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for said in ("paper says", "we got (key:1e-2)", "Holm over every cell", "QR loss by householder", "Drift of the"):
        assert said in printed
    with (out / "table-1.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["row"], row["source"]) for row in table][:4] == [
        ("baseline", "paper"), ("baseline", "ours"), ("key", "paper"), ("key", "ours"),
    ]  # fmt: skip
    runs = [json.loads((out / "trials" / "key-1e-2" / f"seed-{seed}.json").read_text()) for seed in (0, 1)]
    scores = [run["scores"]["overall"] for run in runs]
    assert float(table[3]["overall"]) == pytest.approx(sum(scores) / 2)
    assert float(table[3]["overall_se"]) == pytest.approx(abs(scores[0] - scores[1]) / 2)
    with (out / "figure-3.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["error_over_initial"]) == 1 for row in rows if row["step"] == "0")
    assert {row["step"] for row in rows} == {"0", "2", "3"}
    for name in ("figure-1.svg", "figure-3.svg", "table-1.svg", "sweep.csv", "results.md"):
        assert (out / name).stat().st_size > 200
    assert main([*words, "--resume", "auto"]) == 0  # nothing is left to train: the tables are written again
    assert main(words) == 2


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reproduced]:
    """Every recipe in one folder: the trainings of the first are those of the next."""
    out = tmp_path_factory.mktemp("made")
    names = [name for name in RECIPES if name.startswith("mcgrath2024/") and name != "mcgrath2024/pretrained"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(study.SCALES, "toy", TINY)
        found = {name: reproduce(name, scale="toy", out=out, data=str(data)) for name in names}
        trained = multitask.train_multitask
        patch.setattr(multitask, "train_multitask", lambda *_, **__: pytest.fail("trained twice"))
        again = reproduce("mcgrath2024/table-1", scale="toy", out=out, data=str(data))
        patch.setattr(multitask, "train_multitask", trained)
    assert again.result.rows == found["mcgrath2024/table-1"].result.rows
    return found


def test_recipes_train_only_the_cells_they_need_and_each_once(made: dict[str, Reproduced]) -> None:
    out = made["mcgrath2024/qr"].files[0].parent
    trained = sorted(path.parent.name for path in out.glob("runs/mcgrath2024-toy/trials/*/seed-*.json"))
    assert trained == sorted(2 * [cell.folder for cell in study.grid()])
    cells = [row["cell"] for row in made["mcgrath2024/qr"].result.rows]
    assert cells == ["baseline", *(cell.name for cell in study.grid() if cell.form in study.QR_METHODS)]
    cells = [row["cell"] for row in made["mcgrath2024/figure-1"].result.rows]
    assert cells == [cell.name for cell in study.grid() if cell.form in ("none", "gram")]


def test_rows_of_the_recipes_are_the_results_of_the_trainings(made: dict[str, Reproduced]) -> None:
    done = made["mcgrath2024/table-1"]
    rows = [(row["row"], row["source"]) for row in done.result.rows]
    assert rows == [
        (name, source) for name in ("baseline", "key", "query", "key and query") for source in ("paper", "ours")
    ]
    trials = done.files[0].parent / "runs" / "mcgrath2024-toy" / "trials"
    runs = [json.loads((trials / "baseline" / f"seed-{seed}.json").read_text()) for seed in (0, 1)]
    assert done.result.rows[1]["overall"] == pytest.approx(sum(run["scores"]["overall"] for run in runs) / 2)
    drift = made["mcgrath2024/figure-3"].result.rows
    last = [row["error"] for row in drift if row["seed"] == 1 and row["step"] == 3 and row["weight"] == "encoder.0.key"]
    assert last == [runs[1]["errors"][-1]["encoder.0.key"]]
    for done in made.values():
        assert done.result.holds is None
        assert done.files[1].read_text().startswith("<?xml")
        assert "a small BERT from scratch" in done.row()


@pytest.mark.parametrize(
    ("alone", "both", "qr", "verdicts"),
    [
        (0.1, -0.1, -0.4, (True, True, True, True)),
        (-0.1, -0.1, 0.0, (False, False, False, False)),
        (0.0, 0.0, -0.4, (None, None, True, None)),
        (0.0, 0.0, 0.0, (None, None, False, False)),
    ],
)
def test_verdicts_at_mini_scale(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alone: float,
    both: float,
    qr: float,
    verdicts: tuple[bool | None, ...],
) -> None:
    def finish(settings: sweep.SweepSettings, **_: Any) -> bool:
        for key in settings.trainings():
            gain = {"none": 0.0, "gram": both if key.cell.place == "key+query" else alone}.get(key.cell.form, qr)
            overall = 0.5 + 0.001 * key.seed + gain + (1e-4 * key.seed if key.cell.form != "none" else 0.0)
            scores = {"sst": 0.3, "para": 0.6, "sts": 0.1, "overall": overall}
            errors = [{"step": step, "encoder.0.key": 1.0 - step / 10, "affinity.0": 1.0 + step} for step in (0, 1)]
            result = {"scores": scores, "errors": errors, "cpu_seconds": 1.0, "cell": key.cell.name, "seed": key.seed}
            settings.result_path(key).parent.mkdir(parents=True, exist_ok=True)
            settings.result_path(key).write_text(json.dumps({**result, "status": "success"}))
        return True

    monkeypatch.setattr(recipes, "open_sweep", lambda settings, resume: None)
    monkeypatch.setattr(recipes, "run_sweep", finish)
    holds = {
        item: reproduce(f"mcgrath2024/{item}", scale="mini", out=tmp_path, data=str(data), encoder="mine").result.holds
        for item in ("figure-1", "table-1", "qr", "pretrained", "figure-3")
    }
    assert holds == dict(zip(("figure-1", "table-1", "qr", "pretrained"), verdicts, strict=True)) | {"figure-3": True}


def test_the_recipe_of_a_pretrained_encoder(
    data: Path, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(study.SCALES, "toy", TINY)
    done = reproduce("mcgrath2024/pretrained", scale="toy", out=tmp_path, data=str(data), encoder=str(encoder))
    scores = [row for row in done.result.rows if "overall" in row]
    assert [row["cell"] for row in scores] == ["baseline", *recipes.PRETRAINED]
    trials = tmp_path / "runs" / f"mcgrath2024-{encoder.name}-toy" / "trials"
    runs = [json.loads((trials / "baseline" / f"seed-{seed}.json").read_text()) for seed in (0, 1)]
    assert scores[0]["overall"] == pytest.approx(sum(run["scores"]["overall"] for run in runs) / 2)
    first = runs[0]["scale_free_errors"][0]
    weight = BertModel.from_pretrained(encoder).encoder.layer[0].attention.self.key.weight
    gram = (weight @ weight.T).detach().double()
    cosine = gram.trace() / (16**0.5 * torch.linalg.matrix_norm(gram))
    assert first["encoder.0.key"] == pytest.approx((1 - cosine.item() ** 2) ** 0.5, rel=1e-5)
    assert first.keys() == {name for name in runs[0]["errors"][0] if not name.startswith("affinity")}
    claim = json.loads(done.files[2].read_text())
    assert claim["command"].endswith("--encoder ENCODER")
    assert claim["encoder"] == encoder.name


def test_an_encoder_is_asked_for_and_refused_where_nothing_reads_it(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --encoder FOLDER"):
        reproduce("mcgrath2024/pretrained", scale="toy", out=tmp_path, data=str(data))
    with pytest.raises(ConfigError, match=r"reads no encoder.*these do: mcgrath2024/figure-1"):
        reproduce("kim2021/figure-2", scale="toy", out=tmp_path, encoder="x")


@pytest.mark.parametrize(
    ("key", "affinity", "verdict"),
    [
        ((0.9, 0.92), (1.1, 1.2), True),
        ((0.9, 0.92), (0.8, 0.82), False),
        ((1.1, 1.12), (1.1, 1.2), False),
        ((0.9, 1.12), (1.1, 1.2), None),
        ((0.9, 0.92), (0.8, 1.3), None),
    ],
)
def test_the_drift_is_judged_by_every_weight_with_its_error(
    key: tuple[float, ...], affinity: tuple[float, ...], verdict: bool | None
) -> None:
    unread = {"encoder.0.output": (2.0, 2.0)}
    rows = [
        {"seed": seed, "step": 9, "weight": weight, "error_over_initial": ratio}
        for weight, ratios in {
            "encoder.0.key": key,
            "encoder.1.key": (0.9, 0.9),
            "affinity.0": affinity,
            **unread,
        }.items()
        for seed, ratio in enumerate(ratios)
    ]
    first = [{**row, "step": 0, "error_over_initial": 1.0} for row in rows]
    assert results.judge_drift(first + rows) is verdict
    assert results.judge_drift([]) is None


@pytest.mark.slow
def test_interrupt_then_resume_in_two_processes(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import sys; from wellposed.recipes.mcgrath2024 import grid as study; from wellposed.cli import main\n"
        "from wellposed.recipes.mcgrath2024.multitask_options import MultiTaskOptions\n"
        f"study.SCALES['mini'] = MultiTaskOptions(**{TINY.to_dict()!r} | {{'steps': 60}})\n"
        "if __name__ == '__main__': raise SystemExit(main(sys.argv[1:]))\n"
    )
    script = tmp_path / "command.py"
    script.write_text(code)
    words = ["sweep", "mcgrath2024", "--data", str(data), "--out", str(out), "--seeds", "2", "--cells", "key:1e-2"]
    started = subprocess.Popen(
        [sys.executable, str(script), *words, "--jobs", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while not list(out.glob("trials/*/seed-*.lock")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(started.pid, signal.SIGINT)
    _, complaint = started.communicate(timeout=200)
    assert started.returncode == 130, complaint
    assert "--resume auto" in complaint
    done = len(list(out.glob("trials/*/seed-*.json")))
    assert done < 4
    again = subprocess.run(
        [sys.executable, str(script), *words, "--resume", "auto", "--jobs", "2", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert not re.search(r"^\[\d", again.stdout, re.MULTILINE), "--quiet: no line of progress, of no process"
    assert len(list(out.glob("trials/*/seed-*.json"))) == 4
    assert (out / "table-1.svg").exists()
