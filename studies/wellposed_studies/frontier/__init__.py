"""Studies of our own: what certificates, depth without normalisation and budgets cost and buy; free
of torch."""

from wellposed.recipes.recipe import Recipe
from wellposed_studies.corpora import GENERATED
from wellposed_studies.verdicts import LEVELLED_OFF, PLATEAU, Power

_ACCURACY = Power(
    "wellposed_studies.frontier.accuracy:sizes_of",
    "test accuracy",
    0.02,
    "lipschitz less ReZero on SST, the widest",
    ended=LEVELLED_OFF,
)
_DEPTH = Power("wellposed_studies.frontier.depth:sizes_of")
_CHARACTERS = Power(
    "wellposed_studies.frontier.characters:sizes_of",
    "certified accuracy",
    0.014,
    "lipschitz:1 at the radius 0.03",
)
_ORDER = Power(
    "wellposed_studies.frontier.order:sizes_of",
    "certified accuracy",
    0.17,
    "controls on order at the radius 0.01",
)
_TRANSLATION = Power(
    "wellposed_studies.frontier.translation:sizes_of",
    "BLEU on test",
    1.0,
    "VAR-III less Transformer on Multi30k",
    ended=PLATEAU,
)

RECIPES = (
    Recipe(
        "frontier/accuracy",
        "clean, certified and attacked accuracy against radius on AG News, IMDb, SST and TREC, each"
        " model at its best rate, with the control without blocks",
        "a claim of ours: a Transformer that is 1-Lipschitz by construction is within a point of"
        " the better of post-LN and ReZero, its certified accuracy is at least 0.50 at 0.1 of a"
        " token's norm on AG News and 0.60 at 0.03 on IMDb, and no certified example falls to an"
        " attack; what its blocks add to the control is in the table",
        "wellposed_studies.frontier.accuracy:accuracy",
        {"mini": 33, "medium": 360, "paper": 600},
        takes=("data",),
        measured=("mini",),
        power=_ACCURACY,
    ),
    Recipe(
        "frontier/depth",
        "accuracy and certified total by depth without normalisation: lipschitz, ReZero and plain"
        " residuals",
        "a claim of ours: the variant lipschitz trains at every depth from 2 to 64 without a norm,"
        " with a certified total of at most 1",
        "wellposed_studies.frontier.depth:depth",
        {"mini": 10, "medium": 270, "paper": 300},
        takes=("data",),
        measured=("mini",),
        power=_DEPTH,
    ),
    Recipe(
        "frontier/characters",
        "next characters of a text: accuracy against printed and sound Lipschitz bound, and"
        " certified accuracy",
        "a claim of ours: at equal training compute and no larger sound bound, `lipschitz` is five"
        " points more accurate than the Transformer of Newhouse et al. (2025), or has more"
        " certified accuracy at every radius",
        "wellposed_studies.frontier.characters:characters",
        {"mini": 8, "medium": 360, "paper": 300},
        folders=("text/tinyshakespeare.txt.gz",),
        takes=("data",),
        measured=("mini",),
        power=_CHARACTERS,
    ),
    Recipe(
        "frontier/order",
        "certified accuracy where a bag of words fails: the first of two words, a word that a"
        " pointer names, ListOps",
        "a claim of ours: on at least two tasks that no bag of words can do, a Transformer that is"
        " Lipschitz by construction is certified for ten points more than the same model without"
        " blocks, at the radius where that one keeps half of its clean accuracy",
        "wellposed_studies.frontier.order:order",
        {"mini": 12, "medium": 160, "paper": 300},
        measured=("mini",),
        power=_ORDER,
    ),
    Recipe(
        "frontier/translation",
        "BLEU of T-Fixup, pre-LN, post-LN and the constraints of Zhang et al., each at the best of"
        " its settings",
        "a claim of ours about Huang et al. (2020) and Zhang et al. (2021) on a small corpus:"
        " T-Fixup, without warm-up and LayerNorm, is within half a BLEU of the better of post-LN"
        " and pre-LN with warm-up",
        "wellposed_studies.frontier.translation:translation",
        {"mini": 10, "medium": 380, "paper": 2600},
        folders=("multi30k", "iwslt14_de_en"),
        takes=("data", "languages"),
        builtin=GENERATED,
        measured=("mini",),
        power=_TRANSLATION,
    ),
)
