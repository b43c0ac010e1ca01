"""Doctests of one module alone: its package is imported first, so that what it registers is
registered once."""

from __future__ import annotations

import wellposed.compare.variants
import wellposed.models
import wellposed.tasks  # noqa: F401
