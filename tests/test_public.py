"""The public names are pinned: adding or removing one is a decision, not an accident."""

import ast
import importlib
from pathlib import Path

import pytest
from tests.support.words import python

import wellposed

PUBLIC = {
    "Certificate": "certification", "CheckpointError": "errors", "ConfigError": "errors", "ConvergenceError": "errors",
    "DataError": "errors", "Measurement": "measurement", "Monitor": "measurement", "NotContractiveError": "errors",
    "NotLipschitzError": "errors", "OrthogonalityPenalty": "penalize", "RoleNotFoundError": "errors", "Roles": "roles",
    "ShapeError": "errors", "WellposedError": "errors", "certify": "certification", "constrain_": "constrain",
    "dt_fixup_": "initialize", "find_roles": "roles", "lipschitz_lower_bound": "attack",
    "measure": "measurement", "register_rule": "certification",
    "remove_norms_": "initialize",
    "parameter_groups": "constrain", "t_fixup_": "initialize",
}  # fmt: skip
PACKAGES = {
    "attack", "certification", "constrain", "errors", "functional", "initialize", "integrations", "linalg",
    "measurement", "models", "nn", "optim", "penalize", "presets", "roles", "words",
}  # fmt: skip
LAZY = tuple(f"wellposed{p}" for p in ("", ".integrations", ".measurement", ".words"))


def seen_by_type_checkers(package):
    """Return public name -> module of the imports of a package's `__init__`, as a type checker
    reads them."""
    tree = ast.parse(Path(str(importlib.import_module(package).__file__)).read_text("utf-8"))
    lines = [line for line in ast.walk(tree) if isinstance(line, ast.ImportFrom)]
    every = [(alias, str(line.module)) for line in lines for alias in line.names]
    return {alias.name: home for alias, home in every if alias.asname == alias.name}


def test_the_public_names_are_these():
    assert wellposed.__all__ == sorted(PUBLIC)
    assert set(seen_by_type_checkers("wellposed")) == PUBLIC.keys() | PACKAGES | {"__version__"}
    assert set(dir(wellposed)) >= PUBLIC.keys() | PACKAGES


def test_a_star_import_gives_the_public_names():
    names = {}
    exec("from wellposed import *", names)
    assert names.keys() - {"__builtins__"} == PUBLIC.keys()


@pytest.mark.parametrize(("name", "package"), PUBLIC.items())
def test_a_public_name_is_what_its_package_publishes_and_defines(name, package):
    value = getattr(wellposed, name)
    assert value is getattr(importlib.import_module(f"wellposed.{package}"), name)
    assert value.__name__ == name
    assert f"{value.__module__}.".startswith(f"wellposed.{package}.")


@pytest.mark.parametrize("package", LAZY)
def test_python_gives_the_objects_that_type_checkers_see(package):
    module = importlib.import_module(package)
    checked = seen_by_type_checkers(package)
    assert checked.keys() <= set(dir(module))
    assert set(module.__getattr__("__all__")) <= checked.keys()
    for name, home in checked.items():
        if home == package:
            expected = importlib.import_module(f"{home}.{name}")
        else:
            expected = getattr(importlib.import_module(home), name)
        assert getattr(module, name) is expected


@pytest.mark.parametrize("package", LAZY)
def test_an_unknown_attribute_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'mesure'"):
        _ = importlib.import_module(package).mesure


def test_a_removed_name_says_what_to_use():
    with pytest.raises(AttributeError, match=r"'tie_queries_and_keys_'; give each .*query.weight"):
        wellposed.tie_queries_and_keys_  # noqa: B018
    with pytest.raises(AttributeError, match=r"'orthogonal'; use constrain_\(.*parametrizations"):
        _ = wellposed.orthogonal


@pytest.mark.parametrize("package", [name for name in LAZY if name != "wellposed.integrations"])
def test_importing_a_lazy_package_does_not_import_torch(package):
    code = f"import sys, {package}; sys.exit('torch' in sys.modules or not dir({package}))"
    assert python(["-c", code]).returncode == 0
