"""Well-posed Transformers: orthogonal, Lipschitz, invertible, trainable without normalisation.

Models of PyTorch and Hugging Face are measured and penalised as they are. Certificates are for models built from this
package's layers, linear layers, activations and norms: whatever else is inside is named, and has no bound.

The public names are listed once, in `_EXPORTS`, and are imported on first use, so that ``wellposed --help`` does not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from wellposed.certification import Certificate as Certificate
    from wellposed.certification import certify as certify
    from wellposed.certification import lipschitz_lower_bound as lipschitz_lower_bound
    from wellposed.certification import register_rule as register_rule
    from wellposed.constrain import constrain_ as constrain_
    from wellposed.constrain import orthogonal as orthogonal
    from wellposed.constrain import parameter_groups as parameter_groups
    from wellposed.errors import CheckpointError as CheckpointError
    from wellposed.errors import ConfigError as ConfigError
    from wellposed.errors import ConvergenceError as ConvergenceError
    from wellposed.errors import DataError as DataError
    from wellposed.errors import NotContractiveError as NotContractiveError
    from wellposed.errors import NotLipschitzError as NotLipschitzError
    from wellposed.errors import RoleNotFoundError as RoleNotFoundError
    from wellposed.errors import ShapeError as ShapeError
    from wellposed.errors import WellposedError as WellposedError
    from wellposed.initialize import dt_fixup_ as dt_fixup_
    from wellposed.initialize import remove_norms_ as remove_norms_
    from wellposed.initialize import signal_propagation as signal_propagation
    from wellposed.initialize import step_change as step_change
    from wellposed.initialize import t_fixup_ as t_fixup_
    from wellposed.measurement import Measurement as Measurement
    from wellposed.measurement import Monitor as Monitor
    from wellposed.measurement import measure as measure
    from wellposed.penalize import OrthogonalityPenalty as OrthogonalityPenalty
    from wellposed.roles import Roles as Roles
    from wellposed.roles import find_roles as find_roles

_SUBMODULES = frozenset(
    {
        "certification", "constrain", "errors", "functional", "initialize", "integrations", "linalg",
        "measurement", "models", "nn", "penalize", "presets", "recipes", "report", "roles", "tasks", "training",
    }
)  # fmt: skip

# public name -> module that defines it
_EXPORTS: dict[str, str] = {
    "Certificate": "certification",
    "Measurement": "measurement",
    "Monitor": "measurement",
    "OrthogonalityPenalty": "penalize",
    "Roles": "roles",
    "certify": "certification",
    "constrain_": "constrain",
    "dt_fixup_": "initialize",
    "find_roles": "roles",
    "lipschitz_lower_bound": "certification",
    "measure": "measurement",
    "orthogonal": "constrain",
    "parameter_groups": "constrain",
    "register_rule": "certification",
    "remove_norms_": "initialize",
    "signal_propagation": "initialize",
    "step_change": "initialize",
    "t_fixup_": "initialize",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "ConvergenceError": "errors",
    "DataError": "errors",
    "NotContractiveError": "errors",
    "NotLipschitzError": "errors",
    "RoleNotFoundError": "errors",
    "ShapeError": "errors",
    "WellposedError": "errors",
}

__all__ = [
    "Certificate",
    "CheckpointError",
    "ConfigError",
    "ConvergenceError",
    "DataError",
    "Measurement",
    "Monitor",
    "NotContractiveError",
    "NotLipschitzError",
    "OrthogonalityPenalty",
    "RoleNotFoundError",
    "Roles",
    "ShapeError",
    "WellposedError",
    "certify",
    "constrain_",
    "dt_fixup_",
    "find_roles",
    "lipschitz_lower_bound",
    "measure",
    "orthogonal",
    "parameter_groups",
    "register_rule",
    "remove_norms_",
    "signal_propagation",
    "step_change",
    "t_fixup_",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"wellposed.{_EXPORTS[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"wellposed.{name}")
    raise AttributeError(f"module 'wellposed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_SUBMODULES})
