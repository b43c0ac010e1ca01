"""The tables and figures of five papers, and studies of ours, as recipes of `wellposed reproduce`.

Importing this package registers them; an entry point of the group ``wellposed.recipes`` does.
"""

from wellposed.recipes.recipe import RECIPES
from wellposed_studies import frontier, huang2020, kim2021, mcgrath2024, sengupta2023, zhang2021

for _paper in (huang2020, kim2021, mcgrath2024, sengupta2023, zhang2021, frontier):
    for _recipe in _paper.RECIPES:
        RECIPES.register(_recipe.name)(_recipe)
