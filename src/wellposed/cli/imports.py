"""``--import FILE.py``: code of the user's own that runs before the other options are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro

from wellposed.plugins import import_file

ImportedFiles: TypeAlias = Annotated[
    tuple[Path, ...], tyro.conf.arg(name="import", metavar="FILE.py"), tyro.conf.UseAppendAction
]
"""The option, for the arguments of a command; it may be given several times."""


def import_named_files(words: Sequence[str]) -> None:
    """Import every file that follows ``--import`` among the words of a command."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--import="):
            import_file(Path(word.partition("=")[2]))
        elif word == "--import":
            import_file(Path(following))
