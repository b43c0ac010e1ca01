"""``wellposed push RUN REPOSITORY``: upload the saved model of a finished run, with its model card,
to the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from wellposed_lab.cli.parser import parse_words


@dataclass(frozen=True)
class PushArguments:
    """Upload final/ of a run, with its model card, to the Hugging Face hub."""

    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """A finished run, or its final/."""
    repository: Annotated[str, tyro.conf.arg(metavar="REPOSITORY"), tyro.conf.Positional]
    """NAME or OWNER/NAME; made where it is missing."""
    public: bool = False
    """Make a repository that everyone sees; private where not given."""


def run(words: Sequence[str]) -> int:
    """Upload, print the address and return the exit status."""
    options = parse_words(PushArguments, words, prog="wellposed push")

    from wellposed_lab.training.folder.save import push_to_hub

    final = options.run / "final"
    folder = final if final.is_dir() else options.run
    print(push_to_hub(folder, options.repository, public=options.public))
    return 0
