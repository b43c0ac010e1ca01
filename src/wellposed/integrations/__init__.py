"""Thin adapters to training engines and to models of others; importing this package imports neither, nor torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellposed.integrations._attention_interface import register_attention as register_attention
    from wellposed.integrations._attention_interface import set_attention_ as set_attention_
    from wellposed.integrations._condition import ConditionMetrics as ConditionMetrics
    from wellposed.integrations._hf_trainer import ConditionCallback as ConditionCallback
    from wellposed.integrations._hf_trainer import penalized_loss as penalized_loss
    from wellposed.integrations._lightning import LightningConditionCallback as LightningConditionCallback

# Imported on first use: a Trainer user need not have Lightning, nor the other way round.
_LAZY = {
    "ConditionMetrics": "_condition",
    "ConditionCallback": "_hf_trainer",
    "penalized_loss": "_hf_trainer",
    "register_attention": "_attention_interface",
    "set_attention_": "_attention_interface",
    "LightningConditionCallback": "_lightning",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
