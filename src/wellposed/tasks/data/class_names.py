"""Names of labels that are numbers: given, or from the ``classes.txt`` that the releases of Zhang
et al. 2015 hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError
from wellposed.tasks.data.columns import AUTO
from wellposed.tasks.data.files import read_text

CLASSES_FILE = "classes.txt"


def name_classes(labels: Sequence[str], train: str, given: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names of ``labels`` and, for the description, where they are from.

    Names are ``given`` between commas; for ``auto``, line n of ``classes.txt`` beside the train
    file names label n, from 1; where a label of train is not one of its lines, the file is not used
    and the description says so.
    """
    if given != AUTO:
        names = [name.strip() for name in given.split(",")]
        if len(names) != len(labels) or len(set(names)) != len(names) or not all(names):
            raise ConfigError(
                f"class_names = {given!r}: {len(names)} names, expected {len(labels)} distinct"
                f" ones, between commas, for the labels of {train} in this order:"
                f" {', '.join(labels)}"
            )
        return names, {"class_names": dict(zip(labels, names, strict=True))}
    file = Path(train).parent / CLASSES_FILE
    if not Path(train).is_file() or not file.is_file():
        return list(labels), {}
    read = read_text(file)
    known = {
        str(number): name.strip() for number, name in enumerate(read.text.strip().split("\n"), 1)
    }
    if len(set(known.values())) != len(known) or not set(labels) <= set(known):
        reason = (
            f"labels are {', '.join(labels[:10])}, expected some of 1 to {len(known)}, each with a"
            " name of its own"
        )
        return list(labels), {"class_names": f"{file} not used: {reason}"}
    return [known[label] for label in labels], {"class_names": read.description()}
