"""Measure how well conditioned a model is. Importing this package does not import torch; measuring does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wellposed.measurement._measurement import WEIGHT_COLUMNS as WEIGHT_COLUMNS
from wellposed.measurement._measurement import Measurement as Measurement
from wellposed.measurement._measurement import write_csv as write_csv
from wellposed.measurement._text import format_number as format_number
from wellposed.measurement._text import text_table as text_table

if TYPE_CHECKING:
    from wellposed.measurement._measure import measure as measure
    from wellposed.measurement._monitor import Monitor as Monitor

# Imported on first use, so that a report can read a measurement without torch.
_LAZY = {"measure": "_measure", "Monitor": "_monitor"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
