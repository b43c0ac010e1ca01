"""Thin adapters to training engines; importing this package imports neither an engine nor torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellposed.integrations._condition import ConditionMetrics as ConditionMetrics
    from wellposed.integrations._hf_trainer import ConditionCallback as ConditionCallback
    from wellposed.integrations._hf_trainer import penalized_loss as penalized_loss
    from wellposed.integrations._lightning import LightningConditionCallback as LightningConditionCallback

# Imported on first use: a Trainer user need not have Lightning, nor the other way round.
_LAZY = {
    "ConditionMetrics": "_condition",
    "ConditionCallback": "_hf_trainer",
    "penalized_loss": "_hf_trainer",
    "LightningConditionCallback": "_lightning",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
