"""Sengupta et al. (2023), figure 3b: entropy of each head of the Transformer and each expert of
TransJect."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from wellposed.charts import Panel, Row, Series, where
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed_studies.runs import plus_minus
from wellposed_studies.sengupta2023.measured import (
    NEIGHBOURS_NOTE,
    box_series,
    mean_or_infinite,
    printed_line,
)
from wellposed_studies.sengupta2023.printed import PART_ENTROPY
from wellposed_studies.sengupta2023.states import part_entropies, probe_batches, quantile
from wellposed_studies.sengupta2023.studies import text_study
from wellposed_studies.sengupta2023.trained import LABELS, train_study, trained_model
from wellposed_studies.verdicts import UNCERTAINTY, within


def figure_3b(request: Request) -> Reproduction:
    """Entropy of each head of the Transformer and each expert of TransJect, by layer."""
    task, runs = train_study(
        request, text_study(request, "imdb"), variants=("transject", "post_ln")
    )
    batches = probe_batches(request, task)
    rows: list[dict[str, Any]] = []
    means: dict[str, list[float]] = {}
    for run in runs:
        kind = "expert" if run.variant == "transject" else "head"
        layers = part_entropies(trained_model(run), batches)
        for layer, values in enumerate(layers, start=1):
            common = {"model": LABELS[run.variant], "seed": run.seed, "layer": layer}
            rows += [
                {**common, "part": f"{kind} {part}", "entropy": v}
                for part, v in enumerate(values, start=1)
            ]
        means.setdefault(run.variant, []).append(fmean(itertools.chain(*layers)))
    drawn = [
        _part_boxes(model, where(rows, model=model))
        for model in dict.fromkeys(row["model"] for row in rows)
    ]
    layers = [row["layer"] for row in rows]
    drawn += [
        printed_line(box.label, PART_ENTROPY[box.label], layers, k) for k, box in enumerate(drawn)
    ]
    panels = [Panel("entropy of heads and experts", "layer", "entropy (nats)", drawn)]
    experts, heads = (means[variant] for variant in ("transject", "post_ln"))
    said = [plus_minus(mean_or_infinite(values)) for values in (experts, heads)]
    return Reproduction(
        rows,
        panels,
        got=f"mean entropy of experts {said[0]}, of heads {said[1]} nats (over seeds)",
        holds=judge_figure_3b(experts, heads),
        criterion=Criterion(
            "the mean entropy of experts is below that of heads", len(experts), UNCERTAINTY
        ),
        notes=(
            NEIGHBOURS_NOTE,
            (
                "heads are narrower than experts, so their entropy rests on fewer values; drawn:"
                " parts of all seeds, and the printed means"
            ),
        ),
    )


def _part_boxes(label: str, rows: Sequence[Row]) -> Series:
    """Return a box a layer over the entropies of its heads or experts."""
    layers: dict[int, list[float]] = {}
    for row in rows:
        layers.setdefault(row["layer"], []).append(row["entropy"])
    shares = (
        ("least", 0.0),
        ("lower_quartile", 0.25),
        ("median", 0.5),
        ("upper_quartile", 0.75),
        ("greatest", 1.0),
    )
    boxes = [
        {"layer": k, **{name: quantile(v, share) for name, share in shares}}
        for k, v in layers.items()
    ]
    return box_series(label, boxes)


def judge_figure_3b(experts: Sequence[float], heads: Sequence[float]) -> bool | None:
    """Say whether experts have the lower entropy, seed by seed."""
    return within([expert - head for expert, head in zip(experts, heads, strict=True)], high=0)
