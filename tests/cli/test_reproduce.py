"""``wellposed reproduce``: the list, one recipe with its files and row, and wrong names."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.support.words import succeed
from tests.support.words import words as typed

from wellposed.charts import Panel
from wellposed.cli import main
from wellposed.errors import ConfigError
from wellposed.recipes.recipe import recipe_names
from wellposed.recipes.reproduce import RECIPES, Criterion, Recipe, Reproduction, Request, reproduce
from wellposed.registry import Registry


def test_the_list_names_every_recipe_with_its_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    succeed(["reproduce", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == recipe_names()
    assert all(" min" in line or " h" in line for line in lines[1:-1])
    figure_2 = next(line for line in lines if line.startswith("kim2021/figure-2"))
    assert figure_2.split()[1:7] == ["0.2", "min", "0.2", "min", "~5", "min"], (
        "measured, and estimates with a ~"
    )


def test_a_wheel_alone_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty: Registry[Recipe] = Registry("recipe")
    for module in ("recipe", "reproduce"):
        monkeypatch.setattr(f"wellposed.recipes.{module}.RECIPES", empty)
    for words in (["--list"], ["kim2021/figure-2"], ["all"]):
        assert main(["reproduce", *words]) == 2
        assert "pip install ./studies" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="wellposed-studies"):
        reproduce("kim2021/figure-2", out=tmp_path)


def test_the_studies_are_found_by_the_entry_point_that_users_have() -> None:
    [entry] = entry_points(group="wellposed.recipes", name="papers")
    assert entry.load().__name__ == "wellposed_studies.papers"


def test_sweep_names_the_commands_that_do_it_now(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "mcgrath2024", "--data", "x"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "wellposed reproduce mcgrath2024" in said
    assert "wellposed compare minbert" in said


def test_every_recipe_has_a_medium_scale_of_at_most_ten_hours() -> None:
    for name in RECIPES:
        assert 0 < RECIPES.get(name).minutes["medium"] <= 10 * 60, name


def test_a_plan_says_what_could_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    succeed(
        ["reproduce", "sengupta2023/table-1", "kim2021/figure-11", "--plan", "--scale", "medium"]
    )
    table, figure = capsys.readouterr().out.split("kim2021/figure-11")
    assert "seeds:        5" in table
    assert "a difference of 1.8 in test accuracy, in points is seen with a chance of 80%" in table
    assert "improved the loss on valid by less than 1%" in table
    assert "every seed has to agree: what fails in 42% of trainings fails here in 80%" in figure
    succeed(["reproduce", "kim2021/figure-2", "--plan"])
    plan = capsys.readouterr().out
    assert "nothing is trained" in plan
    assert "--data" not in plan
    succeed(["reproduce", "kim2021/figure-4", "mcgrath2024/qr", "--plan"])
    plan = capsys.readouterr().out
    assert "data:         --data, or English prose that ships with Python" in plan
    assert "data:         --data is needed" in plan


def test_the_list_has_every_paper(capsys: pytest.CaptureFixture[str]) -> None:
    succeed(["reproduce", "--list"])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]}
    assert {name.partition("/")[0] for name in listed} == {
        "kim2021", "sengupta2023", "zhang2021", "huang2020", "mcgrath2024", "frontier",
    }  # fmt: skip
    assert {
        "mcgrath2024/figure-1",
        "mcgrath2024/figure-3",
        "mcgrath2024/table-1",
        "mcgrath2024/qr",
    } <= listed


def test_every_listed_recipe_is_a_function_of_a_request() -> None:
    for name in RECIPES:
        function = RECIPES.get(name).function
        [request] = inspect.signature(function, eval_str=True).parameters.values()
        assert request.annotation is Request


def test_a_recipe_without_its_data_says_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["reproduce", "mcgrath2024/figure-1", "--scale", "mini", "--out", str(tmp_path)]) == 2
    )
    said = capsys.readouterr().err
    assert "--data FOLDER" in said
    assert "ids-sst-train.csv, quora-train.csv, sts-train.csv" in said


def test_a_recipe_prints_paper_says_and_we_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    succeed(["reproduce", "kim2021/figure-3", "--scale", "toy", "--out", str(tmp_path), "--quiet"])
    captured = capsys.readouterr()
    assert "paper says:" in captured.out
    assert "we got:" in captured.out
    assert captured.err == ""
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".svg", ".json"}


def test_a_papers_name_takes_all_its_recipes_and_a_failed_claim_is_an_error_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(recipe: Recipe, request: Request) -> Reproduction:
        request.announce("half way")
        panel = Panel("t", "x", "y")
        holds = recipe.name != "kim2021/figure-7"
        return Reproduction(
            [{"a": 1}], [panel], "nothing", holds, criterion=Criterion("it is larger", seeds=3)
        )

    monkeypatch.setattr(Recipe, "__call__", made)
    assert main(["reproduce", "kim2021", "--out", str(tmp_path), "--strict"]) == 1
    captured = capsys.readouterr()
    assert (
        captured.out.count("verdict:    holds")
        == sum(name.startswith("kim2021/") for name in RECIPES) - 1
    )
    assert "DOES NOT HOLD" in captured.out
    assert "test:       it is larger" in captured.out
    assert "seeds:      3; uncertainty: none" in captured.out
    assert "kim2021/figure-2: 0.2 min" in captured.err
    assert f"kim2021/figure-4: {RECIPES.get('kim2021/figure-4').time('mini')}" in captured.err
    assert "half way" in captured.err
    succeed(["reproduce", "kim2021/figure-7", "--out", str(tmp_path), "--quiet"])
    assert "DOES NOT HOLD" in capsys.readouterr().out


def test_a_papers_name_gives_each_recipe_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, tuple[str | None, ...]] = {}

    def made(recipe: Recipe, request: Request) -> Reproduction:
        seen[recipe.name] = (request.data, request.vectors, request.languages)
        return Reproduction([{"a": 1}], [Panel("t", "x", "y")], "nothing", None)

    monkeypatch.setattr(Recipe, "__call__", made)
    (tmp_path / "data").mkdir()
    data, out = str(tmp_path / "data"), str(tmp_path / "out")
    words = typed(
        "reproduce zhang2021 --out",
        [out],
        "--data",
        [data],
        "--languages en,fr --vectors glove.txt",
    )
    succeed(words)
    assert seen["zhang2021/theorem-2.1"] == (None, None, None)
    assert seen["zhang2021/table-1"] == (data, None, "en,fr")
    assert seen["zhang2021/table-4"] == (data, "glove.txt", None)
    assert (
        main(["reproduce", "kim2021", "--out", out, "--encoder", "e", "--languages", "en,fr"]) == 2
    )
    assert (
        "kim2021: none of its recipes reads --encoder, --languages; leave it out"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name a recipe"),
        (["kim2021/figre-2"], "nearest: kim2021/figure-2"),
        (["kim2022"], "unknown recipe"),
    ],
)
def test_wrong_names_are_usage_errors(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *words]) == 2
    assert says in capsys.readouterr().err
