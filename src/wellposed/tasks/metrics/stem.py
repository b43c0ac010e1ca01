"""The suffix-stripping algorithm of Porter (1980), as METEOR and CIDEr use it; no package, no word list."""

from __future__ import annotations

import functools
import re

_VOWELS = frozenset("aeiou")
_STEP_2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "abli": "able", "alli": "al",
    "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate", "alism": "al",
    "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble",
}  # fmt: skip
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP_4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti",
    "ous", "ive", "ize",
)  # fmt: skip
_PLAIN = re.compile(r"[a-z]{3,}")


@functools.lru_cache(maxsize=1 << 16)
def porter_stem(word: str) -> str:
    """Return the stem of a lower-case English word by the five steps of Porter (1980).

    Status: exact; the rules of "An algorithm for suffix stripping" as published, without the two later departures of
    the author's own program. Words that are not three or more of the letters a to z are their own stem.

    When not to use: other languages than English.

    >>> [porter_stem(word) for word in ("relational", "hopping", "cats", "cat", "42")]
    ['relat', 'hop', 'cat', 'cat', '42']
    """
    if not _PLAIN.fullmatch(word):
        return word
    word = _step_1(word)
    word = _replace(word, _STEP_2)
    word = _replace(word, _STEP_3)
    word = _step_4(word)
    return _step_5(word)


def _shape(stem: str) -> str:
    """Return one letter per letter: v for a vowel, c for a consonant; y is a vowel after a consonant."""
    shape = ""
    for letter in stem:
        vowel = letter in _VOWELS or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(stem: str) -> int:
    """Return m of [C](VC)^m[V]."""
    return _shape(stem).count("vc")


def _ends_consonant_vowel_consonant(stem: str) -> bool:
    return _shape(stem).endswith("cvc") and stem[-1] not in "wxy"


def _ends_double_consonant(stem: str) -> bool:
    return len(stem) > 1 and stem[-1] == stem[-2] and _shape(stem).endswith("c")


def _step_1(word: str) -> str:
    if word.endswith("s"):
        if word.endswith(("sses", "ies")):
            word = word[:-2]
        elif not word.endswith("ss"):
            word = word[:-1]
    if word.endswith("eed"):
        word = word[:-1] if _measure(word[:-3]) > 0 else word
    else:
        for suffix in ("ed", "ing"):
            if word.endswith(suffix) and "v" in _shape(word.removesuffix(suffix)):
                word = _mend(word.removesuffix(suffix))
                break
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    return word


def _mend(stem: str) -> str:
    """Put back what -ed and -ing took: conflat(ed) -> conflate, hopp(ing) -> hop, fil(ing) -> file."""
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if _ends_double_consonant(stem) and stem[-1] not in "lsz":
        return stem[:-1]
    if _measure(stem) == 1 and _ends_consonant_vowel_consonant(stem):
        return stem + "e"
    return stem


def _replace(word: str, rules: dict[str, str]) -> str:
    """Apply the rule of the longest suffix the word has, where what is left has a measure above 0."""
    found = max((suffix for suffix in rules if word.endswith(suffix)), key=len, default=None)
    if found is None or _measure(word.removesuffix(found)) == 0:
        return word
    return word.removesuffix(found) + rules[found]


def _step_4(word: str) -> str:
    found = max((suffix for suffix in _STEP_4 if word.endswith(suffix)), key=len, default=None)
    if found is None:
        return word
    stem = word.removesuffix(found)
    if _measure(stem) <= 1 or (found == "ion" and not stem.endswith(("s", "t"))):
        return word
    return stem


def _step_5(word: str) -> str:
    if word.endswith("e"):
        stem = word[:-1]
        measure = _measure(stem)
        if measure > 1 or (measure == 1 and not _ends_consonant_vowel_consonant(stem)):
            word = stem
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word
