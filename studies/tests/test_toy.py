"""Every recipe at toy scale: it leaves table, figure and claim, and does not train again what is
there; what holds at any size holds."""

import pytest
from studies.tests.support.finished_runs import written
from studies.tests.support.recipes import check_reproduced

from wellposed_lab.training.certified.record import TOKEN_SHARES
from wellposed_studies.frontier.order import TASKS
from wellposed_studies.frontier.translation import CONSTRAINTS, LABELS, STRENGTHS, TRANSFORMERS
from wellposed_studies.recipe import RECIPES
from wellposed_studies.reproduce import reproduce

pytestmark = pytest.mark.slow
TABLES = ("sengupta2023/table-1", "sengupta2023/table-2")
GIVEN = (*TABLES, "sengupta2023/fig", "kim2021/", "frontier/")
"""Recipes that get data, where they take any; the others read what is built in."""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Return one folder for all recipes, so that those which share runs train them once."""
    return tmp_path_factory.mktemp("reproduce")


def accuracy(rows):
    assert {"post_ln", "rezero", "lipschitz, T = 10"} <= {row["model"] for row in rows}
    assert {row["radius"] for row in rows if "radius" in row} == set(TOKEN_SHARES)
    ours = [row for row in rows if row["model"].startswith(("lipschitz", "no blocks"))]
    assert max(row["total"] for row in ours if "total" in row) <= 1


def characters(rows):
    theirs = {"Newhouse, AdamW", "Newhouse, Muon"}
    assert {row["model"] for row in rows} == theirs | {"lipschitz:1", "lipschitz:2"}
    for row in rows:
        assert (row["printed_bound"] is not None) == (row["model"] in theirs)
        if row["model"] not in theirs:
            assert row["sound_bound"] <= float(row["model"].split(":")[1]) * (1 + 1e-6)


def depth(rows):
    assert {row["blocks"] for row in rows} == {1, 2}
    assert max(row["total"] for row in rows if row["model"] == "lipschitz") <= 1


def order(rows):
    assert {row["task"] for row in rows} == set(TASKS)
    assert {row["model"] for row in rows} == {"pre_ln", "lipschitz, T = 30", "no blocks, T = 30"}


def translation(every):
    rows, longer = ([r for r in every if (r["steps"] == 3) is short] for short in (True, False))
    kept = {row["model"]: row for row in rows if row["kept"]}
    for label in LABELS.values():
        mine = [row for row in rows if row["model"] == label]
        settings = {row["setting"] for row in mine}
        if label in CONSTRAINTS.values():
            assert settings == {f"strength {strength:g}" for strength in STRENGTHS}
        else:
            assert 5 <= len(settings) <= 8
        assert kept[label]["valid_loss"] == min(row["valid_loss"] for row in mine)
    constrained = (*CONSTRAINTS.values(), TRANSFORMERS["post_ln"])
    assert len({kept[label]["learning_rate"] for label in constrained}) == 1
    assert {(row["model"], row["steps"]) for row in longer} == {(of, 6) for of in LABELS.values()}
    for part in ("learning_rate", "setting"):
        assert all(row[part] == kept[row["model"]][part] for row in longer)


def words(rows):
    models = {"bag", "one lipschitz block", "windows of 1", "windows of 1, frozen encoder"}
    models |= {"rezero", "fine-tuned encoder"}
    assert {row["model"] for row in rows} == models
    assert {row["k"] for row in rows} == {0, 1, 2, 3, 5}
    of_runs = {}
    for row in rows:
        of_runs.setdefault((row["corpus"], row["model"]), []).append(row["share"])
    assert all(shares == sorted(shares, reverse=True) for shares in of_runs.values())
    assert {("phrases", model) for model in models} <= set(of_runs)


FRONTIER = (accuracy, characters, depth, order, translation, words)
CHECKS = {f"frontier/{check.__name__}": check for check in FRONTIER}


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("mcgrath2024/")])
def test_a_recipe_leaves_its_files_and_keeps_its_runs(name, data, encoder, out):
    takes = "data" in RECIPES.get(name).takes and name != "frontier/translation"
    given = {"data": str(data) if takes and name.startswith(GIVEN) else None}
    given |= {"encoder": str(encoder)} if "encoder" in RECIPES.get(name).takes else {}
    before = written(out)
    done = reproduce(name, scale="toy", out=out, **given)
    check_reproduced(done)
    assert RECIPES.get(name).power or written(out) == before, "what trains is run on placebos"
    rows = done.result.rows
    assert all(row["certified"] <= row["attacked"] for row in rows if "attacked" in row)
    CHECKS.get(name, lambda _: None)(rows)
    trained = written(out)
    reproduce(name, scale="toy", out=out, **given)
    assert written(out) == trained
