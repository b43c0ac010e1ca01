"""``wellposed reproduce``: the list, one recipe with its files and row, and wrong names."""

import inspect
import re
import signal
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.support.words import succeed
from tests.support.words import words as typed

from wellposed_lab.charts import Panel
from wellposed_lab.cli.main import main
from wellposed_studies.recipe import RECIPES, Criterion, Recipe, Reproduction, Request, recipe_names

PYPROJECT = Path(__file__).parents[2] / "studies" / "pyproject.toml"


def test_the_list_names_every_recipe_with_its_minutes(cli):
    lines = cli(["reproduce", "--list"]).out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == recipe_names()
    assert all(" min" in line or " h" in line for line in lines[1:-1])
    figure_2 = next(line for line in lines if line.startswith("kim2021/figure-2"))
    assert figure_2.split()[1:7] == typed("0.2 min 0.2 min ~5 min")  # an estimate has a ~
    papers = typed("kim2021 sengupta2023 zhang2021 huang2020 mcgrath2024 frontier")
    assert {line.partition("/")[0].split()[0] for line in lines[1:-1]} == set(papers)
    mcgrath = typed("figure-1 figure-3 table-1 qr")
    assert {f"mcgrath2024/{name}" for name in mcgrath} <= set(recipe_names())


DECLARED = [
    (group, name, module)
    for group, names in tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"].items()
    for name, module in names.items()
]


@pytest.mark.parametrize(("group", "name", "module"), DECLARED)
def test_the_studies_are_found_by_the_entry_points_that_users_have(group, name, module):
    [entry] = entry_points(group=group, name=name)
    assert entry.load().__name__ == module


def test_mistakes_get_one_line(cli):
    message = cli(["reproduce"], status=2).err
    assert "name a recipe, for instance kim2021/figure-2" in message
    message = cli("train char_lm --preset ptb-mni", status=2).err
    assert "preset 'ptb-mni'; nearest: ptb-mini" in message
    message = cli("train text_classification --preset ptb-mini", status=2).err
    assert "preset 'ptb-mini' is a configuration of task 'char_lm'" in message


def test_a_signal_stops_the_command_which_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    words = typed("reproduce kim2021/figure-2 --scale toy --quiet --out", [tmp_path])
    with monkeypatch.context() as patched:
        stop = lambda *_: signal.raise_signal(signal.SIGTERM)  # noqa: E731
        patched.setattr("wellposed_studies.reproduce.draw", stop)
        assert main(words) == 130
    message = capsys.readouterr().err
    assert f"interrupted; continue with: wellposed {' '.join(words)}\n" in message
    assert main(words) == 0


def test_a_plan_says_what_could_be_seen(cli):
    output = cli("reproduce sengupta2023/table-1 kim2021/figure-11 --plan --scale medium").out
    table, figure = output.split("kim2021/figure-11")
    assert "seeds:        5" in table
    assert "a difference of 1.8 in test accuracy, in points is seen with a chance of 80%" in table
    assert "improved the loss on valid by less than 1%" in table
    assert "every seed has to agree: what fails in 42% of trainings fails here in 80%" in figure
    plan = cli(["reproduce", "kim2021/figure-2", "--plan"]).out
    assert "nothing is trained" in plan
    assert "--data" not in plan
    plan = cli(["reproduce", "kim2021/figure-4", "mcgrath2024/qr", "--plan"]).out
    assert "data:         --data, or English prose that ships with Python" in plan
    assert "data:         --data is needed" in plan


def test_every_recipe_is_a_function_of_a_request_and_takes_at_most_ten_hours_on_medium():
    for name in RECIPES:
        recipe = RECIPES.get(name)
        assert 0 < recipe.minutes["medium"] <= 10 * 60, name
        [request] = inspect.signature(recipe.function, eval_str=True).parameters.values()
        assert request.annotation is Request


def test_a_recipe_without_its_data_says_what_it_needs(tmp_path, cli):
    words = typed("reproduce mcgrath2024/figure-1 --scale mini --out", [tmp_path])
    message = cli(words, status=2).err
    assert "--data FOLDER" in message
    assert "ids-sst-train.csv, quora-train.csv, sts-train.csv" in message


def test_a_recipe_prints_paper_says_and_we_got(tmp_path, cli):
    captured = cli("reproduce kim2021/figure-3 --scale toy --quiet --out", [tmp_path])
    assert "paper says:" in captured.out
    assert "we got:" in captured.out
    assert captured.err == ""
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".svg", ".json"}


@pytest.mark.slow
def test_a_papers_name_takes_all_its_recipes_and_a_failed_claim_is_an_error_where_asked(
    tmp_path, cli, monkeypatch
):
    def made(recipe, request):
        request.announce("half way")
        panel = Panel("t", "x", "y")
        test = Criterion("it is larger", seeds=3)
        holds = recipe.name != "kim2021/figure-7"
        return Reproduction([{"a": 1}], [panel], "nothing", holds, criterion=test)

    monkeypatch.setattr(Recipe, "__call__", made)
    captured = cli(["reproduce", "kim2021", "--out", str(tmp_path), "--strict"], status=1)
    of_kim = sum(name.startswith("kim2021/") for name in RECIPES)
    verdicts = re.findall(r"verdict:    (confirmed|seen)", captured.out)
    assert len(verdicts) == of_kim - 1
    assert re.search("verdict:    (contradicted|not seen)", captured.out)
    assert "test:       it is larger" in captured.out
    assert "seeds:      3; uncertainty: none" in captured.out
    assert "kim2021/figure-2: 0.2 min" in captured.err
    assert f"kim2021/figure-4: {RECIPES.get('kim2021/figure-4').time('mini')}" in captured.err
    assert "half way" in captured.err
    output = cli(["reproduce", "kim2021/figure-7", "--out", str(tmp_path), "--quiet"]).out
    assert "contradicted" in output


def test_a_papers_name_gives_each_recipe_what_it_reads(tmp_path, monkeypatch, cli):
    inputs = {}

    def made(recipe, request):
        inputs[recipe.name] = (request.data, request.vectors, request.languages)
        return Reproduction([{"a": 1}], [Panel("t", "x", "y")], "nothing", None)

    monkeypatch.setattr(Recipe, "__call__", made)
    (tmp_path / "data").mkdir()
    data = str(tmp_path / "data")
    out = str(tmp_path / "out")
    words = typed("reproduce zhang2021 --languages en,fr --vectors glove.txt")
    succeed(words, "--data", [data], "--out", [out])
    assert inputs["zhang2021/theorem-2.1"] == (None, None, None)
    assert inputs["zhang2021/table-1"] == (data, None, "en,fr")
    assert inputs["zhang2021/table-4"] == (data, "glove.txt", None)
    words = typed("reproduce kim2021 --encoder e --languages en,fr --out", [out])
    message = cli(words, status=2).err
    assert "kim2021: none of its recipes reads --encoder, --languages; leave it out" in message
