"""Parameter groups by what may decay; `MuonAndAdamW`: bit for bit the two optimizers it is made of."""

import copy

import pytest
import torch
from tests.support.constrained import NAMES, Mixed, problem, same_state, train
from torch import nn

from wellposed.constrain import MuonAndAdamW, decay_groups, parameter_groups
from wellposed.errors import ConfigError


def test_its_steps_are_those_of_muon_and_of_adamw():
    model = Mixed()
    twin = copy.deepcopy(model)
    both = MuonAndAdamW(model, lr=1e-2, adamw_lr=1e-3, weight_decay=0.1, adamw="head")
    matrices = [getattr(twin, name).weight for name in NAMES]
    biases = [parameter for parameter in twin.parameters() if parameter.ndim == 1]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1)
    groups = [{"params": [twin.head.weight], "weight_decay": 0.1}]
    groups += [{"params": biases, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3)
    x, y = problem()
    for _ in range(5):
        train(model, both, 1)
        twin.zero_grad()
        nn.functional.mse_loss(twin(x), y).backward()
        muon.step()
        adamw.step()
    assert same_state(model, twin)


def test_embeddings_and_what_is_tied_to_them_go_to_adamw():
    model = nn.ModuleDict(
        {"words": nn.Embedding(9, 4), "mix": nn.Linear(4, 4), "head": nn.Linear(4, 9, bias=False)}
    )
    model["head"].weight = model["words"].weight
    optimizer = MuonAndAdamW(model)
    first = optimizer.param_groups[0]
    assert first["method"] == "muon"
    assert [tuple(entry.shape) for entry in first["params"]] == [(4, 4)]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 3


def test_schedules_and_saved_states_reach_both():
    model = Mixed()
    optimizer = MuonAndAdamW(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, 2)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1.5e-4]
    weights, state = model.state_dict(), optimizer.state_dict()
    other = Mixed()
    other.load_state_dict(weights)
    fresh = MuonAndAdamW(other, lr=7.0)
    fresh.load_state_dict(copy.deepcopy(state))
    assert train(other, fresh, 3) == train(model, optimizer, 3)


def test_a_closure_runs_once():
    model = Mixed()
    optimizer = MuonAndAdamW(model)
    x, y = problem()
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        calls.append(float(loss.detach()))
        return calls[-1]

    assert optimizer.step(closure) == calls[0]
    assert len(calls) == 1


def test_a_model_without_hidden_matrices_is_refused():
    with pytest.raises(ConfigError, match=r"Embedding has no trainable matrix.*AdamW"):
        MuonAndAdamW(nn.Embedding(4, 4))


def test_groups_by_what_may_decay():
    owner = nn.ModuleDict(
        {
            "emb": nn.Embedding(5, 4),
            "encoder": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
            "special": nn.Linear(4, 3, bias=False),
            "att": nn.MultiheadAttention(4, 2),
        }
    )
    owner.norm.requires_grad_(False)
    names = {id(parameter): name for name, parameter in owner.named_parameters()}
    free, held = parameter_groups(owner, 0.1, where=["encoder", "emb"])
    assert (free["weight_decay"], held["weight_decay"]) == (0.1, 0.0)
    assert [names[id(parameter)] for parameter in free["params"]] == [
        "special.weight", "att.in_proj_weight", "att.out_proj.weight",
    ]  # fmt: skip
    assert [names[id(parameter)] for parameter in held["params"]] == [
        "emb.weight", "encoder.weight", "encoder.bias", "att.in_proj_bias", "att.out_proj.bias",
    ]  # fmt: skip
    everything = parameter_groups(owner, 0.0)
    assert [group["weight_decay"] for group in everything] == [0.0, 0.0]
    (alone,) = decay_groups(nn.Linear(2, 2, bias=False), 0.3)
    assert alone["weight_decay"] == 0.3
    (alone,) = decay_groups(nn.LayerNorm(2), 0.3)
    assert alone["weight_decay"] == 0.0
    for decay in (-0.1, float("nan")):
        with pytest.raises(ConfigError, match=r"weight_decay = .*, expected a finite number >= 0"):
            parameter_groups(owner, decay)
    with pytest.raises(ConfigError, match="no parameter that trains"):
        parameter_groups(owner.requires_grad_(False), 0.1)
