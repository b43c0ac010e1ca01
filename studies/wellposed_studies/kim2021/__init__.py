"""Tables and figures of Kim, Papamakarios, Mnih (2021), "The Lipschitz Constant of Self-Attention";
free of torch."""

from wellposed.recipes.recipe import Recipe
from wellposed_studies.verdicts import LEVELLED_OFF, Power

_TEXT = (
    "ptb/ptb.char.train.txt.gz",
    "ptb/ptb.char.train.txt",
    "ptb.char.train.txt.gz",
    "ptb.char.train.txt",
)
_PROSE = "English prose that ships with Python"

_TUNED = "wellposed_studies.kim2021.language_models:tuned"
_COSTS = Power(
    _TUNED, "best test NLL, in nats", 0.012, "dot product less L2 on PTB", ended=LEVELLED_OFF
)
_DEPTHS = Power("wellposed_studies.kim2021.language_models:fixed")
_ONE_LAYER = Power("wellposed_studies.kim2021.language_models:one_layer")

RECIPES = (
    Recipe(
        "kim2021/figure-2",
        "upper and lower bound of Lip_inf of L2 attention against N, H = D = 1",
        "the slope of the lower bound in ln N is very similar to that of the upper bound: O(log N)"
        " is tight",
        "wellposed_studies.kim2021.figures_2_7_8_bounds:figure_2",
        {"mini": 0.2, "medium": 0.2, "paper": 5},
        measured=("mini", "medium"),
    ),
    Recipe(
        "kim2021/bound-ratio",
        "the bound of Theorem 3.2 over the sharper one, by width, tokens and norm",
        "Theorem 3.2 is an upper bound; contractive L2 attention is divided by it",
        "wellposed_studies.kim2021.bound_ratio:bound_ratio",
        {"mini": 0.2, "medium": 0.2, "paper": 1},
        measured=("mini", "medium"),
    ),
    Recipe(
        "kim2021/figure-3",
        "invertibility of x + c f(x) at random weights, N = D = 64",
        "dot product is not invertible by fixed-point iteration; L2 attention is for small"
        " enough c",
        "wellposed_studies.kim2021.figures_3_5_6_10_inverse:figure_3",
        {"mini": 0.2, "medium": 0.6, "paper": 5},
        measured=("mini", "medium"),
    ),
    Recipe(
        "kim2021/figure-4",
        "character language models by attention and depth: curves",
        "L2 costs hardly any performance, tying queries and keys a little, the contraction more,"
        " which depth makes up for",
        "wellposed_studies.kim2021.figures_4_9_11_tables_2_3:figure_4",
        {"mini": 10, "medium": 206, "paper": 2_600_000},
        _TEXT,
        takes=("data",),
        builtin=_PROSE,
        measured=("mini", "medium"),
        power=_COSTS,
    ),
    Recipe(
        "kim2021/table-1",
        "time of a training step by attention and depth",
        "the differences are rather small: at 5 layers 110 s (dot product), 115, 108 (tied), 127"
        " (contractive) an epoch",
        "wellposed_studies.kim2021.table_1_speed:table_1",
        {"mini": 0.4, "medium": 10, "paper": 5},
        measured=("mini",),
    ),
    Recipe(
        "kim2021/table-2",
        "best test NLL by attention and depth (the runs of figure 4)",
        "dot product 0.940, L2 0.942, tied L2 0.994, contractive L2 1.005 (14 layers)",
        "wellposed_studies.kim2021.figures_4_9_11_tables_2_3:table_2",
        {"mini": 4.3, "medium": 195, "paper": 2_400_000},
        _TEXT,
        takes=("data",),
        builtin=_PROSE,
        measured=("mini", "medium"),
        power=_COSTS,
    ),
    Recipe(
        "kim2021/figure-5",
        "invertibility of x + c f(x) with trained weights",
        "trained dot product is not invertible by fixed-point iteration",
        "wellposed_studies.kim2021.figures_3_5_6_10_inverse:figure_5",
        {"mini": 0.8, "medium": 6.9, "paper": 360},
        _TEXT,
        takes=("data",),
        builtin=_PROSE,
        measured=("mini", "medium"),
        power=_ONE_LAYER,
    ),
    Recipe(
        "kim2021/figure-6",
        "invertibility of x + c f(x) over N and D",
        "for all N and D tried, L2 attention is invertible for small enough c and dot product"
        " is not",
        "wellposed_studies.kim2021.figures_3_5_6_10_inverse:figure_6",
        {"mini": 0.2, "medium": 5.7, "paper": 20},
        measured=("mini", "medium"),
    ),
    Recipe(
        "kim2021/figure-7",
        "lower bound of Lip_2 of L2 attention against N, D = 1",
        "the lower bound appears to grow as O(log N), so the upper bound O(sqrt N log N) may not be"
        " tight",
        "wellposed_studies.kim2021.figures_2_7_8_bounds:figure_7",
        {"mini": 1.5, "medium": 48, "paper": 60},
        measured=("mini",),
    ),
    Recipe(
        "kim2021/figure-8",
        "the Jacobian of trained dot-product attention while its input is ascended",
        "the norm of the Jacobian of dot product keeps growing: it is not Lipschitz",
        "wellposed_studies.kim2021.figures_2_7_8_bounds:figure_8",
        {"mini": 0.9, "medium": 3.7, "paper": 360},
        _TEXT,
        takes=("data",),
        builtin=_PROSE,
        measured=("mini", "medium"),
        power=_ONE_LAYER,
    ),
    Recipe(
        "kim2021/figure-9",
        "tied L2 attention with the parameters of the untied one (runs shared with figure 4)",
        "twice the columns of W_Q do not help: the loss by tying is not one of parameters",
        "wellposed_studies.kim2021.figures_4_9_11_tables_2_3:figure_9",
        {"mini": 2.2, "medium": 180, "paper": 1_500_000},
        _TEXT,
        takes=("data",),
        builtin=_PROSE,
        measured=("mini",),
        power=_COSTS,
    ),
    Recipe(
        "kim2021/figure-10",
        "histograms of inputs and outputs of trained attention",
        "outputs of L2 attention stay in a range like that of the inputs, those of dot product are"
        " much wider",
        "wellposed_studies.kim2021.figures_3_5_6_10_inverse:figure_10",
        {"mini": 0.6, "medium": 3.1, "paper": 360},
        _TEXT,
        takes=("data",),
        builtin=_PROSE,
        measured=("mini", "medium"),
        power=_ONE_LAYER,
    ),
    Recipe(
        "kim2021/figure-11",
        "training curves at a fixed learning rate by depth (mini: 2, 6, 12 layers; medium, paper: 2"
        " to 18)",
        "dot product fails to train beyond 10 layers; tied and contractive L2 train stably up"
        " to 18",
        "wellposed_studies.kim2021.figures_4_9_11_tables_2_3:figure_11",
        {"mini": 14, "medium": 270, "paper": 2000},
        _TEXT,
        takes=("data",),
        builtin=_PROSE,
        measured=("mini",),
        power=_DEPTHS,
    ),
    Recipe(
        "kim2021/table-3",
        "best test NLL at a fixed learning rate (the runs of figure 11)",
        "dot product 1.017 (8 layers, none beyond 10), tied L2 1.008 (12), contractive L2 1.029"
        " (16)",
        "wellposed_studies.kim2021.figures_4_9_11_tables_2_3:table_3",
        {"mini": 14, "medium": 270, "paper": 2000},
        _TEXT,
        takes=("data",),
        builtin=_PROSE,
        measured=("mini",),
        power=_DEPTHS,
    ),
)
