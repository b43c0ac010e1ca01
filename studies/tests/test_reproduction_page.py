"""The page of finished artefacts: from their files alone, never from toy sizes; `reproduce all`
resumes."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from tools.quoted_rows import QUOTE, TABLES, with_rows

from wellposed.errors import ConfigError, DataError
from wellposed_lab.charts import Panel
from wellposed_lab.cli.main import main
from wellposed_studies.evidence import SEEN, VERDICTS
from wellposed_studies.recipe import (
    RECIPES,
    WITHDRAWN,
    Criterion,
    Recipe,
    Reproduction,
    Request,
    recipe_names,
)
from wellposed_studies.reproduce import reproduce
from wellposed_studies.reproduction_page import counted_own, counted_papers, reproduction_page
from wellposed_studies.rows import file_stem, is_stale, judged_earlier

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "reproduction"
COMMITTED = [json.loads(path.read_text()) for path in sorted(ROWS.glob("*.json"))]
FRESH = [values for values in COMMITTED if not (is_stale(values) or judged_earlier(values))]
"""Rows of today's numbers, by today's rules; the words of others are those that judged them."""


def make(monkeypatch, *, stops_at="", lacks_data="", read=None):
    """Let every recipe finish at once with a made-up row; return the list of those that ran, and
    what they ``read``."""
    ran = []

    def made(recipe, request):
        if recipe.name == stops_at:
            raise KeyboardInterrupt
        if recipe.name == lacks_data:
            raise ConfigError("give --data FOLDER")
        ran.append(recipe.name)
        if read is not None:
            read[recipe.name] = request.data
        decided = {"figure-2": True, "figure-7": False, "figure-9": "smaller"}
        holds = decided.get(recipe.name.removeprefix("kim2021/"))
        criterion = Criterion("a | b", seeds=3, uncertainty="two errors")
        return Reproduction(
            [{"a": 1}], [Panel("t", "x", "y")], f"got {request.scale}", holds, criterion=criterion
        )

    monkeypatch.setattr(Recipe, "__call__", made)
    # A drawing takes longer than all else here, and is of the same panel for every recipe.
    monkeypatch.setattr(
        "wellposed_studies.reproduce.draw", lambda _, path: path.write_text("<svg/>")
    )
    return ran


def run_all(tmp_path, *words):
    page = tmp_path / "docs" / "page.md"
    options = ["--out", str(tmp_path / "out"), "--page", str(page), "--quiet", *words]
    return main(["reproduce", "all", *options]), page


def section(text, name):
    return text.partition(f"## {name} ")[2].partition("\n## ")[0]


@pytest.mark.slow
def test_all_goes_on_where_it_stopped_and_writes_the_page(tmp_path, monkeypatch):
    first = make(monkeypatch, stops_at="sengupta2023/table-1")
    status, page = run_all(tmp_path)
    assert status == 130
    assert not page.exists()
    second = make(monkeypatch)
    assert run_all(tmp_path)[0] == 0
    assert sorted([*first, *second]) == sorted(RECIPES)
    text = page.read_text()
    assert text == reproduction_page(tmp_path / "out")
    assert text.count("\n## ") == len(list(RECIPES))
    count = len(list(RECIPES))
    papers = counted_papers(tmp_path / "out")
    for words in ("1 confirmed", "1 contradicted", "1 none of that size"):
        assert words in papers
    for counted in (papers, counted_own(tmp_path / "out")):
        assert f"**{counted}**" in text
    of_papers, _, ours = text.partition("\n# Our own claims\n")
    assert "## frontier/order (mini)" in ours
    assert "## kim2021/table-2 (mini)" in of_papers
    assert text.count("\n<details markdown>\n") == text.count("\n</details>\n") == count + 1
    assert "\n<summary>kim2021/figure-2 (mini): confirmed</summary>\n\n## kim2021/figure-2" in text
    assert "## kim2021/figure-2 (mini)" in text
    of_figure_2 = section(text, "kim2021/figure-2")
    for row in (
        f"| paper | {RECIPES.get('kim2021/figure-2').claim} |", "| ours | got mini |", "| verdict | confirmed |",
        "| test | a \\| b |", "| seeds | 3 |", "| uncertainty | two errors |", "| minutes | 0.0 |",
        "| command | `wellposed reproduce kim2021/figure-2 --scale mini` |",
        f", torch {torch.__version__.partition('+')[0]}",
    ):  # fmt: skip
        assert row in of_figure_2
    summary = RECIPES.get("kim2021/figure-2").summary
    assert (
        f"| [kim2021/figure-2](#kim2021figure-2-mini) | {summary} | mini | 3 | confirmed |" in text
    )
    assert "| verdict | contradicted |" in section(text, "kim2021/figure-7")
    of_figure_9 = section(text, "kim2021/figure-9")
    assert "| verdict | none of that size at a size that was not recorded |" in of_figure_9
    assert (
        "\n\n| | |\n|---|---|\n| size | not recorded |\n| paper's size | read [5,0" in of_figure_9
    )
    unsaid = section(text, "kim2021/figure-3")
    assert "| verdict | undecided |" in unsaid
    assert (
        "| to decide | --scale medium: 0.6 min on two CPU cores; --scale paper: ~5 min on" in unsaid
    )
    assert '| quoted | "DP-MHA is not invertible whereas' in unsaid
    assert run_all(tmp_path, "--strict")[0] == 1


@pytest.mark.slow
def test_a_row_whose_numbers_have_changed_is_stale_and_made_again(tmp_path, monkeypatch):
    make(monkeypatch)
    assert run_all(tmp_path)[0] == 0
    figure = "kim2021/figure-2"
    words = "confirmed"
    monkeypatch.setattr(Recipe, "protocol", lambda recipe, _: str(recipe.name == figure))
    text = reproduction_page(tmp_path / "out")
    assert f"| {words}, stale |" in text
    assert f"<summary>{figure} (mini): {words}, stale</summary>" in text
    assert "| stale | made before 0.4, or a number of its measurement" in section(text, figure)
    ran = make(monkeypatch)
    assert run_all(tmp_path)[0] == 0
    assert figure in ran
    ran = make(monkeypatch)
    status, page = run_all(tmp_path)
    assert (status, ran) == (0, [])
    assert "stale |" not in page.read_text()


@pytest.mark.slow
def test_a_row_with_missing_trainings_is_running_and_continued(tmp_path, monkeypatch):
    make(monkeypatch)
    _, page = run_all(tmp_path)
    name = "frontier/methods"
    path = tmp_path / "out" / f"{file_stem(name)}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "missing": 2}))
    text = reproduction_page(tmp_path / "out")
    (words,) = re.findall(rf"<summary>{name} \(mini\): (.*)</summary>", text)
    assert words.endswith(", running: 2 missing")
    ran = make(monkeypatch)
    assert run_all(tmp_path)[0] == 0
    assert ran == [name]
    assert "running" not in section(page.read_text(), name).partition("| notes")[0]


@pytest.mark.slow
def test_what_lacks_data_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    make(monkeypatch, lacks_data="mcgrath2024/qr")
    status, page = run_all(tmp_path)
    assert status == 0
    assert "mcgrath2024/qr: left out: give --data FOLDER" in capsys.readouterr().err
    assert "Not run: mcgrath2024/qr." in page.read_text()


@pytest.mark.slow
def test_what_is_finished_is_kept_unless_it_is_a_toy_or_of_an_earlier_form(tmp_path, monkeypatch):
    make(monkeypatch)
    _, page = run_all(tmp_path, "--scale", "toy")
    assert "\n## " not in page.read_text(), "toy sizes are no evidence"
    ran = make(monkeypatch)
    run_all(tmp_path, "--scale", "medium")
    assert ran == recipe_names()
    old = tmp_path / "out" / f"{file_stem('kim2021/figure-2')}.json"
    values = json.loads(old.read_text())
    del values["criterion"]
    old.write_text(json.dumps(values))
    ran = make(monkeypatch)
    run_all(tmp_path)
    assert ran == ["kim2021/figure-2"], "the others are finished at a larger scale"
    text = page.read_text()
    entry = section(text, "kim2021/figure-4")
    assert "## kim2021/figure-4 (medium)" in text
    assert "| could be seen | a difference of" in entry
    assert (
        "| levelled off | nothing is judged before every model is 3 standard errors better" in entry
    )
    assert "could be seen" not in section(text, "kim2021/figure-2")


@pytest.mark.slow
def test_every_recipe_finds_its_own_data_in_a_folder_of_data_sets(tmp_path, monkeypatch):
    sets = tmp_path / "sets"
    for name in ("ptb", "minbert", "multi30k"):
        (sets / name).mkdir(parents=True)
    (sets / "ptb" / "ptb.char.train.txt.gz").touch()
    read = {}
    make(monkeypatch, read=read)
    assert run_all(tmp_path, "--data", str(sets))[0] == 0
    assert read["kim2021/figure-4"] == str(sets / "ptb" / "ptb.char.train.txt.gz")
    assert read["mcgrath2024/qr"] == str(sets / "minbert")
    assert read["zhang2021/table-1"] == str(sets / "multi30k")
    assert read["sengupta2023/table-1"] == str(sets)
    assert read["kim2021/figure-2"] is None, "it reads none"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for data in ("hf:ptb", None, str(sets)):
        reproduce("kim2021/figure-4", out=tmp_path, data=data)
        expected = str(sets / "ptb" / "ptb.char.train.txt.gz") if data == str(sets) else data
        assert read["kim2021/figure-4"] == expected, "one recipe finds its own too"


def test_a_result_says_what_was_read_where_no_data_is_given(tmp_path, monkeypatch):
    make(monkeypatch)
    announcements = []
    without = reproduce("kim2021/figure-4", out=tmp_path, announce=announcements.append)
    assert announcements == ["no data given: English prose that ships with Python"]
    assert without.result.notes == ("no data given: English prose that ships with Python",)
    assert "no data given: English prose" in reproduction_page(tmp_path)
    (tmp_path / "text.txt").write_text("words")
    with_data = reproduce(
        "kim2021/figure-4",
        out=tmp_path,
        data=str(tmp_path / "text.txt"),
        announce=announcements.append,
    )
    assert with_data.result.notes == ()
    assert len(announcements) == 1


def test_whatever_goes_with_data_takes_data():
    for name in RECIPES:
        recipe = RECIPES.get(name)
        if recipe.folders or recipe.builtin or recipe.takes:
            assert "data" in recipe.takes, name


@pytest.mark.parametrize(
    "name", ["kim2021/figure-2", "huang2020/signal", "sengupta2023/table-5", "frontier/order"]
)
def test_data_for_a_recipe_that_reads_none_is_refused(name, tmp_path, monkeypatch):
    ran = make(monkeypatch)
    message = rf"{name}: reads no data, received data='text.txt'; leave it out; these do"
    with pytest.raises(ConfigError, match=message):
        reproduce(name, out=tmp_path, data="text.txt")
    assert ran == []


def test_data_that_is_not_there_is_said_at_once(tmp_path, monkeypatch):
    ran = make(monkeypatch)
    monkeypatch.setattr("wellposed_studies.reproduce.hub_answers", lambda: False)
    with pytest.raises(DataError, match="no such file or folder; give a file"):
        reproduce("kim2021/figure-4", out=tmp_path, data=str(tmp_path / "nothing"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(DataError, match="hub cannot be reached; go online") as failed:
        reproduce("kim2021/figure-4", out=tmp_path, data="hf:ptb")
    assert "\n" not in str(failed.value)
    assert ran == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reproduce("kim2021/figure-4", out=tmp_path, data="hf:ptb")
    assert ran == ["kim2021/figure-4"]


@pytest.mark.slow
def test_the_committed_page_is_that_of_the_committed_results_and_all_pages_count_alike():
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert page == reproduction_page(ROWS)
    for counted in (counted_papers(ROWS), counted_own(ROWS)):
        assert f"**{counted}**" in page
        assert f"| {counted.replace(': ', ' | ')} |" in (ROOT / "README.md").read_text()
        assert counted in (ROOT / "docs" / "index.md").read_text()


def test_pages_quote_the_rows_as_they_are():
    """`python -m tools.quoted_rows` writes them."""
    texts = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    assert [text for text in texts if text != with_rows(text)] == []
    (tables,) = [text for text in texts if TABLES.search(text)]
    (number, *_) = re.findall(r"\| (\d\.\d{3}) \|", TABLES.search(tables)[0])
    assert with_rows(tables.replace(f"| {number} |", "| 9.999 |")) == tables
    quoting = [text for text in texts if QUOTE.search(text)]
    assert len(quoting) == 1
    for text in quoting:
        (first, *_) = QUOTE.finditer(text)
        assert with_rows(text.replace(first[0], first[0].replace("1", "7"))) == text


def test_committed_results_name_the_data_that_their_recipes_read():
    for values in COMMITTED:
        recipe = RECIPES.get(values["recipe"])
        assert values["data"] is None or "data" in recipe.takes, recipe.name
        assert values["data"] is not None or "data" not in recipe.takes or recipe.builtin, (
            recipe.name
        )


def other_words(values):
    """Return which texts of a row differ from those of its recipe."""
    recipe = RECIPES.get(values["recipe"])
    scale = values["scale"]
    notes = recipe.notes_under("Note")
    plan = recipe.power and dict(recipe.power(Request(scale, Path("nowhere"))))
    pairs = {
        "claim": (values["paper_says"], recipe.claim),
        "quote": (values["quoted"], recipe.notes_under("Quote")),
        "test": ([values["criterion"]["test"]], recipe.notes_under("Test")),
        "plan": (values["power"], plan),
        "notes": ([note for note in notes if note in values["notes"]], notes),
    }
    return [part for part, (in_row, in_recipe) in pairs.items() if in_row != in_recipe]


@pytest.mark.parametrize("values", FRESH, ids=lambda values: values["recipe"])
def test_a_row_that_is_not_stale_has_the_words_of_its_recipe(values):
    """The numbers are compared by `is_stale`, words are here."""
    changed = other_words(values)
    assert not changed, (
        f"{values['recipe']}: its {', '.join(changed)} says something else now. Run it again; if it"
        " means the same, write the new words into its JSON file, and the page"
    )


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("claim", lambda values: values.update(paper_says="y grows")),
        ("quote", lambda values: values.update(quoted=[])),
        ("test", lambda values: values["criterion"].update(test="every seed")),
        ("plan", lambda values: values["power"].update(levelled_off="at once")),
        ("notes", lambda values: values.update(notes=[])),
    ],
)
def test_other_words_are_noticed(part, change):
    def judged(values):
        return (
            values["power"]
            and values["quoted"]
            and RECIPES.get(values["recipe"]).notes_under("Note")
        )

    values = copy.deepcopy(next(filter(judged, COMMITTED)))
    recipe = RECIPES.get(values["recipe"])
    request = Request(values["scale"], Path("nowhere"))
    values |= {"paper_says": recipe.claim, "quoted": recipe.notes_under("Quote")}
    assert recipe.power is not None
    values |= {"notes": recipe.notes_under("Note"), "power": dict(recipe.power(request))}
    values["criterion"]["test"] = "; ".join(recipe.notes_under("Test"))
    assert other_words(values) == []
    change(values)
    assert other_words(values) == [part]


@pytest.mark.parametrize("name", recipe_names())
def test_the_test_of_every_recipe_is_in_its_docstring(name):
    assert len(RECIPES.get(name).notes_under("Test")) == 1


@pytest.mark.parametrize("name", WITHDRAWN)
def test_a_withdrawal_comes_first_in_the_notes_whatever_a_later_run_writes(
    name, tmp_path, monkeypatch
):
    make(monkeypatch)
    dates = [withdrawal["date"] for withdrawal in WITHDRAWN[name]]
    for _ in range(2):
        reproduce(name, out=tmp_path)
        (row,) = re.findall(r"^\| notes \| .*$", reproduction_page(tmp_path), re.MULTILINE)
        assert re.findall(r"(?:\| |; )withdrawn on ([\d-]+) \(", row) == list(map(str, dates))
        assert row.startswith(f"| notes | withdrawn on {dates[0]} ({WITHDRAWN[name][0]['was']}): ")
    assert dates == sorted(dates, reverse=True), "newest first"
    words = {*VERDICTS.values(), *SEEN.values()}
    assert {withdrawal["was"].partition(" before")[0] for withdrawal in WITHDRAWN[name]} <= words


def test_no_result_has_a_withdrawal_that_a_later_run_would_remove():
    for values in COMMITTED:
        assert "withdrawn" not in " ".join(values["notes"]), f"{values['recipe']}: withdrawn.toml"
    assert set(RECIPES) >= WITHDRAWN.keys()


def test_a_claim_that_is_not_whole_is_made_again(tmp_path):
    claim = {
        "recipe": "kim2021/figure-2", "scale": "mini", "paper_says": "a", "we_got": "b", "holds": True, "seconds": 1.0,
        "criterion": {"test": "t", "seeds": 3, "uncertainty": "u"}, "notes": ["n"], "command": "c", "data": None,
    }  # fmt: skip
    path = tmp_path / "kim2021-figure-2.json"
    path.write_text(json.dumps(claim))
    assert "## kim2021/figure-2" in reproduction_page(tmp_path)
    names = ("holds", "notes", "seconds", "criterion", "we_got")
    broken = [json.dumps({**claim, name: {"a": 1}}) for name in names]
    for content in ("", "{", "null", "[" * 100_000, json.dumps(claim)[:-9], *broken):
        path.write_text(content)
        assert "## kim2021/figure-2" not in reproduction_page(tmp_path)
