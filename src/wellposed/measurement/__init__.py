"""Measure how well conditioned a model is. Only measuring imports torch, not this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wellposed.lazy import import_on_first_use
from wellposed.measurement._figures import INK as INK
from wellposed.measurement._figures import error_figure as error_figure
from wellposed.measurement._figures import figure_style as figure_style
from wellposed.measurement._figures import heat_map as heat_map
from wellposed.measurement._figures import new_figure as new_figure
from wellposed.measurement._figures import role_name as role_name
from wellposed.measurement._figures import short_role as short_role
from wellposed.measurement._measurement import WEIGHT_COLUMNS as WEIGHT_COLUMNS
from wellposed.measurement._measurement import Measurement as Measurement
from wellposed.measurement._measurement import csv_text as csv_text
from wellposed.measurement._measurement import write_csv as write_csv

if TYPE_CHECKING:
    from wellposed.measurement._measure import measure as measure
    from wellposed.measurement._monitor import Alarm as Alarm
    from wellposed.measurement._monitor import Monitor as Monitor
    from wellposed.measurement._monitor import worst_vitals as worst_vitals
else:  # a report reads a measurement without torch
    __getattr__, __dir__ = import_on_first_use(
        __name__,
        {
            "_measure": "measure",
            "_monitor": "Alarm Monitor worst_vitals",
        },
        gone={
            "DIAGNOSTICS": "loop over find_roles(model).weights(), and read weight.view.tensor()",
        },
    )
