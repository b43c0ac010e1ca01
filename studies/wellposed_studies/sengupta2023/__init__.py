"""Tables and figures of Sengupta et al. (2023), "Manifold-Preserving Transformers" (TransJect);
free of torch."""

from wellposed.recipes.recipe import Recipe
from wellposed_studies.verdicts import LEVELLED_OFF, Power

_TEXTS, _ARENAS = (
    "wellposed_studies.sengupta2023.studies:seeds_of_texts",
    "wellposed_studies.sengupta2023.studies:seeds_of_arena",
)
_WORDS = "wellposed_studies.sengupta2023.studies:seeds_of_words"
_ARENA_TASKS = "four of the five tasks, drawn or generated here; text is left out"
_DOCUMENTATION = "words of English prose that ships with Python"
_OURS = "TransJect less Transformer"
_ACCURACY = Power(
    _TEXTS, "test accuracy, in points", 0.8, f"{_OURS} on IMDb", tests=3, ended=LEVELLED_OFF
)
_ARENA = Power(
    _ARENAS,
    "mean test accuracy, in points",
    2.0,
    f"{_OURS} on ListOps",
    tests=3,
    ended=LEVELLED_OFF,
)
_PERPLEXITY = Power(_WORDS, "test perplexity", 3.5, _OURS, tests=3, ended=LEVELLED_OFF)
_DISTANCES = Power(
    _TEXTS, "distances, last layer over embedding", 0.05, "scaled Transformer on IMDb"
)
_FACTORS = Power(_TEXTS, "median activation factors", 0.12, "Transformer by dropout on IMDb")
_ENTROPIES = Power(
    _TEXTS, "mean entropy of heads and experts, in nats", 0.025, "experts less heads on IMDb"
)
_CORRELATIONS = Power(_TEXTS, "correlations of distances", 0.07, f"{_OURS} on IMDb")
_EVERY_SEED = Power(_TEXTS)

