"""How far a penalty moves the weights, beside what it does move them."""

import pytest
import torch

from wellposed.model_options import ModelOptions
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.loop.build import load_run_model
from wellposed_lab.training.loop.penalty_pull import penalty_moves, pulls_of
from wellposed_lab.training.loop.train import train

SMALL = ModelOptions(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
DATA = {"limit_chars": 9000, "seq_len": 16}


def base(**options):
    settings = {"steps": 20, "batch_size": 8, "eval_batches": 1, "schedule": "constant"}
    settings |= {"max_grad_norm": 0.0, "weight_decay": 0.0, **options}
    return RunConfig("char_lm", DATA, model=SMALL, train=TrainOptions(**settings))


def moved_in_fact(plain, penalised, names):
    """Distance of the weights of two runs, beside the size of those without the penalty."""
    first, second = (
        dict(load_run_model(folder)[0].named_parameters()) for folder in (plain, penalised)
    )
    distance = sum(float((first[n] - second[n]).detach().double().norm()) ** 2 for n in names)
    size = sum(float(first[n].detach().double().norm()) ** 2 for n in names)
    return (distance / size) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_estimate_has_the_order_of_what_the_weights_move(optimizer, tmp_path):
    config = base(optimizer=optimizer)
    train(apply_variant("post_ln", config), tmp_path / "plain", progress=False)
    run = train(apply_variant("attention:1e-4", config), tmp_path / "penalised", progress=False)
    estimate = run.result["train_info"]["penalty_moves"]
    names = [f"model.layers.0.attention.{part}_proj.weight" for part in "qkvo"]
    model, _ = load_run_model(tmp_path / "plain")
    names = [
        n
        for n, _ in model.named_parameters()
        if n.endswith(tuple(x.partition("attention.")[2] for x in names))
    ]
    fact = moved_in_fact(tmp_path / "plain", tmp_path / "penalised", names)
    assert fact / 5 <= estimate <= fact * 5


def test_one_step_of_sgd_is_moved_by_rate_times_pull():
    model = torch.nn.Linear(4, 4, bias=False).double()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = (model.weight @ model.weight.T - torch.eye(4)).square().sum()
    pulls = pulls_of(penalty, model)
    penalty.backward()
    optimizer.step()
    after = model.weight.detach()
    fact = float((after - before).norm() / after.norm())
    assert penalty_moves(pulls, model, optimizer, 0.1) == pytest.approx(fact, rel=1e-6)


@pytest.mark.parametrize("options", [{"optimizer": "muon"}, {"compile": True}])
def test_where_it_is_not_known_nothing_is_said(options, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    config = apply_variant("attention:1e-4", base(steps=2, **options))
    run = train(config, tmp_path / "run", progress=False)
    assert "penalty_moves" not in run.result["train_info"]
    plain = train(base(steps=2), tmp_path / "plain", progress=False)
    assert "penalty_moves" not in plain.result["train_info"]


def test_reading_the_pull_changes_no_weight(tmp_path, monkeypatch):
    config = apply_variant("oc3:1e-2", base(steps=3))
    train(config, tmp_path / "read", progress=False)
    monkeypatch.setattr("wellposed_lab.training.loop.run.Run.reads_pulls", lambda _: False)
    train(config, tmp_path / "not", progress=False)
    first, second = (load_run_model(tmp_path / name)[0].state_dict() for name in ("read", "not"))
    assert all(torch.equal(first[name], second[name]) for name in first)
