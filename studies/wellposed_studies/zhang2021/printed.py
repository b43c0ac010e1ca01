"""What Zhang et al. (2021) print in Tables 1 to 4, by column and variant; all of it is legible in
the text at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TRANSFORMER, OC1, OC2, OC3, OC3_PRINTED = "post_ln", "oc1", "oc2", "oc3", "oc3_printed"
LABELS = {
    TRANSFORMER: "Transformer",
    OC1: "VAR-I",
    OC2: "VAR-II",
    OC3: "VAR-III",
    OC3_PRINTED: "VAR-III, unsquared",
}
FORM_NOTE = (
    "VAR-III squares every norm, and VAR-III, unsquared, all but those of the feed-forward weights,"
    " as the paper prints it; its tables have one VAR-III, which stands beside both"
)
STRENGTHS = (1e-6, 1e-8, 1e-10)

Columns = Mapping[str, Mapping[str, float]]
"""What is printed by measure and variant."""
Gains = Mapping[str, Mapping[str, float]]
"""In percent, by corpus and measure."""


def _bleu(names: Sequence[str], rows: Mapping[str, Sequence[float]]) -> dict[str, Columns]:
    return {name: {"bleu": column} for name, column in _columns(names, rows).items()}


def _columns(names: Sequence[str], rows: Mapping[str, Sequence[float]]) -> Columns:
    return {
        name: {variant: values[i] for variant, values in rows.items()}
        for i, name in enumerate(names)
    }


TABLE_1 = _bleu(
    ("De-En", "Ro-En", "En-Vi", "En-Id", "En-Et", "En-Mk"),
    {
        TRANSFORMER: (34.68, 32.36, 28.43, 47.40, 14.17, 13.96),
        OC1: (34.87, 32.68, 30.16, 48.09, 14.83, 14.74),
        OC2: (34.92, 32.63, 30.51, 48.05, 15.06, 14.70),
        OC3: (35.20, 32.44, 30.42, 48.33, 14.87, 14.62),
    },
)
TABLE_1_GAINS: Gains = {
    pair: {"bleu": gain} for pair, gain in zip(TABLE_1, (1.5, 1.0, 7.3, 2.0, 6.3, 5.3), strict=True)
}
"""In percent, as printed. That of En-Mk is of VAR-II; its best, VAR-I, gains 5.6."""
TABLE_2 = _bleu(("En-De base", "En-De big"), {TRANSFORMER: (27.3, 28.4), OC3: (28.5, 29.6)})
TABLE_3 = _bleu(
    ("En-Fr", "Ro-En", "De-En"), {TRANSFORMER: (18.74, 22.04, 27.59), OC3: (19.40, 22.61, 28.02)}
)
TABLE_3_GAINS: Gains = {
    pair: {"bleu": gain} for pair, gain in zip(TABLE_3, (3.5, 2.6, 1.6), strict=True)
}

MEASURES = (
    "bleu_1", "bleu_4", "meteor", "rouge_l", "cider", "skip_thought", "embedding_average", "vector_extrema",
    "greedy_matching",
)  # fmt: skip
TABLE_4 = {
    "PersonaChat": _columns(
        MEASURES,
        {
            TRANSFORMER: (13.2, 2.04, 6.10, 14.2, 18.2, 41.9, 84.3, 49.0, 65.8),
            OC1: (15.1, 2.28, 6.55, 14.7, 18.7, 42.8, 84.6, 48.2, 66.2),
            OC2: (15.4, 2.38, 6.60, 15.1, 19.3, 43.9, 84.9, 49.0, 66.5),
            OC3: (16.3, 2.50, 6.70, 15.1, 18.3, 43.3, 84.6, 48.6, 66.4),
        },
    ),
    "DailyDialog": _columns(
        MEASURES,
        {
            TRANSFORMER: (12.1, 6.22, 8.23, 21.1, 79.3, 66.9, 84.9, 53.1, 72.1),
            OC1: (13.5, 6.70, 8.43, 21.4, 79.2, 67.1, 85.7, 53.3, 72.3),
            OC2: (13.3, 6.52, 8.39, 21.7, 79.6, 67.1, 85.6, 53.4, 72.6),
            OC3: (14.0, 7.11, 8.72, 21.7, 82.1, 67.2, 85.5, 53.2, 72.2),
        },
    ),
}
_PERSONACHAT = (23.5, 22.5, 9.8, 6.3, 6.0, 4.8, 0.7, 0.0, 1.1)
_DAILYDIALOG = (15.7, 14.3, 6.0, 2.8, 3.5, 0.4, 0.9, 0.5, 0.7)
TABLE_4_GAINS: Gains = {
    label: dict(zip(MEASURES, gains, strict=True))
    for label, gains in zip(TABLE_4, (_PERSONACHAT, _DAILYDIALOG), strict=True)
}


def about_gains(paper: Mapping[str, Columns], gains: Gains) -> str:
    """Return the printed gains in every measure of each corpus beside those that its printed values
    give.

    >>> about_gains({"De-En": {"bleu": {TRANSFORMER: 20.0, OC1: 21.0}}}, {"De-En": {"bleu": 4.9}})
    'De-En bleu 4.9 (5.0)'
    """
    texts = []
    for label, columns in paper.items():
        for measure, values in columns.items():
            best = max(value for variant, value in values.items() if variant != TRANSFORMER)
            gain = 100 * (best / values[TRANSFORMER] - 1)
            texts.append(f"{label} {measure} {gains[label][measure]:g} ({gain:.1f})")
    return ", ".join(texts)
