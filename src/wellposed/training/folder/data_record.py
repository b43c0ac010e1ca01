"""Which data a run began with: the digests in its task's description, kept in ``env.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import DataError, listed
from wellposed.training.folder import run_folder

if TYPE_CHECKING:
    from wellposed.tasks import Task

DATA, DIGEST = "data", "sha256"


def environment_of(task: Task, command: Sequence[str] | None) -> dict[str, Any]:
    """Return what ``env.json`` holds of a start: `run_folder.environment`, and the digests of the
    data."""
    return {**run_folder.environment(command), DATA: data_digests(task.description())}


def data_digests(description: Mapping[str, Any]) -> dict[str, str]:
    """Return every SHA-256 in a description of data, by the place where it stands.

    >>> data_digests({"source": "a/", "files": {"train": {"sha256": "ab", "bytes": 3}}, "sha256": {"test": "cd"}})
    {'files.train': 'ab', 'test': 'cd'}
    """
    return {
        ".".join(name for name in place if name != DIGEST): digest
        for place, digest in _leaves(description, ())
    }


def _leaves(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*place, str(name)))
    elif DIGEST in place:
        yield place, str(value)


def check_data(out: Path, task: Task) -> None:
    """Refuse to go on with a run, or to take its result, where its data has changed since it began.

    Folders written before digests were kept, and data without one, are not compared.

    Raises:
        DataError: each file or split that changed, with both digests.
        CheckpointError: the record is damaged.
    """
    begun = run_folder.read_environment(out).get(DATA)
    if not isinstance(begun, dict):
        return
    found = data_digests(task.description())
    places = [place for place in {**begun, **found} if begun.get(place) != found.get(place)]
    changed = [
        f"{place}: SHA-256 was {begun.get(place)}, is {found.get(place)}" for place in places
    ]
    if changed:
        raise DataError(
            f"{out}: the data is not what the run began with:\n{listed(changed)}\n"
            "restore it, or train in another folder"
        )
