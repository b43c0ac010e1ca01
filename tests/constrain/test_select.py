"""Selected weights and their order, errors if there are none, groups by weight decay, and
`MuonAndAdamW`, bit for bit the two optimizers it is made of."""

import copy
from collections import OrderedDict

import pytest
import torch
from tests.support.constrained import NAMES, Mixed, problem, same_state, train
from tests.support.many_families import FAMILIES
from torch import nn
from torch.nn.utils import parametrizations

import wellposed as wp
from wellposed.constrain import (
    MuonAndAdamW,
    decay_groups,
    parameter_groups,
    select_weights,
    sigma_reparam_,
)
from wellposed.errors import ConfigError, RoleNotFoundError


class Special(nn.Linear):
    """A subclass counts as its class."""


def model():
    parts = {"emb": nn.Embedding(5, 4), "encoder": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    rest = {"special": Special(4, 3, bias=False), "att": nn.MultiheadAttention(4, 2)}
    return nn.Sequential(OrderedDict({**parts, **rest}))


def labels(where, owner=None, **options):
    return [selected.label for selected in select_weights(owner or model(), where, **options)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("encoder", ["encoder.weight"]),
        ("encoder.weight", ["encoder.weight"]),
        ("encoder.bias", ["encoder.bias"]),
        ("enc*", ["encoder.weight"]),
        ("encoder.*", ["encoder.weight", "encoder.bias"]),
        ("*.encoder", ["encoder.weight"]),
        ("re:emb|norm", ["emb.weight", "norm.weight"]),
        ("re:e.*", ["emb.weight", "encoder.weight"]),
        ("*.bias", ["encoder.bias", "norm.bias", "att.out_proj.bias"]),
        (["special", "emb"], ["emb.weight", "special.weight"]),
        (["emb", "emb"], ["emb.weight"]),
        (nn.Linear, ["encoder.weight", "special.weight", "att.out_proj.weight"]),
        ([nn.Embedding, "encoder"], ["emb.weight", "encoder.weight"]),
        (Special, ["special.weight"]),
    ],
)
def test_names_and_types_in_the_order_of_the_model(where, expected):
    assert labels(where) == expected


def test_parts_of_a_fused_weight_come_one_by_one():
    owner = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    rows = [f"self_attn.in_proj_weight[{start}:{start + 4}]" for start in (0, 4, 8)]
    assert labels("self_attn", owner) == rows
    assert labels(("value", "query"), owner) == [rows[0], rows[2]]
    assert labels("key", owner) == rows[1:2]
    assert labels(["linear1", "key"], owner) == [rows[1], "linear1.weight"]
    selected = select_weights(owner, "key")[0]
    weight = owner.self_attn.in_proj_weight
    assert torch.equal(selected.matrix_in(weight), weight[4:8])
    assert (selected.rows, selected.transposed) == (range(4, 8), False)
    assert selected.parameter_name == "self_attn.in_proj_weight"
    assert selected.roles == {"key"}


def test_the_models_own_weight_has_no_path():
    linear = nn.Linear(3, 2)
    assert labels("weight", linear) == ["weight"]
    assert labels(nn.Linear, linear) == ["weight"]
    assert labels("0", nn.Sequential(linear)) == ["0.weight"]


def test_a_weight_that_is_computed_has_no_parameter():
    owner = nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 3))
    weights = select_weights(owner, nn.Linear)
    is_computed = {selected.label: selected.parameter is None for selected in weights}
    assert is_computed == {"0.weight": True, "1.weight": False}


NOTHING = {
    "encodr": "where='encodr' is no role, and matches no module with a weight and no parameter; nearest: encoder",
    nn.Conv1d: "is a Conv1d; types with one: Embedding, LayerNorm, Linear",
}


