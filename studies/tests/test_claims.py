"""The quotes of recipes stand in the papers, word for word. The papers' texts are no part of this
project; without them these tests are skipped."""

import re
from pathlib import Path

import pytest

from wellposed_studies.recipe import RECIPES

FOLDER = Path(__file__).parents[3] / "shared" / "papers"
NAMES = ("zhang2021", "mcgrath2024", "kim2021", "sengupta2023", "huang2020")
PAPERS = {name: f"00{number}" for number, name in enumerate(NAMES)}
NOT_AT_HAND = {"huang2020/depth"}
"""The text of Huang et al. is the appendix alone; the depths are in the main part."""
QUOTED = [name for name in RECIPES if not name.startswith("frontier/")]


def plain(text):
    """Return a text without marks of pages, spaces between words alone, words cut at a line's end
    put together."""
    text = re.sub(r"<\|[^|]*\|>", " ", text)
    text = re.sub(r"(?<=[a-z])-\s+(?=[a-z])", "", text)
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("name", QUOTED)
def test_a_recipe_of_a_paper_quotes_it_with_the_place(name):
    quotes = RECIPES.get(name).notes_under("Quote")
    assert bool(quotes) is (name not in NOT_AT_HAND)
    for quote in quotes:
        assert re.fullmatch(r'".+" \((section|appendix|caption|Table|Theorem).*\)', quote)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the texts of the papers are not here")
@pytest.mark.parametrize("name", [name for name in QUOTED if name not in NOT_AT_HAND])
def test_the_words_stand_in_the_paper(name):
    (path,) = FOLDER.glob(f"{PAPERS[name.partition('/')[0]]}_*.txt")
    text = plain(path.read_text(encoding="utf-8"))
    for quote in RECIPES.get(name).notes_under("Quote"):
        words = quote[1 : quote.rindex('"')]
        assert plain(words) in text, f"{name}: {words!r}"
