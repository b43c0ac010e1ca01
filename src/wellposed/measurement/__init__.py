"""Measure how well conditioned a model is. Importing this package does not import torch; measuring
does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wellposed.lazy import import_on_first_use
from wellposed.measurement._figures import INK as INK
from wellposed.measurement._figures import ROLE_ORDER as ROLE_ORDER
from wellposed.measurement._figures import SPECTRUM_POINTS as SPECTRUM_POINTS
from wellposed.measurement._figures import add_grid as add_grid
from wellposed.measurement._figures import error_figure as error_figure
from wellposed.measurement._figures import error_shown as error_shown
from wellposed.measurement._figures import figure_style as figure_style
from wellposed.measurement._figures import heat_map as heat_map
from wellposed.measurement._figures import new_figure as new_figure
from wellposed.measurement._figures import short_role as short_role
from wellposed.measurement._figures import spectra_by_role as spectra_by_role
from wellposed.measurement._measurement import DIAGNOSTICS as DIAGNOSTICS
from wellposed.measurement._measurement import WEIGHT_COLUMNS as WEIGHT_COLUMNS
from wellposed.measurement._measurement import Measurement as Measurement
from wellposed.measurement._measurement import csv_text as csv_text
from wellposed.measurement._measurement import write_csv as write_csv
from wellposed.text_table import format_number as format_number
from wellposed.text_table import text_table as text_table

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
    )
