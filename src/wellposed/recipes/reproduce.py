"""Every table and figure that can be made again, by name: ``kim2021/figure-2`` and so on; free of torch.

A new recipe is one function of a `Request` and one registration beside its siblings.
"""

import wellposed.recipes._huang2020
import wellposed.recipes._kim2021
import wellposed.recipes._mcgrath2024
import wellposed.recipes._sengupta2023
import wellposed.recipes._zhang2021  # noqa: F401  (these imports register recipes)
from wellposed.recipes._recipe import RECIPES, SCALES, Recipe, Reproduced, Reproduction, Request, Scale, reproduce

__all__ = ["RECIPES", "SCALES", "Recipe", "Reproduced", "Reproduction", "Request", "Scale", "reproduce"]
