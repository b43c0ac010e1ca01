"""Doctests of one module alone: the package is imported first, so that each recipe is registered once."""

import wellposed_studies  # noqa: F401
