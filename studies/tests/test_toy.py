"""Every recipe at toy scale: it leaves table, figure and claim, and does not train again what is
there; what holds at any size holds."""

import pytest
from studies.tests.support.finished_runs import written
from studies.tests.support.recipes import check_reproduced

from wellposed_studies.recipe import RECIPES
from wellposed_studies.reproduce import reproduce

pytestmark = pytest.mark.slow
TABLES = ("sengupta2023/table-1", "sengupta2023/table-2")
GIVEN = (*TABLES, "sengupta2023/fig", "kim2021/", "frontier/")
"""Recipes that get data if they take any; the others read the builtin data."""


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Return one folder for all recipes, so that those which share runs train them once."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("mcgrath2024/")])
def test_a_recipe_leaves_its_files_and_keeps_its_runs(name, data, encoder, out):
    takes = "data" in RECIPES.get(name).takes and name != "frontier/translation"
    options = {"data": str(data) if takes and name.startswith(GIVEN) else None}
    options |= {"encoder": str(encoder)} if "encoder" in RECIPES.get(name).takes else {}
    before = written(out)
    done = reproduce(name, scale="toy", out=out, **options)
    check_reproduced(done)
    assert RECIPES.get(name).power or written(out) == before, "what trains is run on placebos"
    rows = done.result.rows
    assert all(row["certified"] <= row["attacked"] for row in rows if "attacked" in row)
    bounded = [row for row in rows if "total" in row and row["model"].startswith("lipschitz")]
    assert all(row["total"] <= 1 for row in bounded)
    if RECIPES.get(name).power:
        trained = written(out)
        reproduce(name, scale="toy", out=out, **options)
        assert written(out) == trained
