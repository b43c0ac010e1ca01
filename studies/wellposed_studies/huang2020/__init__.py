"""Tables and figures of Huang, Pérez, Ba, Volkovs (2020), "Improving Transformer Optimization";
free of torch."""

from wellposed.recipes.recipe import Recipe
from wellposed_studies.corpora import GENERATED
from wellposed_studies.verdicts import Power

_DEPTHS = Power("wellposed_studies.huang2020.depth:sizes_of")
_SETTINGS = Power("wellposed_studies.huang2020.table_1:seeds_of")

RECIPES = (
    Recipe(
        "huang2020/table-1",
        "the five settings of appendix D: T-Fixup without warm-up beside post-LN with warm-up",
        "settings: starting rates 5e-4, 6e-4, 7e-4, 4e-4, 4e-4; 4000 decay steps; dropout 0.5, 0.4,"
        " 0.2, 0.4, 0.4 (the BLEU of these runs is in the main part, which is not at hand; the"
        " released code's page says 35.73 on IWSLT'14 De-En, chosen on test)",
        "wellposed_studies.huang2020.table_1:table_1",
        {"mini": 4.6, "medium": 480, "paper": 150_000},
        ("multi30k", "iwslt14_de_en"),
        takes=("data", "languages"),
        builtin=GENERATED,
        measured=("mini",),
        power=_SETTINGS,
    ),
    Recipe(
        "huang2020/depth",
        "loss by depth without warm-up: T-Fixup and post-LN",
        "without LayerNorm and without warm-up, encoder-decoders of 200+200 layers train",
        "wellposed_studies.huang2020.depth:depth",
        {"mini": 15, "medium": 420, "paper": 1000},
        ("multi30k", "iwslt14_de_en"),
        takes=("data", "languages"),
        builtin=GENERATED,
        measured=("mini",),
        power=_DEPTHS,
    ),
    Recipe(
        "huang2020/signal",
        "|out|/|in| after every layer at initial weights, Xavier and T-Fixup",
        "with |v_e| = |w_e| = 0.67 N^-1/4 the encoder's output is of the size of its input at any"
        " depth N",
        "wellposed_studies.huang2020.signal:signal",
        {"mini": 0.3, "medium": 0.7, "paper": 15},
        measured=("mini", "medium"),
    ),
    Recipe(
        "huang2020/updates",
        "|change of f| / rate of one SGD step by depth: T-Fixup, Xavier without LayerNorm, post-LN,"
        " pre-LN",
        "f is updated by Theta(rate) in a step of SGD, independent of model depth (the goal of"
        " section 3.2)",
        "wellposed_studies.huang2020.updates:updates",
        {"mini": 1.9, "medium": 1.9, "paper": 60},
        measured=("mini", "medium"),
    ),
    Recipe(
        "huang2020/theorem-3.1",
        "|change of G| / rate of one attention block against the number of blocks L, by the sizes"
        " of v, w and m",
        "|change of G| is Theta(rate / L) when |v|^2 |w|^2 + |w|^2 |m_i|^2 + |v|^2 |m_i|^2 is"
        " Theta(1 / L)",
        "wellposed_studies.huang2020.theorem_3_1:theorem_3_1",
        {"mini": 0.2, "medium": 0.1, "paper": 3},
        measured=("mini", "medium"),
    ),
)
