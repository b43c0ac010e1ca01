"""A model that learned nothing earns no verdict, nor does one whose blocks do nothing. Every registered
artefact that trains is run on untrained models, on answers that do not look at the input and on the
labels of other examples. It is also run with blocks that return their inputs and without blocks."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.support.tables import rotated
from transformers import AutoTokenizer, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from wellposed import models
from wellposed.errors import WellposedError
from wellposed.nn import Block, DecoderBlock
from wellposed.nn.transject import TransJectBlock
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.loop.train import train
from wellposed_studies import study
from wellposed_studies.frontier import methods
from wellposed_studies.kim2021 import inverses
from wellposed_studies.recipe import RECIPES, Request

pytestmark = pytest.mark.slow
TRAINED = [name for name in RECIPES if RECIPES.get(name).power is not None]
PLACEBOS = {
    "untrained": lambda logits: logits,
    "constant": lambda logits: logits.mean(0, keepdim=True).expand_as(logits),
    "labels shuffled": lambda logits: logits.roll(1, 0),
}
"""Changes of the answers to a batch before they meet its labels."""
NO_VERDICT = (WellposedError, IndexError, ZeroDivisionError)
"""Errors of a recipe that looks for blocks and finds none."""
REFUSED = {
    "identity blocks": {"frontier/words"},
    "no blocks": {
        *(name for name in TRAINED if name.startswith(("mcgrath", "sengupta", "zhang"))),
        *("kim2021/figure-4", "kim2021/figure-5", "kim2021/figure-8", "kim2021/figure-10"),
        *("frontier/characters", "frontier/rates", "frontier/translation", "huang2020/depth"),
        *("frontier/methods", "frontier/classifiers"),
    },
}
"""Recipes whose models cannot be built, constrained or measured so; they end in an error."""
FILE = {"kim2021": "ptb/ptb.char.train.txt.gz"}
FILE |= dict.fromkeys(
    ("frontier/characters", "frontier/methods", "frontier/rates"), "text/tinyshakespeare.txt.gz"
)
FILE["frontier/classifiers"] = "ag_news"
"""The file of a paper or an artefact that reads only one."""


def altered(task, alter):
    """Return a task whose losses and metrics see other answers."""
    kind = type(task)
    changed = copy.copy(task)

    class Altered(kind):
        def loss_sum(self, logits, batch, **keywords):
            return kind.loss_sum(task, alter(logits), batch, **keywords)

        def metric_sums(self, logits, batch):
            return kind.metric_sums(task, alter(logits), batch)

    changed.__class__ = Altered
    return changed


def placebo(name):
    """Return a `train_planned` whose models learn nothing."""

    def trained(planned, **keywords):
        for folder, _, config in planned:
            task = keywords.get("task") or build_task(config.task, config.task_options)
            still = replace(config.train, learning_rate=1e-12, gamma=1e-12)
            config = replace(config, train=still) if name == "untrained" else config
            task = altered(task, PLACEBOS[name])
            yield train(config, folder, task=task, resume="auto", progress=False)

    return trained


class AlteredData:
    """Data of `frontier/methods` whose losses see other answers."""

    def __init__(self, data, alter):
        self.data = data
        self.alter = alter

    def __getattr__(self, name):
        return getattr(self.data, name)

    def loss(self, model, batch):
        def altered_model(**inputs):
            return SimpleNamespace(logits=self.alter(model(**inputs).logits))

        return self.data.loss(altered_model, batch)


@pytest.fixture(autouse=True)
def _without_costs(monkeypatch):
    """The cost of a step is no part of a verdict."""
    monkeypatch.setattr(methods, "cost_columns", lambda *_: {})


def placebo_of_methods(name):
    """Return a training of `frontier/methods` whose models learn nothing."""

    def trained(training, data, compute=methods.train):
        rate = 1e-12 if name == "untrained" else training.rate
        return compute(replace(training, rate=rate), AlteredData(data, PLACEBOS[name]))

    return trained


def block_placebo(kind, data, folder, monkeypatch):
    """Let every model be trained with blocks that return their inputs, or without blocks; return the
    data."""
    if kind == "no blocks":
        without = methods.train
        monkeypatch.setattr(
            methods, "train", lambda training, data: without(replace(training, layers=0), data)
        )
        keywords = models.model_keywords
        monkeypatch.setattr(
            models, "model_keywords", lambda options: keywords(options) | {"num_hidden_layers": 0}
        )
        encoder = folder / "encoder"
        BertModel.from_pretrained(data["encoder"], num_hidden_layers=0).save_pretrained(encoder)
        AutoTokenizer.from_pretrained(data["encoder"]).save_pretrained(encoder)
        return data | {"encoder": encoder}
    for block in (Block, DecoderBlock, TransJectBlock, BertLayer):

        def unchanged(self, x, *inputs, computed=block.forward, **keywords):
            output = computed(self, x, *inputs, **keywords)
            first, *others = output if isinstance(output, tuple) else (output,)
            x = x + 0 * (first - x)  # penalties need the graph
            return (x, *others) if others else x

        monkeypatch.setattr(block, "forward", unchanged)
    return data


def verdict(name, out, data):
    """Return the result of a recipe on small models, with the verdict that the toy scale hides."""
    recipe = RECIPES.get(name)
    paper = name.partition("/")[0]
    source = data["minbert"] if paper == "mcgrath2024" else data["data"]
    takes = "data" in recipe.takes and {"languages", "vectors"}.isdisjoint(recipe.takes)
    source = source / FILE.get(name, FILE.get(paper, ""))
    encoder = str(data["encoder"]) if name == "mcgrath2024/pretrained" else None
    return recipe(Request("toy", out, str(source) if takes else None, encoder=encoder))


@pytest.fixture(scope="module")
def sources(data, minbert, encoder):
    return {"data": data, "minbert": minbert, "encoder": encoder}


@pytest.fixture(scope="module")
def outs(tmp_path_factory):
    """A folder for each kind of models, which recipes share."""
    return {kind: tmp_path_factory.mktemp("runs") for kind in (*PLACEBOS, *REFUSED)}


@pytest.mark.parametrize(("name", "kind"), rotated(TRAINED, PLACEBOS))
def test_models_that_learned_nothing_earn_no_verdict(name, kind, sources, outs, monkeypatch):
    """By what they learned alone: all count as levelled off, and the reason is named."""
    monkeypatch.setattr(study, "train_planned", placebo(kind))
    monkeypatch.setattr(methods, "train", placebo_of_methods(kind))
    monkeypatch.setattr(study.FinishedRun, "settled", True)
    result = verdict(name, outs[kind], sources)
    assert result.holds is None
    assert any("not judged" in note and "better than a constant" in note for note in result.notes)


@pytest.mark.parametrize(("name", "kind"), rotated(TRAINED, REFUSED))
def test_models_whose_blocks_do_nothing_earn_no_verdict(
    name, kind, sources, outs, tmp_path, monkeypatch
):
    """Embedding and head alone may beat a constant, so all models count as better, and as settled."""
    sources = block_placebo(kind, sources, tmp_path, monkeypatch)
    monkeypatch.setattr(study, "learned", lambda _: True)
    monkeypatch.setattr(study.FinishedRun, "settled", True)
    if name in REFUSED[kind]:
        with pytest.raises(NO_VERDICT):
            verdict(name, outs[kind], sources)
        return
    result = verdict(name, outs[kind], sources)
    assert result.holds is None
    assert any("not judged" in note and "return their inputs" in note for note in result.notes)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("huang2020/depth", False),
        ("kim2021/figure-5", True),
        ("sengupta2023/figure-1", False),
        ("sengupta2023/figure-6", True),
    ],
)
def test_without_the_gate_blocks_that_do_nothing_would_earn_a_verdict(
    name, holds, sources, outs, tmp_path, monkeypatch
):
    block_placebo("identity blocks", sources, tmp_path, monkeypatch)
    monkeypatch.setattr(study, "unfit", lambda *_, **__: [])
    assert verdict(name, outs["identity blocks"], sources).holds == holds


def test_exchanged_attentions_of_random_weights_are_not_confirmed(tmp_path, monkeypatch):
    other = {"l2_tied": "dot_product", "dot_product": "l2_tied"}
    drawn = inverses.random_layer
    monkeypatch.setattr(
        inverses, "random_layer", lambda note, *size: drawn(other.get(note) or note, *size)
    )
    assert RECIPES.get("kim2021/figure-3")(Request("mini", tmp_path)).holds is False


def test_without_the_gate_untrained_models_would_earn_a_verdict(sources, outs, monkeypatch):
    monkeypatch.setattr(study, "train_planned", placebo("untrained"))
    monkeypatch.setattr(study, "unfit", lambda *_, **__: [])
    assert verdict("huang2020/depth", outs["untrained"], sources).holds is not None
