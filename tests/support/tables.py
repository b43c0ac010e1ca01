"""Tables of several axes: every pair of values in few rows, or the whole product."""

import itertools
import os

from allpairspy import AllPairs

WHOLE = os.environ.get("WELLPOSED_WHOLE_TABLES") == "1"
"""Whether tables are run whole, as `make test-whole` does; it takes hours."""


def pairs(*axes):
    """Return rows in which any two values of two axes meet; all rows if tables are run whole.

    >>> len(pairs("abcde", (1, 2, 3), ("x", "y"), (True, False)))
    15
    """
    if WHOLE:
        return [*itertools.product(*axes)]
    return [tuple(row) for row in AllPairs([list(axis) for axis in axes])]


def rotated(first, *others):
    """Return a row for each value of the first axis, in which the others take turns; all rows if
    tables are run whole. For axes that one mechanism answers.

    >>> rotated("abcd", (1, 2, 3))
    [('a', 1), ('b', 2), ('c', 3), ('d', 1)]
    """
    if WHOLE:
        return [*itertools.product(first, *others)]
    turns = [itertools.cycle(axis) for axis in others]
    return [*zip(first, *turns, strict=False)]
