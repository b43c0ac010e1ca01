"""Labels as people write them: blanks around them, two spellings of one class, words for nothing.

Blanks around a label are removed and counted. Two spellings that only a typist tells apart (1 and
1.0, full-width digits, quotes) are refused with file:line. Labels that may well be two classes
(they differ in case) are kept and remarked on, as are words such as "None".
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_INVISIBLE = "\ufeff\u200b\u200c\u200d\u200e\u200f\u2060"
_BLANKS = "".join(map(chr, (*range(9, 14), 32, 133, 160, 5760, *range(8192, 8203), 8232, 8233)))
_AROUND = _BLANKS + "\u202f\u205f\u3000" + _INVISIBLE
_NUMBER = re.compile(r"[+-]?(\d{1,300}(\.\d{0,300})?|\.\d{1,300})(e[+-]?\d{1,3})?")
NOTHING = ("na", "n/a", "<na>", "none", "null", "nil", "-", "?", "unknown", "undefined")
"""Words that often stand for a missing value, and may be a class."""


def clean_label(label: str) -> str:
    """Return a label without blanks, byte-order marks and zero-width characters around it.

    >>> [clean_label(label) for label in ("pos ", "\\ufeffpos", "\\u00a0very good")]
    ['pos', 'pos', 'very good']
    """
    return label.strip(_AROUND)


def label_problem(label: Any) -> str | None:
    """Return why a value is no label, or None."""
    if isinstance(label, float) and not math.isfinite(label):
        return f"the label is {label}, which is no class; write a label, or leave the row out"
    if not isinstance(label, str):
        return None
    if not clean_label(label):
        return "the label is empty"
    if clean_label(label).lower() in ("nan", "#n/a"):
        return f"the label is {label!r}, a missing value; write a label, or leave the row out"
    return None


def spelling(label: str) -> str:
    """Return the same text for spellings that no reader takes for two classes.

    >>> {spelling(label) for label in ("1", "1.0", "\\uff11", '"1"', "01")}
    {'1'}
    >>> spelling("Pos") == spelling("pos")
    False
    """
    text = unicodedata.normalize("NFKC", label)
    text = " ".join("".join(c for c in text if c not in _INVISIBLE).split())
    if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'":
        text = clean_label(text[1:-1])
    if _NUMBER.fullmatch(text.lower()):
        number = float(text)
        digits = text.lstrip("+-")
        if digits.isdigit():
            return text.removeprefix("+").replace(digits, digits.lstrip("0") or "0")
        return str(int(number)) if number.is_integer() else repr(number)
    return text


def mixed_spellings(labels: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each label that an earlier place spells otherwise.

    Args:
        labels: pairs of a label and its place, ``file:line``.
    """
    first: dict[str, tuple[str, str]] = {}
    problems: dict[str, str] = {}
    for label, where in labels:
        other, at = first.setdefault(spelling(label), (label, where))
        if other != label and label not in problems:
            problems[label] = f"{where}: label {label!r} is {other!r} of {at}, spelled otherwise"
    return list(problems.values())


def label_notes(labels: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return what a user should know of the labels of each split, for `data_remarks`."""
    train = set(labels["train"])
    alike: dict[str, list[str]] = {}
    for label in sorted(train):
        alike.setdefault(label.casefold(), []).append(label)

    absent = {
        split: sorted(train - set(names)) for split, names in labels.items() if train - set(names)
    }
    notes = {
        "labels_that_differ_in_case": [group for group in alike.values() if len(group) > 1],
        "labels_like_a_missing_value": [
            label for label in sorted(train) if label.lower() in NOTHING
        ],
        "labels_of_train_alone": absent,
    }

    return {name: note for name, note in notes.items() if note}
