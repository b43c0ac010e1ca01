"""The public names are pinned: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import wellposed

PUBLIC = {
    "Certificate", "CheckpointError", "ConfigError", "ConvergenceError", "DataError", "Measurement", "Monitor",
    "NotContractiveError", "NotLipschitzError", "OrthogonalityPenalty", "RoleNotFoundError", "Roles", "ShapeError",
    "WellposedError", "certify", "constrain_", "dt_fixup_", "find_roles", "lipschitz_lower_bound", "measure",
    "orthogonal", "parameter_groups", "register_rule", "remove_norms_", "signal_propagation", "step_change", "t_fixup_",
}  # fmt: skip


def imported_for_type_checkers(package: ModuleType) -> dict[str, str]:
    """Public name -> module, of the imports of a package's `__init__` below `if TYPE_CHECKING`."""
    tree = ast.parse(Path(str(package.__file__)).read_text("utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    lines = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    return {str(alias.asname): str(line.module) for line in lines for alias in line.names}


def test_the_public_names_are_these() -> None:
    assert sorted(wellposed.__all__) == sorted(PUBLIC), "each once, and no other"
    assert set(wellposed._EXPORTS) == PUBLIC
    assert set(dir(wellposed)) >= PUBLIC | wellposed._SUBMODULES


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_export_resolves_to_its_own_module(name: str) -> None:
    """It is the very object that the package named in the table publishes, and it is defined there and nowhere else."""
    home = f"wellposed.{wellposed._EXPORTS[name]}"
    found = getattr(wellposed, name)
    assert found is getattr(importlib.import_module(home), name)
    assert found.__name__ == name
    assert f"{found.__module__}.".startswith(f"{home}.")


@pytest.mark.parametrize("package", [wellposed, wellposed.training, wellposed.measurement, wellposed.integrations])
def test_type_checkers_see_the_names_that_are_imported_on_first_use(package: ModuleType) -> None:
    table = getattr(package, "_EXPORTS", None) or package._LAZY
    assert imported_for_type_checkers(package) == {
        name: f"{package.__name__}.{module}" for name, module in table.items()
    }
    assert all(getattr(package, name) is not None for name in table)


@pytest.mark.parametrize("name", sorted(wellposed._SUBMODULES))
def test_every_sub_package_is_an_attribute(name: str) -> None:
    assert getattr(wellposed, name) is importlib.import_module(f"wellposed.{name}")


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'mesure'"):
        _ = wellposed.mesure


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, wellposed; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
