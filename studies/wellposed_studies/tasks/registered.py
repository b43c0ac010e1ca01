"""Importing this registers every task of this package."""

from wellposed_studies.tasks import dialogue, listops, marked, pathfinder, pixels, retrieval  # noqa: F401
