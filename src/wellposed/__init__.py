"""Well-posed Transformers: orthogonal, Lipschitz, invertible, trainable without normalisation; measured and certified.

The public names are listed once, in `_EXPORTS`, and are imported on first use, so that ``wellposed --help`` does not
import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    pass

_SUBMODULES = frozenset(
    {
        "certification", "constrain", "errors", "functional", "initialize", "integrations", "linalg",
        "measurement", "models", "nn", "penalize", "presets", "recipes", "report", "roles", "tasks", "training",
    }
)  # fmt: skip

# public name -> module that defines it
_EXPORTS: dict[str, str] = {
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

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"wellposed.{_EXPORTS[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"wellposed.{name}")
    raise AttributeError(f"module 'wellposed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_SUBMODULES})
