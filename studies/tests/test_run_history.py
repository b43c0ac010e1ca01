"""All runs of an artefact: the largest decides, none is lost, and runs that disagree leave it undecided."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from wellposed_lab.charts import Panel
from wellposed_lab.training.config import RunConfig, StartOptions
from wellposed_studies.evidence import FIELDS, KINDS, OWN, PAPER_SIZES, SAME_RUNS, short_size
from wellposed_studies.recipe import RECIPES, SCALES, SIZES, Criterion, Recipe, Reproduction
from wellposed_studies.reproduce import reproduce
from wellposed_studies.rows import (
    counted,
    finished,
    is_stale,
    judged_earlier,
    row_words,
    verdict_of,
)
from wellposed_studies.run_history import RUN_ENTRIES, disagreement, leads, with_history
from wellposed_studies.run_order import larger_than, order_of_sizes
from wellposed_studies.run_sizes import size_of

ROWS = Path(__file__).parents[2] / "benchmarks" / "reproduction"
COMMITTED = [json.loads(path.read_text()) for path in sorted(ROWS.glob("*.json"))]
NAME = "kim2021/figure-9"
SIZE = dict.fromkeys(FIELDS, 2) | {"read": "800 texts", "decoding": "none"}


def make(monkeypatch, verdicts):
    """Let each run of a recipe have the verdict of its scale and a number of its own."""
    count = iter(range(99))

    def made(recipe, request):
        got = f"{next(count)} at {request.scale}"
        size = SIZE
        panel = Panel("t", "x", "y")
        test = Criterion("it is larger", seeds=3)
        holds = verdicts.get(request.scale)
        return Reproduction([{"a": got}], [panel], got, holds, criterion=test, size=size)

    monkeypatch.setattr(Recipe, "__call__", made)


def made_row(folder):
    values = finished(folder, NAME)
    assert values is not None
    return values


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
    values = made_row(tmp_path)
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
    assert second.startswith("  paper size: read [5,017,483] characters")
    assert "verdict:    seen at 800 texts, width 2, depth 2" in row


def test_runs_that_disagree_leave_the_row_undecided(tmp_path, monkeypatch):
    make(monkeypatch, {"mini": True, "medium": False})
    reproduce(NAME, scale="mini", out=tmp_path)
    assert row_words(made_row(tmp_path)) == f"seen at {short_size(SIZE)}"
    reproduce(NAME, scale="medium", out=tmp_path)
    values = made_row(tmp_path)
    assert values["holds"] is False
    assert verdict_of(values) is None
    assert row_words(values) == f"undecided at {short_size(SIZE)}"
    assert [verdict for _, verdict in disagreement(values["runs"])] == [True, False]


def test_a_verdict_by_other_rules_is_undecided_until_it_is_run_again(tmp_path, monkeypatch):
    make(monkeypatch, {"mini": True})
    reproduce(NAME, out=tmp_path)
    values = made_row(tmp_path)
    assert not judged_earlier(values)
    monkeypatch.setattr(Recipe, "judge", lambda _: "other rules")
    assert judged_earlier(values)
    assert verdict_of(values) is None
    assert values["holds"] is True


def test_the_same_run_is_kept_once_with_its_last_verdict():
    first = {"scale": "mini", "we_got": "a", "protocol": "1", "holds": True}
    second = with_history(with_history(None, first), {**first, "holds": None})
    assert [run["verdict"] for run in second["runs"]] == [None]
    assert leads(first, first)
    assert not leads(first, {**first, "scale": "toy"})


def test_a_run_that_is_continued_is_kept_once_as_it_ended():
    first = {"scale": "mini", "we_got": "a", "protocol": "1", "holds": None, "missing": 3}
    longer = {**first, "we_got": "b", "missing": 1}
    ended = {**first, "we_got": "c", "holds": True, "missing": 0}
    row = None
    for values in (first, longer, ended):
        row = with_history(row, values)
        assert [run["result"] for run in row["runs"]] == [values["we_got"]]
    assert "missing" not in row["runs"][0]
    changed = {**longer, "protocol": "2"}
    assert [run["result"] for run in with_history(with_history(None, first), changed)["runs"]] == [
        "a",
        "b",
    ]


BASE = {"read": "800 texts", "width": 32, "depth": 2, "steps": 400, "batch": 16, "seeds": 3}


@pytest.mark.parametrize(
    ("changed", "other", "order"),
    [
        ({}, {}, 0),
        ({"read": "8,000 texts"}, {}, 1),
        ({"read": "8,000 texts", "steps": 1, "width": 1, "depth": 1}, {}, 1),
        ({"steps": 4000, "width": 8, "depth": 1}, {}, 1),
        ({"width": 8, "depth": 12}, {}, -1),
        ({"depth": "2, 12"}, {"depth": "2, 6, 12"}, -1),
        ({"depth": "1, 2"}, {}, 1),
        ({"steps": "1,406, 3,125"}, {"steps": 3125}, 1),
        ({"batch": 8}, {}, -1),
        ({"seeds": 10}, {}, 1),
        ({"read": "25,600 of 29,000 pairs (Multi30k)"}, {"read": "6,000 pairs"}, 1),
        (
            {"read": "all of char_lm (48,000 sentences)"},
            {"read": "48,000 sentences (about once)"},
            0,
        ),
        ({"width": "384 (as MiniLM-L6)"}, {"width": 64}, 1),
        ({"width": "as org/encoder"}, {"width": 64}, None),
        ({"width": "as org/encoder"}, {"width": "as org/encoder"}, 0),
        ({"read": "all of minbert"}, {"read": "all of minbert", "steps": 1}, 1),
        ({"read": "all of minbert"}, {"read": "1,500 rows of each set"}, None),
        ({"read": "8 words"}, {"read": "9 characters"}, None),
        ({"read": "8 texts; 9 pairs"}, {"read": "8 texts; 7 pairs"}, 1),
        ({"read": "8 texts; 9 pairs"}, {"read": "9 texts; 7 pairs"}, None),
    ],
)
def test_sizes_are_ordered_by_what_is_read_then_steps_width_depth_batch_seeds(
    changed, other, order
):
    one, two = BASE | changed, BASE | other
    assert order_of_sizes(one, two) == order
    assert order_of_sizes(two, one) == (None if order is None else -order)


@pytest.mark.parametrize(
    ("first", "second", "decides"),
    [
        (("mini", {"read": "900 texts"}), ("mini", {}), 0),
        (("mini", {}), ("mini", {"read": "900 texts"}), 1),
        (("mini", {"read": "900 texts"}), ("medium", {}), 0),
        (("medium", {}), ("mini", {"steps": 500}), 1),
        (("mini", {}), ("mini", {}), 1),
        (("medium", {}), ("mini", None), 0),
        (("mini", None), ("mini", {}), 1),
        (("mini", {"read": "9 words"}), ("medium", {}), 1),
    ],
)
def test_a_run_that_reads_less_never_decides_at_any_scale(first, second, decides):
    rows = [
        {
            "scale": scale,
            "we_got": str(number),
            "holds": None,
            "size": None if changed is None else BASE | changed,
        }
        for number, (scale, changed) in enumerate((first, second))
    ]
    row = with_history(with_history(None, rows[0]), rows[1])
    assert row["we_got"] == str(decides)
    assert [run["size"] for run in row["runs"]] == [one["size"] for one in rows]


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
        assert (values["paper_size"] is None) == recipe.is_ours
        assert not larger_than(values["size"], values["runs"])
        assert "contradicted" not in row_words(values)
    else:
        assert values["size"] is values["paper_size"] is None


def test_every_recipe_that_trains_has_the_size_of_its_paper_or_is_our_own():
    trains = {name for name in RECIPES if RECIPES.get(name).power is not None}
    assert trains - set(OWN) == set(PAPER_SIZES) - {"kim2021/table-1"}, "table 1 times a step"
    assert all(tuple(size) == FIELDS for size in PAPER_SIZES.values())
    assert set(OWN) | SAME_RUNS.keys() | set(SAME_RUNS.values()) <= set(RECIPES)


PAPER_FILES = {"zhang2021": "000", "mcgrath2024": "001", "kim2021": "002", "sengupta2023": "003"}
THOUSANDS = {1_000: "[kK]", 1_000_000: "M"}


def printed_forms(number):
    """Return the ways in which a paper may print a whole number, as a pattern."""
    forms = [str(number), f"{number:,}"]
    forms += [f"{number // unit}{word}" for unit, word in THOUSANDS.items() if number % unit == 0]
    return rf"(?<![\d.,])(?:{'|'.join(forms)})(?![\d])"


@pytest.mark.data
@pytest.mark.parametrize("name", [n for n in PAPER_SIZES if n.split("/")[0] in PAPER_FILES])
def test_each_number_of_a_papers_size_without_brackets_is_printed_in_it(shared_data, name):
    (file,) = (shared_data.parent / "papers").glob(f"{PAPER_FILES[name.split('/')[0]]}_*.txt")
    text = file.read_text(encoding="utf-8")
    for field, value in PAPER_SIZES[name].items():
        printed = re.sub(r"\[.*?\]|WMT'16|100 times", "", str(value))
        for number in re.findall(r"\d[\d,]*", printed):
            count = int(number.rstrip(",").replace(",", ""))
            assert re.search(printed_forms(count), text), f"{name}: {field} has {number}"


STUDY_OF = {
    "kim2021/figure-9": "kim2021/tuned",
    "kim2021/figure-11": "kim2021/fixed",
    "kim2021/table-3": "kim2021/fixed",
    "mcgrath2024/figure-1": "mcgrath2024",
    "mcgrath2024/table-1": "mcgrath2024",
    "mcgrath2024/qr": "mcgrath2024",
    "mcgrath2024/pretrained": "mcgrath2024/encoder",
    "sengupta2023/figure-1": "sengupta2023/imdb",
    "sengupta2023/figure-3a": "sengupta2023/imdb",
    "sengupta2023/figure-3b": "sengupta2023/imdb",
    "sengupta2023/figure-4": "sengupta2023/imdb",
    "sengupta2023/table-3": "sengupta2023/ptb-words",
}
"""The table of sizes that a recipe reads, if it has another name."""
SAME_NAMES = {"steps": "steps", "seeds": "seeds", "batch": "batch_size", "width": "width"}
FRESH = [
    values
    for values in COMMITTED
    if values["kind"] == "trained" and not is_stale(values)
    if STUDY_OF.get(values["recipe"], values["recipe"]) in SIZES  # others' stand in their modules
]


@pytest.mark.parametrize("values", FRESH, ids=lambda values: values["recipe"])
def test_the_size_of_a_row_is_that_of_its_table_of_sizes(values):
    recipe = str(values["recipe"])
    table = SIZES[STUDY_OF.get(recipe, recipe)][values["scale"]]
    for field, option in SAME_NAMES.items():
        encoder = field == "width" and "as " in str(values["size"]["width"])
        if field == "seeds" and values.get("missing"):
            assert 1 <= values["size"][field] <= table[option]
        elif option in table and not encoder:
            assert values["size"][field] == table[option], field
    read = table.get("limit") or table.get("options", {}).get("limit_train")
    if read:
        assert values["size"]["read"].startswith(f"{read:,} ")


def test_a_model_to_start_from_names_its_width_and_depth(tmp_path):
    config = RunConfig("text_classification", {"data": "builtin"})
    encoder = tmp_path / "mini-encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text('{"hidden_size": 1024, "num_hidden_layers": 6}')
    started = [replace(config, start=StartOptions(model=str(at))) for at in (encoder, "org/other")]
    sizes = [size_of([one]) or {} for one in started]
    assert [size["width"] for size in sizes] == ["1,024 (as mini-encoder)", "as other"]
    assert [size["depth"] for size in sizes] == ["6 (as mini-encoder)", "as other"]


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