@pytest.mark.parametrize(("where", "message"), NOTHING.items())
def test_what_matches_nothing_is_said(where, message):
    parts = {"emb": nn.Embedding(5, 4), "encoder": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    owner = nn.ModuleDict(parts)
    with pytest.raises(RoleNotFoundError, match=rf"{message}$"):
        select_weights(owner, where)
    with pytest.raises(RoleNotFoundError, match=rf"{message}\n.*'nothing'.*$"):
        select_weights(owner, [where, "emb", "nothing"])


def test_what_is_no_selection_and_a_model_without_weights():
    with pytest.raises(RoleNotFoundError, match="is no role, and matches no module"):
        select_weights(nn.ReLU(), "a")
    with pytest.raises(RoleNotFoundError, match="types with one: none"):
        select_weights(nn.ReLU(), nn.Linear)
    with pytest.raises(ConfigError, match=r"expected a role"):
        select_weights(nn.Linear(2, 2), None)
    for bad in (["a", 3], [], {"a": 1}, 7, lambda path, module: True):
        with pytest.raises(ConfigError, match="a name, an fnmatch pattern"):
            select_weights(nn.Linear(2, 2), bad)
    with pytest.raises(ConfigError, match="is not a regular expression"):
        select_weights(nn.Linear(2, 2), "re:(")


def test_its_steps_are_those_of_muon_and_of_adamw():
    model = Mixed()
    twin = copy.deepcopy(model)
    both = MuonAndAdamW(model, lr=1e-2, adamw_lr=1e-3, weight_decay=0.1, muon=NAMES)
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


def test_schedules_reach_both():
    model = Mixed()
    optimizer = MuonAndAdamW(model, muon=NAMES)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, 2)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1.5e-4, 1.5e-4]


def test_a_closure_runs_once():
    model = Mixed()
    optimizer = MuonAndAdamW(model, muon=NAMES)
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


@pytest.mark.parametrize("build", [Mixed, lambda: nn.Embedding(4, 4)])
def test_a_model_without_hidden_matrices_is_refused(build):
    with pytest.raises(ConfigError, match=r"no trainable matrix .*muon=torch.nn.Linear.*AdamW"):
        MuonAndAdamW(build())


def test_groups_by_what_may_decay():
    owner = model()
    owner.norm.requires_grad_(False)
    names = {id(parameter): name for name, parameter in owner.named_parameters()}
    free, constrained = parameter_groups(owner, 0.1, where=["encoder", "emb"])
    assert (free["weight_decay"], constrained["weight_decay"]) == (0.1, 0.0)
    assert [names[id(parameter)] for parameter in free["params"]] == [
        "special.weight", "att.in_proj_weight", "att.out_proj.weight",
    ]  # fmt: skip
    assert [names[id(parameter)] for parameter in constrained["params"]] == [
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


GROUPED = {
    "constrain_": (
        lambda model: wp.constrain_(model, torch.optim.SGD(model.parameters()), where="layers"),
        "give per='head', or name the whole weight",
    ),
    "sigma_reparam_": (sigma_reparam_, r"interleave in these weights; name the whole weight"),
    "parameter_groups": (lambda model: parameter_groups(model, 0.1, where="layers"), ""),
    "MuonAndAdamW": (lambda model: MuonAndAdamW(model, where="layers"), ""),
    "MuonAndAdamW, muon": (lambda model: MuonAndAdamW(model, muon="layers"), ""),
}


@pytest.mark.parametrize("verb", GROUPED)
def test_rows_of_roles_that_interleave_matter_to_verbs_that_read_rows(verb):
    """Each is told what it can do itself: only `constrain_` takes heads apart."""
    call, message = GROUPED[verb]
    model = FAMILIES["deepseek-v3"]()
    if not message:
        call(model)
        return
    with pytest.raises(ConfigError, match=f"{verb}: .*{message}"):
        call(model)


@pytest.mark.parametrize("muon", [nn.Linear, "*", ["0", "1"]])
def test_matrices_that_layers_compute_are_named_if_muon_was_to_step_them(muon, caplog):
    owner = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    optimizer = MuonAndAdamW(owner, muon=muon)
    assert [group["method"] for group in optimizer.param_groups].count("muon") == 1
    assert "AdamW steps the parameters of these matrices" in caplog.text
    assert "0.weight" in caplog.text
