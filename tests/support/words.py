"""Words of a command line, written as one types them."""

from __future__ import annotations

from collections.abc import Sequence


def words(*parts: str | Sequence[object]) -> list[str]:
    """Return the words of texts, split at white space, and the items of lists as they are."""
    return [
        str(word) for part in parts for word in (part.split() if isinstance(part, str) else part)
    ]


def succeed(*parts: str | Sequence[object]) -> None:
    """Run the command of these words, which must end well."""
    from wellposed.cli import main

    typed = words(*parts)
    assert main(typed) == 0, typed
