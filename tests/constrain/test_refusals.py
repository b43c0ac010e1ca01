"""Refusals of `constrain_`: by name, all at once, before any change. A constraint that is lost
(another optimizer steps, or the optimizer is a copy) gives one warning."""

import copy
import io
import pickle
import warnings
from math import inf, nan
from typing import ClassVar

import pytest
import torch
from tests.support.constrained import (
    NAMES,
    Mixed,
    constrained,
    errors,
    problem,
    same_state,
    sgd,
    train,
)
from torch import nn

from wellposed.constrain import ConstraintWarning, MuonAndAdamW, constrain_, parameter_groups
from wellposed.errors import ConfigError, ConvergenceError, ShapeError


def changed(change):
    def build():
        model = Mixed()
        change(model)
        return model

    return build


def int8_weight(model):
    model.square.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)


def several():
    layers = {"norm": nn.LayerNorm(4), "conv": nn.Conv1d(4, 4, 3), "fine": nn.Linear(4, 4)}
    return nn.ModuleDict(layers)


def tables():
    parts = {"tokens": nn.Embedding(20, 8), "positions": nn.Embedding(6, 8)}
    model = nn.ModuleDict({**parts, "head": nn.Linear(8, 20, bias=False)})
    model["head"].weight = model["tokens"].weight
    return model


TALL = r"20 vectors in 8 dimensions.*embeddings='fit'.*OrthogonalityPenalty"
REFUSED = [
    (Mixed, {"where": None, "whre": "square"}, r"keyword of constrain_ 'whre'; nearest: where"),
    (Mixed, {"gain": "best"}, r"gain = 'best', expected a finite number > 0, 'fit' or None"),
    (Mixed, {"gain": inf}, r"gain = inf, expected a finite number > 0, 'fit'"),
    (Mixed, {"where": 3}, r"where=3: expected a role such as"),
    (
        Mixed,
        {"to": "x"},
        r"unknown set 'x'; expected one of columns, spectral_hammer, rows, hypersphere, orthogonal,",
    ),
    *(
        (Mixed, {"to": "spectral", "bound": bound}, f"bound = {bound!r}, ")
        for bound in (0.0, nan, "a")
    ),
    # options of another set
    (Mixed, {"to": "spectral", "gain": 0.5}, "to='"),
    (Mixed, {"to": "columns", "embeddings": "fit"}, "to='"),
    (Mixed, {"to": "orthogonal", "bound": 0.5}, "to='"),
    (lambda: nn.Sequential(nn.LazyLinear(4)), {"where": "0"}, r"no shape yet: 0\.weight"),
    (several, {"where": "*"}, r"norm\.weight(.|\n)*conv\.weight"),
    (several, {"where": "fine.bias"}, r"fine\.bias: shape \(4,\)"),
    (tables, {"where": "tokens"}, TALL),
    (tables, {"where": "head"}, r"head\.weight: an embedding of 20 vectors"),
    (Mixed, {"embeddings": "rows"}, "embeddings = 'rows', expected 'refuse' or 'fit'"),
    (changed(lambda m: m.square.requires_grad_(False)), {}, r"square\.weight: frozen"),
    (changed(lambda model: model.half()), {}, "float16 on a CPU"),
    (changed(lambda m: m.square.weight.data.zero_()), {"gain": "fit"}, r"square\.weight: zero"),
    (changed(int8_weight), {}, r"square\.weight.*int8, quantised"),
    (changed(lambda m: nn.utils.parametrizations.orthogonal(m.square)), {}, "parametrisation"),
]


@pytest.mark.parametrize(("build", "options", "message"), REFUSED)
def test_what_cannot_be_held_is_refused_by_name(build, options, message):
    model = build()
    is_shape = message == TALL or build is several or "an embedding" in message
    with pytest.raises(ShapeError if is_shape else ConfigError, match=message) as caught:
        constrain_(model, sgd(model), **{"where": "square", **options})
    assert "fine.weight" not in str(caught.value)


@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
@pytest.mark.parametrize("value", [nan, inf])
def test_weights_that_are_not_finite_are_all_named_and_nothing_is_moved(value, to):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[1].weight.data[0, 0] = model[2].weight.data[0, 0] = value
    before = model[0].weight.detach().clone()
    with pytest.raises(ConvergenceError, match=r"1\.weight: 1 of 16 entries\n.*2\.weight: 1 of"):
        constrain_(model, sgd(model), where="*", to=to)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("call", [constrain_, parameter_groups, MuonAndAdamW])
