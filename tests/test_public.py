"""The public names are pinned: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wellposed

PUBLIC = {
    "Certificate", "CheckpointError", "ConfigError", "ConvergenceError", "DataError", "Measurement", "Monitor",
    "NotContractiveError", "NotLipschitzError", "OrthogonalityPenalty", "RoleNotFoundError", "Roles", "ShapeError",
    "WellposedError", "certify", "constrain_", "dt_fixup_", "find_roles", "lipschitz_lower_bound", "measure",
    "orthogonal", "register_rule", "remove_norms_", "signal_propagation", "step_change", "t_fixup_",
}  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert set(wellposed.__all__) == PUBLIC
    assert set(wellposed._EXPORTS) == PUBLIC


def test_every_export_resolves_to_its_own_module() -> None:
    for name in wellposed.__all__:
        assert getattr(wellposed, name) is not None


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'mesure'"):
        _ = wellposed.mesure


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, wellposed; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
