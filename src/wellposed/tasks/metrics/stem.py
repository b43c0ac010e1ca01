"""Porter's stemmer (1980) of nltk, as METEOR and CIDEr use it; no download, no word list."""

from __future__ import annotations

import functools
import re
from typing import Any

from wellposed.errors import missing_extra

_PLAIN = re.compile(r"[a-z]{3,}")


@functools.lru_cache(maxsize=1 << 16)
def porter_stem(word: str) -> str:
    """Return the stem of a lower-case English word by the five steps of Porter (1980).

    Status: exact; the rules of "An algorithm for suffix stripping" as published, without the two
    later departures of the author's own program. Words that are not three or more of the letters a
    to z are their own stem.

    Raises:
        ConfigError: nltk is not installed.

    When not to use: other languages than English. The first call imports nltk, which takes a second
    or two.

    >>> [porter_stem(word) for word in ("relational", "hopping", "cats", "cat", "42")]
    ['relat', 'hop', 'cat', 'cat', '42']
    """
    return _stemmer().stem(word) if _PLAIN.fullmatch(word) else word


@functools.cache
def _stemmer() -> Any:
    try:
        from nltk.stem.porter import PorterStemmer
    except ImportError as error:
        raise missing_extra("nltk", "train", "METEOR and CIDEr") from error
    return PorterStemmer(PorterStemmer.ORIGINAL_ALGORITHM)
