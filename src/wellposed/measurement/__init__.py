"""Measure how well conditioned a model is. Importing this package does not import torch; measuring
does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wellposed.lazy import import_on_first_use
from wellposed.measurement._measurement import WEIGHT_COLUMNS as WEIGHT_COLUMNS
from wellposed.measurement._measurement import Measurement as Measurement
from wellposed.measurement._measurement import csv_text as csv_text
from wellposed.measurement._measurement import write_csv as write_csv
from wellposed.text_table import format_number as format_number
from wellposed.text_table import text_table as text_table

if TYPE_CHECKING:
    from wellposed.measurement._correlations import Correlation as Correlation
    from wellposed.measurement._correlations import correlate as correlate
    from wellposed.measurement._correlations import correlations as correlations
    from wellposed.measurement._distances import ActivationFactor as ActivationFactor
    from wellposed.measurement._distances import DistanceMetric as DistanceMetric
    from wellposed.measurement._distances import activation_factor as activation_factor
    from wellposed.measurement._distances import token_distances as token_distances
    from wellposed.measurement._entropy import EntropyEstimator as EntropyEstimator
    from wellposed.measurement._entropy import differential_entropy as differential_entropy
    from wellposed.measurement._entropy import layer_entropy as layer_entropy
    from wellposed.measurement._isomap import IsomapPoints as IsomapPoints
    from wellposed.measurement._isomap import isomap as isomap
    from wellposed.measurement._measure import measure as measure
    from wellposed.measurement._monitor import Alarm as Alarm
    from wellposed.measurement._monitor import Monitor as Monitor
    from wellposed.measurement._monitor import worst_vitals as worst_vitals
    from wellposed.measurement._states import hidden_states as hidden_states
else:  # a report reads a measurement without torch
    __getattr__, __dir__ = import_on_first_use(
        __name__,
        {
            "_correlations": "Correlation correlate correlations",
            "_distances": "ActivationFactor DistanceMetric activation_factor token_distances",
            "_entropy": "EntropyEstimator differential_entropy layer_entropy",
            "_isomap": "IsomapPoints isomap",
            "_measure": "measure",
            "_monitor": "Alarm Monitor worst_vitals",
            "_states": "hidden_states",
        },
    )
