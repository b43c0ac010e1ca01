"""Remarks on the data of a task, one line each, from the task's description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def data_remarks(described: Mapping[str, Any]) -> list[str]:
    """Return remarks that a user should know before trusting a score: on blank rows, labels, texts of valid
    and test that are in train, texts that were cut or left out, and texts without blanks. Their
    source is `wellposed_lab.tasks.task.Task.description`, or ``data`` of a ``result.json``.

    >>> data_remarks({"examples": {"test": 9}, "texts_also_in_train": {"valid": 0, "test": 2}})
    ['2 of 9 texts of test are also in train']
    """
    return [*_of_files(described), *_of_labels(described), *_of_counts(described)]


def _of_files(described: Mapping[str, Any]) -> Iterator[str]:
    for split, file in _entries(described.get("files")):
        name = _entries(file) and file.get("path", split)
        parts = dict(_entries(file))
        count = parts.get("blank_rows_skipped")
        if count:
            yield f"{name}: {count} blank rows were skipped"
        count = parts.get("label_blanks_removed")
        if count:
            yield f"{name}: blanks around {count} labels were removed"


def _of_labels(described: Mapping[str, Any]) -> Iterator[str]:
    for group in _listed(described.get("labels_that_differ_in_case")):
        alike = " and ".join(map(repr, _listed(group)))
        yield f"labels {alike} differ only in case, and are {len(_listed(group))} classes"
    for label in _listed(described.get("labels_like_a_missing_value")):
        yield f"label {label!r} is read as a class, not as a missing value"
    for split, labels in _entries(described.get("labels_of_train_alone")):
        names = _listed(labels)
        if names:
            yield f"{split} has no text of {len(names)} classes of train: {_short(names)}"


def _of_counts(described: Mapping[str, Any]) -> Iterator[str]:
    done = {
        "truncated_texts": ("texts", f"were cut to max_length = {described.get('max_length')}"),
        "truncated_documents": ("documents", "were cut to max_length"),
        "texts_without_blanks": (
            "texts",
            "have no blanks between words; give --tokenizer character, or put blanks in",
        ),
        "pairs_cut_as_too_long": ("pairs", "were cut to max_tokens"),
        "cut_to_max_tokens": ("texts", "were cut to max_tokens"),
    }
    sizes = dict(_entries(described.get("examples")))
    for name, value in described.items():
        noun, again, _ = name.partition("_also_in_train")
        noun, what = (noun, "are also in train") if again else done.get(name, ("", ""))
        for split, number in _entries(value) if noun else ():
            # Each side of a pair is counted, so there may be more sides than pairs.
            count = sum(part for _, part in _entries(number)) if _entries(number) else number
            is_counted = noun in ("texts", "pairs") and not _entries(number) and split in sizes
            share = f" of {sizes[split]}" if is_counted else ""
            if count:
                yield f"{count}{share} {noun} of {split} {what}"

    count = dict(_entries(described.get("train_pairs_dropped_as_too_long"))).get("pairs")
    if count:
        yield f"{count} pairs of train were left out: longer than max_tokens"


def _entries(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []


def _short(names: list[Any]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
