"""Measure how well conditioned a model is. Importing this package does not import torch; measuring does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wellposed.measurement._measurement import WEIGHT_COLUMNS as WEIGHT_COLUMNS
from wellposed.measurement._measurement import Measurement as Measurement
from wellposed.measurement._measurement import write_csv as write_csv
from wellposed.text_table import format_number as format_number
from wellposed.text_table import text_table as text_table

if TYPE_CHECKING:
    from wellposed.measurement._activation_factor import ActivationFactor as ActivationFactor
    from wellposed.measurement._activation_factor import activation_factor as activation_factor
    from wellposed.measurement._correlations import Correlation as Correlation
    from wellposed.measurement._correlations import correlate as correlate
    from wellposed.measurement._correlations import correlations as correlations
    from wellposed.measurement._entropy import EntropyEstimator as EntropyEstimator
    from wellposed.measurement._entropy import differential_entropy as differential_entropy
    from wellposed.measurement._entropy import layer_entropy as layer_entropy
    from wellposed.measurement._isomap import IsomapPoints as IsomapPoints
    from wellposed.measurement._isomap import isomap as isomap
    from wellposed.measurement._measure import measure as measure
    from wellposed.measurement._monitor import Monitor as Monitor
    from wellposed.measurement._states import hidden_states as hidden_states
    from wellposed.measurement._token_distances import DistanceMetric as DistanceMetric
    from wellposed.measurement._token_distances import token_distances as token_distances

# Imported on first use, so that a report can read a measurement without torch.
_LAZY = {
    "ActivationFactor": "_activation_factor",
    "Correlation": "_correlations",
    "DistanceMetric": "_token_distances",
    "EntropyEstimator": "_entropy",
    "IsomapPoints": "_isomap",
    "Monitor": "_monitor",
    "activation_factor": "_activation_factor",
    "correlate": "_correlations",
    "correlations": "_correlations",
    "differential_entropy": "_entropy",
    "hidden_states": "_states",
    "isomap": "_isomap",
    "layer_entropy": "_entropy",
    "measure": "_measure",
    "token_distances": "_token_distances",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
