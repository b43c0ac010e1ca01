"""Doctests of one module alone: its package is imported first, so that what it registers is
registered once."""

from __future__ import annotations

import wellposed_lab.compare.variants
import wellposed_lab.tasks  # noqa: F401