def test_what_is_no_model_is_refused(call):
    arguments = {constrain_: (sgd(Mixed()), "square"), parameter_groups: (0.1,)}.get(call, ())
    with pytest.raises(
        ConfigError, match=rf"{call.__name__}: expected a model .*received str; load it"
    ):
        call("bert", *arguments)


def test_a_group_that_is_added_to_muon_and_adamw_names_its_method():
    added = nn.Parameter(torch.ones(2))
    optimizer = MuonAndAdamW(Mixed(), muon=NAMES)
    with pytest.raises(ConfigError, match="'adamw'; received method=None"):
        optimizer.add_param_group({"params": [added]})
    optimizer.add_param_group({"params": [added], "method": "adamw", "lr": 0.5})
    added.sum().backward()
    optimizer.step()
    assert added.detach().tolist() == pytest.approx([0.5, 0.5], rel=0.1)


def test_tied_weight_is_constrained_once_and_said(caplog):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    handle = constrain_(model, sgd(model), where=["a", "b"])
    assert handle.paths == ("a.weight",)
    assert handle.report.rows[0].also == ("b.weight",)
    assert "tied" in caplog.text


def test_sparse_gradients():
    model = nn.ModuleDict({"positions": nn.Embedding(6, 8, sparse=True)})
    optimizer = sgd(model)
    constrain_(model, optimizer, where="positions")
    model["positions"](torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()


class Hooked:
    """Looks like an optimizer."""

    _optimizer_step_pre_hooks: ClassVar[dict[int, object]] = {}


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (sgd(Mixed()), r"square\.weight: not owned by the given optimizer \(SGD\)"),
        (Hooked(), r"expected a torch\.optim\.Optimizer, .*received Hooked"),
        ("adam", "received str"),
    ],
    ids=["of another model", "a look-alike", "a word"],
)
def test_an_optimizer_that_is_none_or_of_others_is_refused(optimizer, message):
    model = Mixed()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        constrain_(model, optimizer, where=NAMES)
    assert same_state(model, before)


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
def test_another_optimizer_in_its_place_is_told_at_its_third_step(kind):
    model = Mixed()
    constrain_(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0), where="square")
    flags = {"foreach": kind == "foreach", "fused": kind == "fused"}
    other = torch.optim.AdamW(model.parameters(), lr=1e-3, **flags)
    train(model, other, 3)
    message = r"took no step: another optimizer(.|\n)*square\.weight"
    with pytest.warns(ConstraintWarning, match=message):
        train(model, other, 1)
    train(model, other, 4)  # a second warning would be an error


def test_no_word_without_cause():
    model, optimizer, handle = constrained("sgd", "square", lr=1e-2)
    x, y = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):  # gradients are gathered, nothing moves
            nn.functional.mse_loss(model(x), y).backward()
        for _ in range(2):  # edited twice before training begins
            model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()})
            nn.functional.mse_loss(model(x), y).backward()
        train(model, optimizer, 5)
        # Who has stepped is not watched any more.
        assert not model.square.weight._post_accumulate_grad_hooks
        handle.remove()
        constrain_(model, optimizer, where="square").remove()
        train(model, torch.optim.SGD(model.parameters(), lr=1e-2), 6)


def saved_and_loaded(pair):
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": saved_and_loaded,
}


def trained(kind="adamw", where=NAMES):
    torch.manual_seed(0)
    model, optimizer, handle = constrained(kind, where)
    train(model, optimizer, 2)
    return model, optimizer, handle


@pytest.mark.parametrize("where", [NAMES, "tall"], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copied_pair_warns_at_its_first_step(way, kind, where):
    model, optimizer, _ = trained(kind, where)
    other, copied = COPIES[way]((model, optimizer))
    message = r"constraint is lost(.|\n)*constrain_\((.|\n)*tall\.weight"
    with pytest.warns(ConstraintWarning, match=message):
        train(other, copied, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(other, copied, 3)  # one warning
        train(model, optimizer, 3)  # the original is none the worse
    assert max(errors(model)[name] for name in NAMES if where is NAMES or name == where) <= 1e-5


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_that_is_constrained_again_goes_on_as_the_original(way):
    model, optimizer, handle = trained()
    pair = COPIES[way]((model, optimizer))
    with_handle = COPIES[way]((model, optimizer, handle))
    constrain_(*pair, where=NAMES)
    assert not with_handle[2].active
    with_handle[2].attach()
    expected = train(model, optimizer, 5)
    for other, copied in (pair, with_handle[:2]):
        assert train(other, copied, 5) == pytest.approx(expected, rel=1e-6)
        assert max(errors(other).values()) <= 1e-5
