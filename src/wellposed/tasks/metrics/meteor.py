"""METEOR (Banerjee & Lavie 2005): unigrams matched by form, by stem, and by a user's synonyms; no
WordNet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from wellposed.tasks.metrics.stem import porter_stem

BEAM = 40

Links = dict[int, int]
"""Reference position by hypothesis position."""


def meteor(
    hypothesis: Sequence[str],
    reference: Sequence[str],
    *,
    synonyms: Mapping[str, str] | None = None,
) -> float:
    """Return ``F (1 - penalty)`` with ``F = 10 P R / (R + 9 P)`` and ``penalty = 0.5 (chunks /
    matches)^3``.

    Status: exact, up to the search for the alignment with the fewest crossings, a beam of 40 (exact
    where fewer alignments compete). Source: Banerjee & Lavie (2005, "METEOR: an automatic metric
    for MT evaluation"), with the modules exact, Porter stem and, where given, synonyms (the name of
    its group by word). This is neither METEOR 1.5 (other weights, paraphrase tables) nor a METEOR
    with WordNet: its values are lower than theirs on the same text.

    Takes lower-case words. Equal sentences of n words score 1 - 0.5 / n^3; no match, or an empty
    sentence, scores 0.

    >>> words = "the cat sat on the mat".split()
    >>> meteor(words, words) == 1 - 0.5 / 6**3
    True
    >>> round(meteor("the cats sat".split(), "the cat was sitting".split()), 4)
    0.4808
    """
    links = align(hypothesis, reference, synonyms=synonyms)
    matches = len(links)
    if matches == 0:
        return 0.0
    precision, recall = matches / len(hypothesis), matches / len(reference)
    mean = 10 * precision * recall / (recall + 9 * precision)
    return mean * (1 - 0.5 * (count_chunks(links) / matches) ** 3)


def align(
    hypothesis: Sequence[str],
    reference: Sequence[str],
    *,
    synonyms: Mapping[str, str] | None = None,
) -> Links:
    """Link each hypothesis word to at most one reference word: form first, then stem, then synonym.

    Every module links as many of the words that are left as it can and, among such alignments,
    takes the one with the fewest crossing links, then with the most links between neighbours.
    """
    modules: list[Callable[[str], str]] = [str, porter_stem]
    if synonyms:
        modules.append(lambda word: synonyms.get(word, word))
    links: Links = {}
    for module in modules:
        links |= _match(
            [module(word) for word in hypothesis], [module(word) for word in reference], links
        )
    return links


def count_chunks(links: Links) -> int:
    """Return the number of runs of words that are neighbours in both sentences.

    >>> count_chunks({0: 0, 1: 1, 2: 4})
    2
    """
    return sum(links.get(position - 1, -2) != target - 1 for position, target in links.items())


class _State(NamedTuple):
    crossings: int
    breaks: int
    """Links whose left neighbour is not linked to the left neighbour, for ties."""
    links: tuple[tuple[int, int], ...]
    used: frozenset[int]


def _match(hypothesis: Sequence[str], reference: Sequence[str], fixed: Links) -> Links:
    """Return the links that one module adds to ``fixed``, by beam search from left to right."""
    taken = frozenset(fixed.values())
    places: dict[str, list[int]] = {}
    for position, key in enumerate(reference):
        if position not in taken:
            places.setdefault(key, []).append(position)
    waiting = Counter(
        key for position, key in enumerate(hypothesis) if position not in fixed and key in places
    )
    beam = [_State(0, 0, (), frozenset())]
    for position, key in enumerate(hypothesis):
        if position in fixed or key not in places:
            continue
        grown = []
        for state in beam:
            free = [place for place in places[key] if place not in state.used]
            grown += [_extend(state, position, place, fixed) for place in free]
            if waiting[key] > len(free):
                grown.append(state)
        waiting[key] -= 1
        beam = sorted(grown)[:BEAM] if len(grown) > 1 else grown
    return dict(beam[0].links)


def _extend(state: _State, position: int, place: int, fixed: Links) -> _State:
    crossings = sum(place < other for _, other in state.links)
    crossings += sum((position - earlier) * (place - other) < 0 for earlier, other in fixed.items())
    neighbour = dict(state.links[-1:]).get(position - 1, fixed.get(position - 1))
    return _State(
        state.crossings + crossings,
        state.breaks + (neighbour != place - 1),
        (*state.links, (position, place)),
        state.used | {place},
    )
