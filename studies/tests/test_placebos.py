"""A model that learned nothing earns no verdict. Every registered artefact that trains is run on
untrained models, on answers that do not look at the input and on the labels of other examples."""

import copy
from dataclasses import replace

import pytest

from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.loop.train import train
from wellposed_studies import study
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
FILE = {"kim2021": "ptb/ptb.char.train.txt.gz"}
FILE |= dict.fromkeys(("frontier/characters", "frontier/rates"), "text/tinyshakespeare.txt.gz")
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
    return {kind: tmp_path_factory.mktemp("runs") for kind in PLACEBOS}


@pytest.mark.parametrize("kind", PLACEBOS)
@pytest.mark.parametrize("name", TRAINED)
def test_models_that_learned_nothing_earn_no_verdict(name, kind, sources, outs, monkeypatch):
    """By what they learned alone: all count as levelled off, and the reason is named."""
    monkeypatch.setattr(study, "train_planned", placebo(kind))
    monkeypatch.setattr(study.FinishedRun, "settled", True)
    result = verdict(name, outs[kind], sources)
    assert result.holds is None
    assert any("not judged" in of and "better than a constant" in of for of in result.notes)


def test_exchanged_attentions_of_random_weights_are_not_confirmed(tmp_path, monkeypatch):
    other, drawn = {"l2_tied": "dot_product", "dot_product": "l2_tied"}, inverses.random_layer
    monkeypatch.setattr(
        inverses, "random_layer", lambda of, *size: drawn(other.get(of) or of, *size)
    )
    assert RECIPES.get("kim2021/figure-3")(Request("mini", tmp_path)).holds is False


def test_without_the_gate_untrained_models_would_earn_a_verdict(sources, outs, monkeypatch):
    monkeypatch.setattr(study, "train_planned", placebo("untrained"))
    monkeypatch.setattr(study, "unfit", lambda *_, **__: [])
    assert verdict("huang2020/depth", outs["untrained"], sources).holds is not None
