"""Text in which every character stands alone, as in the Penn Treebank of characters: ``n o _ i
t``."""

from __future__ import annotations

from wellposed.errors import DataError, listed

PROBED_LINES, MEAN_TOKENS = 50, 4


def looks_spaced(text: str) -> bool:
    """Return whether the first 50 lines are single characters separated by spaces, at least four to
    a line."""
    lines = text.split("\n", PROBED_LINES)[:PROBED_LINES]
    tokens = [line.split() for line in lines if line.strip()]
    count = sum(map(len, tokens))
    return count >= MEAN_TOKENS * len(tokens) > 0 and all(
        len(token) == 1 for line in tokens for token in line
    )


def unspace(text: str, where: str) -> str:
    r"""Map characters separated by single spaces, ``_`` for a space, back to plain text; line ends
    stay.

    >>> unspace("n o _ i t\n a _ b \n ", "file")
    'no it\na b\n'
    """
    problems = []
    lines = [line.strip(" ") for line in text.split("\n")]
    for number, line in enumerate(lines, 1):
        if line[1::2].strip(" ") or " " in line[::2]:
            problems.append(
                f"{where}:{number}: expected single characters separated by single spaces:"
                f" {line[:40]!r}"
            )
    if problems:
        raise DataError(
            "the text is not in the spaced format; give format='plain' to read it as it is:\n"
            + listed(problems)
        )
    return "\n".join(line[::2].replace("_", " ") for line in lines)
