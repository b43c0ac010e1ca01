"""All runs of an artefact: the largest decides, none is lost, and runs that disagree leave it undecided."""

import json
import re
from pathlib import Path

import pytest

from wellposed_lab.charts import Panel
from wellposed_studies.evidence import FIELDS, KINDS, OWN, PAPER_SIZES, SAME_RUNS, short_size
from wellposed_studies.recipe import RECIPES, SCALES, Criterion, Recipe, Reproduction
from wellposed_studies.reproduce import reproduce
from wellposed_studies.rows import counted, finished, judged_earlier, row_words, verdict_of
from wellposed_studies.run_history import RUN_ENTRIES, disagreement, leads, with_history

ROWS = Path(__file__).parents[2] / "benchmarks" / "reproduction"
COMMITTED = [json.loads(path.read_text()) for path in sorted(ROWS.glob("*.json"))]
NAME = "kim2021/figure-9"
SIZE = dict.fromkeys(FIELDS, 2) | {"read": "800 texts", "decoding": "none"}


def make(monkeypatch, verdicts):
    """Let each run of a recipe have the verdict of its scale and a number of its own."""
    count = iter(range(99))

    def made(recipe, request):
        got, size = f"{next(count)} at {request.scale}", SIZE
        panel, test = Panel("t", "x", "y"), Criterion("it is larger", seeds=3)
        holds = verdicts.get(request.scale)
        return Reproduction([{"a": got}], [panel], got, holds, criterion=test, size=size)

    monkeypatch.setattr(Recipe, "__call__", made)


@pytest.mark.parametrize(
    ("scales", "decides"),
    [
        (("mini", "medium"), "1 at medium"),
        (("medium", "mini"), "0 at medium"),
        (("mini", "mini"), "1 at mini"),
        (("medium", "mini", "medium"), "2 at medium"),
        (("toy", "mini"), "1 at mini"),
        (("mini", "toy"), "0 at mini"),
    ],
)
def test_the_largest_run_decides_and_all_are_kept(scales, decides, tmp_path, monkeypatch):
    make(monkeypatch, {"mini": True, "medium": True})
    for scale in scales:
        reproduce(NAME, scale=scale, out=tmp_path)
    values = finished(tmp_path, NAME)
    assert values["we_got"] == decides
    assert decides in (tmp_path / "kim2021-figure-9.csv").read_text()
    ran = [f"{index} at {scale}" for index, scale in enumerate(scales) if scale != "toy"]
    assert [run["result"] for run in values["runs"]] == ran


def test_a_run_that_does_not_decide_says_so(tmp_path, monkeypatch):
    make(monkeypatch, {"mini": True, "medium": False})
    assert "decided by" not in reproduce(NAME, scale="medium", out=tmp_path).row()
    row = reproduce(NAME, scale="mini", out=tmp_path).row()
    assert "row:        decided by the larger run in this folder, as before" in row
    first, second, *_ = row.splitlines()
    size = "read 800 texts; width 2; depth 2; 2 steps of 2; seeds: 2; decoding: none"
    assert re.fullmatch(rf"kim2021/figure-9 \(scale mini, \d+ s\): {size}", first)
    assert second.startswith("  paper size: read 5,017,483 characters")
    assert "verdict:    seen at 800 texts, width 2, depth 2" in row


def test_runs_that_disagree_leave_the_row_undecided(tmp_path, monkeypatch):
    make(monkeypatch, {"mini": True, "medium": False})
    reproduce(NAME, scale="mini", out=tmp_path)
    assert row_words(finished(tmp_path, NAME)) == f"seen at {short_size(SIZE)}"
    reproduce(NAME, scale="medium", out=tmp_path)
    values = finished(tmp_path, NAME)
    assert values["holds"] is False
    assert verdict_of(values) is None
    assert row_words(values) == f"undecided at {short_size(SIZE)}"
    assert [*disagreement(values["runs"]).values()] == [True, False]


def test_a_verdict_by_other_rules_is_undecided_until_it_is_run_again(tmp_path, monkeypatch):
    make(monkeypatch, {"mini": True})
    reproduce(NAME, out=tmp_path)
    values = finished(tmp_path, NAME)
    assert not judged_earlier(values)
    monkeypatch.setattr(Recipe, "judge", lambda _: "other rules")
    assert judged_earlier(values)
    assert verdict_of(values) is None
    assert values["holds"] is True


def test_the_same_run_is_kept_once_with_its_last_verdict():
    first = {"scale": "mini", "we_got": "a", "protocol": "1", "holds": True}
    second = with_history(with_history(None, first), {**first, "holds": None})
    assert [run["verdict"] for run in second["runs"]] == [None]
    assert leads(first, "mini")
    assert not leads(first, "toy")


@pytest.mark.parametrize("values", COMMITTED, ids=lambda values: values["recipe"])
def test_committed_rows_have_their_kind_sizes_and_runs_and_rest_on_the_largest(values):
    recipe = RECIPES.get(values["recipe"])
    assert values["kind"] in KINDS
    assert values["runs"]
    for run in values["runs"]:
        assert {*RUN_ENTRIES, "verdict"} <= run.keys()
        assert SCALES.index(run["scale"]) <= SCALES.index(values["scale"])
    assert values["we_got"] in [run["result"] for run in values["runs"]]
    if values["kind"] == "trained":
        assert tuple(values["size"]) == FIELDS
        assert all(values["size"].values())
        assert values["paper_size"] == recipe.paper_size
        assert (values["paper_size"] is None) == recipe.own
        assert "contradicted" not in row_words(values)
    else:
        assert values["size"] is values["paper_size"] is None


def test_every_recipe_that_trains_has_the_size_of_its_paper_or_is_our_own():
    trains = {name for name in RECIPES if RECIPES.get(name).power is not None}
    assert trains - set(OWN) == set(PAPER_SIZES) - {"kim2021/table-1"}, "table 1 times a step"
    assert all(tuple(size) == FIELDS for size in PAPER_SIZES.values())
    assert set(OWN) | SAME_RUNS.keys() | set(SAME_RUNS.values()) <= set(RECIPES)


def test_a_row_of_two_artefacts_counts_once_and_is_undecided_if_they_differ():
    def row(name, holds):
        values = {"recipe": name, "scale": "mini", "holds": holds, "we_got": name}
        return {**values, "judge": RECIPES.get(name).judge(), "size": SIZE}

    pair = [row("kim2021/figure-4", True), row("kim2021/table-2", False)]
    assert counted([pair], "rows") == "1 rows: 1 undecided"
    pair[1]["holds"] = True
    assert counted([pair, [row("kim2021/figure-2", False)]], "rows") == (
        "2 rows: 1 seen, 1 contradicted"
    )
