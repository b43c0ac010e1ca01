"""Importing this registers every task of this package."""

from wellposed_studies.tasks import (  # noqa: F401
    dialogue,
    listops,
    marked,
    pathfinder,
    pixels,
    retrieval,
)
