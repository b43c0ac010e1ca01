"""Tables of Zhang et al. (2021), "On Orthogonality Constraints for Transformers", and its theorem;
free of torch."""

from wellposed.recipes.recipe import Recipe
from wellposed_studies.corpora import GENERATED
from wellposed_studies.verdicts import Power

_DIALOGUES = "below paper scale, dialogues in which each speaker says backwards what the other said"
_SEEDS = "wellposed_studies.zhang2021.tables_1_2_3_4:seeds_of"
_SCATTER = "VAR-III less Transformer after 450 steps on Multi30k, p = 0.88"
_BLEU = Power(_SEEDS, "BLEU on test", 1.0, _SCATTER, tests=4)
_BLEU_III = Power(_SEEDS, "BLEU on test", 1.0, _SCATTER, tests=2)

RECIPES = (
    Recipe(
        "zhang2021/theorem-2.1",
        "change of an affinity row when its query moves, random and adversarial, beside the bounds",
        "|A'_i - A_i| <= 2 alpha |K| eps",
        "wellposed_studies.zhang2021.theorem_2_1:theorem_2_1",
        {"mini": 0.3, "medium": 0.2, "paper": 10},
        measured=("mini", "medium"),
    ),
    Recipe(
        "zhang2021/table-1",
        "BLEU of VAR-I, II, III on six subword corpora",
        "constraints raise BLEU on all six corpora, by 1.0 % to 7.3 % (De-En 34.68 to 35.20)",
        "wellposed_studies.zhang2021.tables_1_2_3_4:table_1",
        {"mini": 17, "medium": 560, "paper": 520_000},
        ("multi30k", "iwslt14_de_en"),
        takes=("data", "languages"),
        builtin=GENERATED,
        measured=("mini",),
        power=_BLEU,
    ),
    Recipe(
        "zhang2021/table-2",
        "BLEU of VAR-III on WMT'16 En-De, base and big",
        "VAR-III raises base from 27.3 to 28.5 and big from 28.4 to 29.6",
        "wellposed_studies.zhang2021.tables_1_2_3_4:table_2",
        {"mini": 14, "medium": 590, "paper": 700_000},
        ("multi30k", "iwslt14_de_en"),
        takes=("data", "languages"),
        builtin=GENERATED,
        measured=("mini",),
        power=_BLEU_III,
    ),
    Recipe(
        "zhang2021/table-3",
        "BLEU of VAR-III on three corpora of characters",
        "VAR-III raises En-Fr from 18.74 to 19.40, Ro-En from 22.04 to 22.61, De-En from 27.59 to"
        " 28.02",
        "wellposed_studies.zhang2021.tables_1_2_3_4:table_3",
        {"mini": 13, "medium": 590, "paper": 105_000},
        ("multi30k", "iwslt14_de_en"),
        takes=("data", "languages"),
        builtin=GENERATED,
        measured=("mini",),
        power=_BLEU_III,
    ),
    Recipe(
        "zhang2021/table-4",
        "nine measures of dialogue on PersonaChat and DailyDialog",
        "the best variant beats the Transformer in all nine measures on both (BLEU-1 13.2 to 16.3"
        " and 12.1 to 14.0)",
        "wellposed_studies.zhang2021.tables_1_2_3_4:table_4",
        {"mini": 21, "medium": 500, "paper": 26_000},
        ("dailydialog", "personachat"),
        takes=("data", "encoder", "vectors"),
        builtin=_DIALOGUES,
        measured=("mini",),
        power=_BLEU,
    ),
)
