"""Figures and tables of McGrath (2024), "Orthogonal Projection Loss"; free of torch."""

from wellposed.recipes.recipe import Recipe
from wellposed_studies.verdicts import Power

_SEEDS = "wellposed_studies.mcgrath2024.grid:seeds_of"
_SCATTER = "key at 1e-2 less the baseline"
_SCORES = Power(_SEEDS, "overall score", 0.0004, _SCATTER, tests=9)
_TWO_ALONE = Power(_SEEDS, "overall score", 0.0004, _SCATTER, tests=3)
_DRIFT = Power(_SEEDS, "err_orth over its initial value", 2.0, "the query of layer 2, from scratch")
_SHARES = Power(
    _SEEDS, "the share of the baseline's overall score", 0.011, "the baseline's own score"
)

RECIPES = (
    Recipe(
        "mcgrath2024/figure-1",
        "the sweep: three scores by strength of the penalty on key, query and both (needs --data)",
        "over strengths 1e-2, 1e-4, 1e-6 the best overall scores are with a penalty on the key or"
        " the query alone",
        "wellposed_studies.mcgrath2024.figures_1_3_table_1_qr:figure_1",
        {"mini": 22, "medium": 240, "paper": 450},
        ("minbert",),
        takes=("data", "encoder"),
        measured=("mini",),
        power=_SCORES,
    ),
    Recipe(
        "mcgrath2024/table-1",
        "scores of the baseline and of the best strength on key, query and both (the runs of figure"
        " 1; needs --data)",
        "overall 0.7596 for the baseline, 0.7620 for key or query alone, 0.7528 for both, of one"
        " run each",
        "wellposed_studies.mcgrath2024.figures_1_3_table_1_qr:table_1",
        {"mini": 22, "medium": 240, "paper": 450},
        ("minbert",),
        takes=("data", "encoder"),
        measured=("mini",),
        power=_SCORES,
    ),
    Recipe(
        "mcgrath2024/figure-3",
        "err_orth of the unconstrained baseline over training, by weight and layer (needs --data)",
        "every weight ends below its initial error, the key in every layer; the affinity does not",
        "wellposed_studies.mcgrath2024.figures_1_3_table_1_qr:figure_3",
        {"mini": 4, "medium": 25, "paper": 45},
        ("minbert",),
        takes=("data", "encoder"),
        measured=("mini",),
        power=_DRIFT,
    ),
    Recipe(
        "mcgrath2024/pretrained",
        "key and query at 1e-2 and QR at 1e-6 on a pretrained encoder, and its drift (needs --data"
        " and --encoder)",
        "every weight ends below its initial err_orth; key or query alone gain; QR more than halves"
        " the accuracy",
        "wellposed_studies.mcgrath2024.figures_1_3_table_1_qr:pretrained",
        {"mini": 50, "medium": 210, "paper": 180},
        ("minbert",),
        takes=("data", "encoder"),
        measured=("mini",),
        power=_TWO_ALONE,
    ),
    Recipe(
        "mcgrath2024/qr",
        "the QR loss on key and query, by Householder reflections and by Gram-Schmidt (needs"
        " --data)",
        "a failure: accuracy is more than halved even at 1e-6, and it is too slow",
        "wellposed_studies.mcgrath2024.figures_1_3_table_1_qr:qr",
        {"mini": 8, "medium": 200, "paper": 600},
        ("minbert",),
        takes=("data", "encoder"),
        measured=("mini",),
        power=_SHARES,
    ),
)