RECIPES = (
    Recipe(
        "sengupta2023/figure-1",
        "distances between three pairs of tokens, layer by layer, in a trained Transformer (data:"
        " imdb)",
        "the Euclidean distance between tokens increases in the upper layers, the cosine distance"
        " is preserved",
        "wellposed_studies.sengupta2023.figures_1_4:figure_1",
        {"mini": 11, "medium": 120, "paper": 600},
        takes=("data",),
        measured=("mini",),
        power=_DISTANCES,
    ),
    Recipe(
        "sengupta2023/table-1",
        "test accuracy on IMDb and AG News of five models (data: a folder with imdb and ag_news)",
        "IMDb: TransJect 88.1, Random-TransJect 86.5, Transformer 81.3; AG News: Random-TransJect"
        " 90.2, Transformer 88.8; on IMDb one head costs the Transformer 2.1 points, and one expert"
        " TransJect 4.7",
        "wellposed_studies.sengupta2023.tables_1_2_3:table_1",
        {"mini": 12, "medium": 154, "paper": 20_000},
        takes=("data",),
        measured=("mini", "medium"),
        power=_ACCURACY,
    ),
    Recipe(
        "sengupta2023/table-2",
        "test accuracy on the Long Range Arena of five models (data: a folder with imdb,"
        " cifar10_subset, aan, ...)",
        "average: TransJect 59.6, Random-TransJect 59.5, Orthogonal 58.0, Transformer 57.4, with"
        " ReZero 56.7",
        "wellposed_studies.sengupta2023.tables_1_2_3:table_2",
        {"mini": 12, "medium": 460, "paper": 60_000},
        takes=("data",),
        builtin=_ARENA_TASKS,
        measured=("mini",),
        power=_ARENA,
    ),
    Recipe(
        "sengupta2023/table-3",
        "perplexity on the words of the Penn Treebank of five models (data: a folder with ptb)",
        "test: TransJect 127.6, with ReZero 147.8, Orthogonal 165.8, Random-TransJect 199.7,"
        " Transformer 598.9",
        "wellposed_studies.sengupta2023.tables_1_2_3:table_3",
        {"mini": 12, "medium": 500, "paper": 2000},
        takes=("data",),
        builtin=_DOCUMENTATION,
        measured=("mini",),
        power=_PERPLEXITY,
    ),
    Recipe(
        "sengupta2023/table-4",
        "inference speed over the Transformer's at 1k to 4k tokens, its attention N x N and fused",
        "TransJect is 5.0, 9.6, 12.8 and 26.3 times as fast at 1k, 2k, 3k and 4k tokens",
        "wellposed_studies.sengupta2023.table_4_speed:table_4",
        {"mini": 1, "medium": 10, "paper": 10},
        measured=("mini",),
    ),
    Recipe(
        "sengupta2023/table-5",
        "number of parameters, by closed formulas and by counting modules",
        "Transformer 190.1M, with d_ff = 512 95.6M, TransJect 66.2M (E = 1), 286.8M (E = 8)",
        "wellposed_studies.sengupta2023.table_5_parameters:table_5",
        {"mini": 0.3, "medium": 0.1, "paper": 1},
        measured=("mini", "medium"),
    ),
    Recipe(
        "sengupta2023/figure-3a",
        "activation factors and entropies by layer of four models, and their correlations (the runs"
        " of tables 1 and 2)",
        "the median activation factor of TransJect is about 1, that of Transformer much higher;"
        " entropy -1.3 against 5.8",
        "wellposed_studies.sengupta2023.figure_3a:figure_3a",
        {"mini": 19, "medium": 470, "paper": 20_000},
        takes=("data",),
        measured=("mini",),
        power=_FACTORS,
    ),
    Recipe(
        "sengupta2023/figure-3b",
        "entropy of each head and each expert by layer (the runs of table 1)",
        "the mean entropy of experts is -2.2, that of attention heads 0.67",
        "wellposed_studies.sengupta2023.figure_3b:figure_3b",
        {"mini": 1.5, "medium": 90, "paper": 2000},
        takes=("data",),
        measured=("mini",),
        power=_ENTROPIES,
    ),
    Recipe(
        "sengupta2023/figure-4",
        "Isomap of the tokens of a sentence, layer by layer, in TransJect and Transformer (data:"
        " imdb)",
        "TransJect keeps the relative distances between tokens through the layers; Transformer"
        " spreads them",
        "wellposed_studies.sengupta2023.figures_1_4:figure_4",
        {"mini": 1.3, "medium": 90, "paper": 1200},
        takes=("data",),
        measured=("mini",),
        power=_CORRELATIONS,
    ),
    Recipe(
        "sengupta2023/figure-5",
        "residual weights of TransJect by layer after training (the runs of tables 1 and 2)",
        "residual weights alpha/L remain below 0.33",
        "wellposed_studies.sengupta2023.figure_5:figure_5",
        {"mini": 1.8, "medium": 70, "paper": 4000},
        takes=("data",),
        measured=("mini",),
        power=_EVERY_SEED,
    ),
    Recipe(
        "sengupta2023/figure-6",
        "activation factor and entropy against experts, layers and dropout (data: imdb)",
        "more experts raise the activation at the last layer; more layers raise it for Transformer"
        " and not for TransJect; more dropout lowers activation and entropy of Transformer",
        "wellposed_studies.sengupta2023.figure_6:figure_6",
        {"mini": 27, "medium": 520, "paper": 15_000},
        takes=("data",),
        measured=("mini",),
        power=_FACTORS,
    ),
    Recipe(
        "sengupta2023/figure-7",
        "weights of the experts over test texts (the runs of tables 1 and 2)",
        "experts are balanced without a loss for it: the mode of their weights is about 0.25 of 4",
        "wellposed_studies.sengupta2023.figure_7:figure_7",
        {"mini": 2, "medium": 70, "paper": 4000},
        takes=("data",),
        measured=("mini",),
        power=_EVERY_SEED,
    ),
)
