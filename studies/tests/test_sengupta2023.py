"""The recipes of sengupta2023: each runs at toy size, and what they measure is checked by another
route."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from studies.tests.support.finished_runs import finished

from wellposed.errors import ConfigError, DataError
from wellposed.models import build_model
from wellposed_studies.recipe import Request
from wellposed_studies.reproduce import reproduce
from wellposed_studies.sengupta2023 import costs, layers, states
from wellposed_studies.sengupta2023 import trained as trained_models
from wellposed_studies.study import FinishedRun


@pytest.mark.parametrize("table", ["table-2", "table-3"])
def test_data_of_another_kind_is_no_reason_for_builtin_data(table, tmp_path):
    (tmp_path / "piano").mkdir()
    message = r"piano: is none of .*(ptb|imdb).* and holds none; give one, or leave --data"
    options = {"out": tmp_path / "out", "data": str(tmp_path / "piano")}
    with pytest.raises(DataError, match=message):
        reproduce(f"sengupta2023/{table}", scale="toy", **options)


def test_table_5_gives_the_papers_numbers_over_ten(tmp_path):
    result = costs.table_5(Request("mini", tmp_path))
    rows = {row["model"]: row for row in result.rows}
    assert [rows[name]["closed_formula"] for name in ("TransJect, E = 1", "TransJect, E = 4", "TransJect, E = 8")] == [
        6_617_869, 16_073_485, 28_680_973,
    ]  # fmt: skip
    for name, printed in costs.PRINTED.items():
        assert round(rows[name]["closed_formula"] / 1e5, 0) == round(printed, 0)
    assert all(row["counted"] == row["closed_formula"] for row in rows.values())
    for name in ("Transformer", "Transformer, d_ff = d"):
        assert rows[name]["wellposed_model"] == rows[name]["closed_formula"]
    assert rows["TransJect, E = 4"]["wellposed_model"] == 16_042_247
    assert result.holds is False
    assert "every printed value is ten times ours" in result.got


def test_printed_averages_are_the_means_of_the_printed_tasks():
    tasks = [f"lra-{name}" for name in ("listops", "text", "retrieval", "pathfinder", "image")]
    for index, average in enumerate(trained_models.PAPER["average"]):
        mean = math.fsum(trained_models.PAPER[task][index] for task in tasks) / 5
        assert mean == pytest.approx(average, abs=0.051)
    big_bird = 39.3
    synthesizer = 89.1
    assert trained_models.PAPER["lra-listops"][3] - big_bird == pytest.approx(2.9), "printed: 2.3 %"
    rivals = [*trained_models.PAPER["ag_news"][:3], synthesizer]
    assert trained_models.PAPER["ag_news"][4] - max(rivals) == pytest.approx(0.6), "printed: 1.1 %"


def test_each_model_keeps_the_rate_that_is_best_on_valid_by_a_seed_that_is_not_reported(
    data, tmp_path, monkeypatch
):
    request = Request("medium", tmp_path, str(data))
    study = trained_models.text_study(request, "imdb")
    best = {"post_ln": 9e-3, "transject": 3e-2}
    planned = []

    def trained(request, grid, **_):
        del request
        planned.extend(grid)
        runs = []
        for folder, _, config in grid:
            accuracy = -abs(config.train.learning_rate - best[config.variant])
            runs.append(FinishedRun(config, folder, {"accuracy,valid": accuracy}))
        return runs

    monkeypatch.setattr(trained_models, "train_grid", trained)
    tuned = trained_models.tuned_study(request, study, None, tuple(best))
    assert {variant: tuned.sizes.rates[variant] for variant in best} == best
    rates = [(run.config.variant, run.config.train.learning_rate) for run in planned]
    three = [("post_ln", 1e-3), ("post_ln", 3e-3), ("post_ln", 9e-3)]
    three += [("transject", 3e-2), ("transject", 1e-1), ("transject", 3e-1)]
    assert rates == [*three, ("post_ln", 3e-2), ("transject", 1e-2)], (
        "both best rates were at an end"
    )
    assert {run.config.train.seed for run in planned} == {trained_models.TUNING_SEED}
    assert len({run.folder for run in planned}) == 8
    assert trained_models.tuned_study(request, tuned, None, tuple(best)) == tuned
    assert len(planned) == 8, "a study is tuned once"


def test_paper_scale_has_the_papers_numbers(tmp_path):
    imdb = trained_models.text_study(Request("paper", tmp_path), "imdb")
    config = trained_models.run_config(imdb, {"data": "x"}, "transject", 0)
    model = config.model
    train = config.train
    shape = (model.hidden_size, model.num_hidden_layers, model.num_experts, model.pooling)
    assert shape == (512, 6, 4, "mean")
    adam = (train.learning_rate, train.adam_beta1, train.adam_beta2, train.adam_epsilon)
    assert adam == (5e-4, 0.9, 0.98, 1e-9)
    assert (train.batch_size, train.patience, imdb.sizes.options["max_length"]) == (32, 4, 512)


def test_every_variant_trains_the_same_steps_on_the_same_batches(tmp_path, data):
    study = trained_models.text_study(Request("mini", tmp_path, str(data)), "imdb")
    trains = [
        trained_models.run_config(study, {}, variant, 1).train
        for variant in trained_models.VARIANTS
    ]
    assert (
        len({(train.steps, train.batch_size, train.seed, train.schedule) for train in trains}) == 1
    )


def test_data_is_found_in_a_folder_or_named_itself(data, tmp_path):
    assert trained_models.find_data(str(data), ("imdb",)) == str(Path(data) / "imdb")
    assert trained_models.find_data(str(Path(data) / "imdb"), ("imdb",)) == str(Path(data) / "imdb")
    assert trained_models.find_data(str(data), ("cifar10",)) is None
    assert trained_models.find_data(None, ("imdb",)) is None
    with pytest.raises(DataError, match="no such file or folder; give a folder that holds imdb"):
        trained_models.find_data(str(tmp_path / "nothing"), ("imdb",))
    with pytest.raises(
        ConfigError, match="needs data: give data=FOLDER that holds imdb and ag_news"
    ):
        reproduce("sengupta2023/table-1", scale="toy", out=tmp_path)


def batches():
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return [{"input_ids": torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]]), "attention_mask": mask}]


def classifier(architecture, **options):
    return build_model(architecture, "sequence_classification", vocab_size=13, **options).eval()


def test_layers_hold_the_ratios_of_token_distances():
    model = classifier("wellposed", hidden_size=8, num_attention_heads=2).double()
    layers = states.measure_layers(model, batches())
    with torch.no_grad():
        hidden = model.model(**batches()[0], output_hidden_states=True).hidden_states
    for row, count in ((0, 5), (1, 3)):
        last, first = (torch.pdist(hidden[layer][row, :count]) for layer in (-1, 0))
        mean = float((last / first).mean())
        assert layers.factors["euclidean"][-1][row] == pytest.approx(mean, rel=1e-9)
    assert len(layers.entropies) == 3
    assert layers.entropy() == pytest.approx(math.fsum(row[0] for row in layers.entropies[1:]) / 2)


def test_heads_and_experts_are_seen_and_hooks_are_gone():
    plain = classifier("wellposed", hidden_size=16, num_attention_heads=2)
    parts = states.part_entropies(plain, batches())
    assert [len(row) for row in parts] == [2, 2]
    model = classifier("transject", hidden_size=16, num_experts=3)
    assert [len(row) for row in states.part_entropies(model, batches())] == [3, 3]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    weights = states.gate_weights(model, batches())
    assert [len(layer) for layer in weights] == [2, 2]
    assert all(math.fsum(row) == pytest.approx(1) for layer in weights for row in layer)
    with torch.no_grad():
        for layer in model.model.stack.layers:
            layer.residual.weight.fill_(0.5)
    assert states.residual_weights(model) == [pytest.approx(math.tanh(0.5))] * 2


def test_a_diverged_run_is_without_metrics(data, tmp_path):
    request = Request("toy", tmp_path, str(data))
    study = trained_models.text_study(request, "imdb")
    wild = replace(study, name="wild", sizes=replace(study.sizes, learning_rate=1e30, steps=6))
    _, (broken,) = trained_models.train_study(request, wild, variants=("rezero",), seeds=[0])
    assert broken.metrics == {}
    assert math.isnan(broken.metric("accuracy,test"))


@pytest.mark.parametrize(
    ("transformer", "holds", "behind"),
    [
        (0.7, False, {"post_ln"}),  # too low, whatever TransJect does
        (1.4, False, {"transject", "post_ln", "rezero", "orthogonal"}),
        (4.0, True, {"transject", "post_ln", "rezero", "orthogonal"}),
    ],
)
def test_a_transformer_that_contradicts_alone_is_judged_alone(
    transformer, holds, behind, tmp_path, monkeypatch
):
    def measured(_request, study, variants):
        def layers_of(value, seed):
            entropies = [[0.0], [value + seed / 100]]
            factors = {metric: [[value + seed / 1000]] for metric in states.METRICS}
            return states.Layers(factors, entropies)

        return {
            study.model_name(variant): [
                (
                    finished("text_classification", variant, {"accuracy,test": 0.5}, seed=seed),
                    layers_of(1.0 if variant == "transject" else transformer, seed),
                    layers_of(1.0, seed),
                )
                for seed in range(3)
            ]
            for variant in variants
        }

    monkeypatch.setattr(layers, "_measured", measured)
    monkeypatch.setattr(layers, "figure_studies", lambda asked: [layers.text_study(asked, "imdb")])
    judged = []
    monkeypatch.setattr(layers, "judged", lambda *arguments, **_: judged.extend(arguments[4:6]))
    layers.figure_3a(Request("toy", tmp_path))
    assert judged[0] is holds
    assert {run.variant for run in judged[1]} == behind
