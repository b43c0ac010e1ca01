"""Every table and figure that can be made again, by name: ``kim2021/figure-2`` and so on; free of torch.

A new recipe is one function of a `Request` and one registration beside its siblings.
"""

import wellposed.recipes.huang2020
import wellposed.recipes.kim2021
import wellposed.recipes.mcgrath2024
import wellposed.recipes.sengupta2023
import wellposed.recipes.zhang2021  # noqa: F401  (these imports register recipes)
from wellposed.recipes.recipe import RECIPES, SCALES, Recipe, Reproduced, Reproduction, Request, Scale, reproduce

__all__ = ["RECIPES", "SCALES", "Recipe", "Reproduced", "Reproduction", "Request", "Scale", "reproduce"]
