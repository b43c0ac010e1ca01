"""What `where` means, and every refusal of `constrain_`: named, all at once, before anything is
changed."""

import copy
from typing import ClassVar

import pytest
import torch
from tests.support.constrained import NAMES, WIDTH, Mixed, held, same_state, sgd
from tests.support.refusal import each_refused
from torch import nn

from wellposed.constrain import MuonAndAdamW, constrain_, parameter_groups
from wellposed.errors import ConfigError, ShapeError


class TestErrors:
    def test_arguments_that_are_no_model_no_keyword_no_number(self):
        model = Mixed()

        def hold(where="square", **options):
            return lambda: constrain_(model, sgd(model), where, **options)

        bad = {
            r"keyword of constrain_ 'whre'; nearest: where": hold(None, whre="square"),
            r"constrain_: expected a model .*received str; load it": lambda: constrain_(
                "bert", sgd(model), "square"
            ),
            r"parameter_groups: expected a model": lambda: parameter_groups("bert", 0.1),
            r"MuonAndAdamW: expected a model": lambda: MuonAndAdamW("bert"),
            r"gain = 'best', expected a finite number > 0, 'fit' or None": hold(gain="best"),
            r"gain = inf, expected a finite number > 0, 'fit'": hold(gain=float("inf")),
            r"roles=3: expected names of roles": hold(None, roles=3),
            r"to = 'spectrum', expected 'orthogonal', 'spectral', 'columns' or 'logits'": hold(
                to="spectrum"
            ),
        }
        for bound in (0.0, -1.0, float("inf"), float("nan"), "a"):
            message = f"constrain_: bound = {bound!r}, expected a finite number > 0"
            bad[message] = hold(to="spectral", bound=bound)
        each_refused(ConfigError, bad)

    @pytest.mark.parametrize(
        "options",
        [
            {"to": "spectral", "gain": 0.5},
            {"to": "spectral", "weight_decay": "ignore"},
            {"to": "columns", "embeddings": "fit"},
            {"to": "orthogonal", "bound": 0.5},
        ],
        ids=str,
    )
    def test_an_option_of_another_set_is_refused(self, options):
        with pytest.raises(ConfigError, match=r"to='"):
            held("sgd", "square", **options)

    @pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
    def test_a_lazy_layer_is_named(self, to):
        model = nn.Sequential(nn.LazyLinear(4))
        with pytest.raises(ConfigError, match=r"0\.weight: not initialised; run the model once"):
            constrain_(model, sgd(model), "0", to=to)

    def test_shapes_are_all_named(self):
        layers = {"norm": nn.LayerNorm(4), "conv": nn.Conv1d(4, 4, 3), "fine": nn.Linear(4, 4)}
        model = nn.ModuleDict(layers)
        with pytest.raises(ShapeError, match=r"norm\.weight(.|\n)*conv\.weight") as caught:
            constrain_(model, sgd(model), where="*")
        assert "fine.weight" not in str(caught.value)
        with pytest.raises(ShapeError, match=r"fine\.bias: shape \(4,\)"):
            constrain_(model, sgd(model), where="fine.bias")

    def test_embedding_with_more_vectors_than_dimensions(self):
        model = nn.ModuleDict({"tokens": nn.Embedding(20, 8), "positions": nn.Embedding(6, 8)})
        said = r"20 vectors in 8 dimensions.*embeddings='fit'.*OrthogonalityPenalty"
        with pytest.raises(ShapeError, match=said):
            constrain_(model, sgd(model), where=nn.Embedding)
        with pytest.raises(ConfigError, match=r"embeddings = 'rows', expected 'refuse' or 'fit'"):
            constrain_(model, sgd(model), where=nn.Embedding, embeddings="rows")
        assert constrain_(model, sgd(model), where="positions").error().worst <= 1e-5

    def test_embedding_tied_to_a_head(self):
        model = nn.ModuleDict({"tokens": nn.Embedding(20, 8), "head": nn.Linear(8, 20, bias=False)})
        model["head"].weight = model["tokens"].weight
        with pytest.raises(ShapeError, match=r"head\.weight: an embedding of 20 vectors"):
            constrain_(model, sgd(model), where="head")

    def test_tied_weight_is_constrained_once_and_said(self, caplog):
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        model["b"].weight = model["a"].weight
        handle = constrain_(model, sgd(model), where=["a", "b"])
        assert handle.paths == ("a.weight",)
        assert handle.report.rows[0].also == ("b.weight",)
        assert "a.weight = b.weight" in handle.report.table()
        assert "tied" in caplog.text

    def test_weight_decay_names_both_ways_out(self):
        model = Mixed()
        said = r"weight_decay=0, or pass .*'ignore'(.|\n)*square\.weight.*0\.01"
        with pytest.raises(ConfigError, match=said):
            constrain_(model, torch.optim.AdamW(model.parameters()), where="square")
        with pytest.raises(ConfigError, match="parameter_groups"):
            constrain_(model, torch.optim.AdamW(model.parameters()), "square", to="columns")
        adafactor = torch.optim.Adafactor(model.parameters(), weight_decay=0.1)
        with pytest.raises(ConfigError, match="Adafactor"):
            constrain_(model, adafactor, where="square", weight_decay="ignore")

    def test_weight_decay_switched_on_later(self):
        model, optimizer, _ = held("sgd", "square")
        optimizer.param_groups[0]["weight_decay"] = 0.1
        model(torch.ones(1, WIDTH)).sum().backward()
        with pytest.raises(ConfigError, match="weight_decay"):
            optimizer.step()

    def test_an_optimizer_that_is_a_word(self):
        model = Mixed()
        with pytest.raises(ConfigError, match="received str"):
            constrain_(model, "adam", where="square")

    def test_nothing_happens_before_every_check_passed(self):
        model = Mixed()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ConfigError):
            constrain_(model, sgd(Mixed()), where=NAMES)
        assert same_state(model, before)

    def test_sparse_gradients(self):
        model = nn.ModuleDict({"positions": nn.Embedding(6, 8, sparse=True)})
        optimizer = sgd(model)
        constrain_(model, optimizer, where="positions")
        model["positions"](torch.tensor([1])).sum().backward()
        with pytest.raises(ConfigError, match="sparse"):
            optimizer.step()


def int8_weight(model):
    model.square.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)


CHANGES = {
    r"square\.weight: frozen": lambda model: model.square.weight.requires_grad_(False),
    r"float16 on a CPU": lambda model: model.half(),
    r"square\.weight.*int8, quantised": int8_weight,
    r"parametrisation": lambda model: nn.utils.parametrizations.orthogonal(model.square),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_weight_that_cannot_be_held_is_named(message):
    model = Mixed()
    CHANGES[message](model)
    with pytest.raises(ConfigError, match=message):
        constrain_(model, sgd(model), where="square")


class Hooked:
    """Looks like an optimizer."""

    _optimizer_step_pre_hooks: ClassVar[dict[int, object]] = {}


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (sgd(Mixed()), r"square\.weight: not owned by the given optimizer \(SGD\)"),
        (Hooked(), r"expected a torch\.optim\.Optimizer, .*received Hooked"),
    ],
    ids=["of another model", "a look-alike"],
)
def test_an_optimizer_that_is_none_or_of_others_is_refused(optimizer, message):
    with pytest.raises(ConfigError, match=message):
        constrain_(Mixed(), optimizer, where="square")
