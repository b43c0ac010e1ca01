"""McGrath (2024): Figures 1 and 3, Table 1, the QR loss and a pretrained encoder.

Recipes share one folder of runs; scores are those of the last step on the dev rows, as there.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed_lab.charts import Panel, Row, Series, medians, where
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.statistics import (
    PairedComparison,
    SeedResults,
    compare_seeds,
    holm_correction,
    mean_and_standard_error,
    paired_comparison,
)
from wellposed_lab.tasks.task import build_task
from wellposed_lab.tasks.text.tokenizers import has_tokenizer
from wellposed_lab.training.config import RunConfig, StartOptions
from wellposed_studies.evidence import SEEN
from wellposed_studies.mcgrath2024 import variants  # noqa: F401  it registers three
from wellposed_studies.mcgrath2024.task import ERROR, SCALE_FREE, SETS
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.study import (
    FinishedRun,
    Sizes,
    judged,
    mean_se,
    mean_series,
    run_config,
    seed_results,
    sizes_at,
    train_grid,
)
from wellposed_studies.verdicts import UNCERTAINTY, Power, agreed, every, gain, some, within

BASELINE = "baseline"
STRENGTHS = ("1e-2", "1e-4", "1e-6")
PLACES = ("key", "query", "key+query")
QR_METHODS = ("householder", "gram_schmidt", "householder_embedding")
GRAM = tuple(f"{weights}:{strength}" for weights in PLACES for strength in STRENGTHS)
QR = tuple(f"{method}:{strength}" for method in QR_METHODS for strength in STRENGTHS)
PRETRAINED = ("key:1e-2", "query:1e-2", "householder:1e-6")
HEADINGS = {"sst": "SST accuracy", "para": "Para accuracy", "sts": "STS Pearson"}
HEADINGS["overall"] = "overall"
COLUMNS = tuple(HEADINGS)
# Table 1, in its order. The rows of key and query are equal, so one of them is very likely a copy.
PAPER_TABLE: Mapping[str, tuple[float, ...]] = {
    BASELINE: (0.485, 0.876, 0.8358, 0.7596),
    "key": (0.4968, 0.871, 0.8362, 0.762),
    "query": (0.4968, 0.871, 0.8362, 0.762),
    "key+query": (0.4687, 0.871, 0.8377, 0.7528),
}
LEAST = round(PAPER_TABLE["key"][-1] - PAPER_TABLE[BASELINE][-1], 4)
"""The gain in overall score that Table 1 prints for the key or the query alone."""
LEAST_LOSS = round(PAPER_TABLE[BASELINE][-1] - PAPER_TABLE["key+query"][-1], 4)
ROLES = ("token_embedding", "query", "key", "value", "affinity")
DRIFT_TEST = (
    "err_orth of the key at the end over its initial value, without a penalty, is below 1 in every"
    " layer. One layer significantly above 1 (t-tests over seeds, Holm-corrected over layers, at"
    " 5 %) is against the claim"
)
QR_TEST = (
    "with the QR loss at its least strength, sst and para gain less than half of the baseline's gain"
    " over a constant answer, by every method, on every matrix tried, seed by seed. One of the two"
    " that does not contradicts it. Undecided if methods or matrices differ. Seeds whose baseline"
    " gains nothing are left out"
)
_PRETRAINED = "Undecided on an encoder of random weights: his is pretrained"
_PAIRED = "paired t-tests over seeds, Holm-corrected, at 5 %"


def from_scratch(request: Request) -> bool:
    """Return whether the encoder's weights are random: none is given, or only its config.json."""
    if request.encoder is None:
        return request.scale != "paper"
    return Path(request.encoder).is_file()


def of_pretrained(request: Request, holds: Verdict) -> Verdict:
    """Return the verdict, or None on an encoder of random weights, which says nothing about his."""
    return None if from_scratch(request) else holds


def sizes_of(request: Request) -> Sizes:
    """Return the training sizes: of a small encoder from scratch, or of the given one."""
    small = from_scratch(request) and request.scale != "paper"
    return sizes_at(request, "mcgrath2024" if small else "mcgrath2024/encoder")


_OVERALL = Power(sizes_of, "overall score", 0.0004, "key at 1e-2 less the baseline", tests=9)
_DRIFT = Power(
    sizes_of, "err_orth over its initial value", 2.0, "the query of layer 2, from scratch"
)
_SHARE = Power(
    sizes_of, "the share of the baseline's overall score", 0.011, "the baseline's own score"
)
_READS: dict[str, Any] = {"folders": ("minbert",), "takes": ("data", "encoder")}
_SWEPT: dict[str, Any] = {"power": _OVERALL, **_READS}
"""Options of the recipes that use all nine cells."""


@dataclass(frozen=True)
class CellResult:
    """A cell over its seeds, and its overall score against the baseline on the same seeds."""

    name: str
    every_run: Sequence[FinishedRun]
    """Runs with the scores of their last step."""
    against: PairedComparison | None = None

    @property
    def scores(self) -> dict[int, Row]:
        return {run.seed: run.metrics for run in self.every_run if run.metrics}

    @property
    def by_seed(self) -> SeedResults:
        """Overall score of every seed, or the reason why it is missing."""
        return seed_results(self.name, self.every_run, "overall")

    @property
    def group(self) -> str:
        """Name without the strength: a row of Table 1, or a QR form."""
        return self.name.partition(":")[0]

    @property
    def strength(self) -> float:
        return float(self.name.partition(":")[2] or 0)

    def mean(self, column: str) -> tuple[float, float | None]:
        return mean_and_standard_error([scores[column] for scores in self.scores.values()])

    def words(self) -> str:
        values = list(self.by_seed.values.values())
        verdict = f": {self.against.verdict}" if self.against else ""
        return f"{self.name} {mean_se(values, 4) if values else 'failed'}{verdict}"

    def row(self) -> Row:
        row: dict[str, Any] = {"cell": self.name, "strength": self.strength}
        row |= {"seeds": len(self.scores), "failed": len(self.every_run) - len(self.scores)}
        for name in COLUMNS:
            row[name], row[f"{name}_se"] = self.mean(name) if self.scores else (None, None)
        row["seconds"] = fmean(run.info.get("seconds", 0.0) for run in self.every_run)
        return row | {
            name: getattr(self.against, attribute, None) for name, attribute in _TESTED.items()
        }


_TESTED = {
    "difference": "mean_difference",
    "difference_se": "standard_error",
    **{name: name for name in ("p_value", "p_holm", "verdict")},
}
Cells = Sequence[CellResult]
Made = tuple[Sequence[Row], Sequence[Panel], str, Verdict]
"""Rows, panels, words and verdict."""


def evaluations(run: FinishedRun) -> list[Row]:
    from wellposed_lab.report.runs import read_metrics

    return [row for row in read_metrics(run.folder) if row["split"] == "valid"]


def _ended(run: FinishedRun) -> FinishedRun:
    return replace(run, metrics={**run.metrics, **evaluations(run)[-1]}) if run.metrics else run


@recipe("mcgrath2024/figure-1", **_SWEPT)
def figure_1(request: Request) -> Reproduction:
    """The sweep: three scores by strength of the penalty on key, query and both (needs --data).

    Claim: over strengths 1e-2, 1e-4, 1e-6 the best overall scores are with a penalty on the key or
        the query alone.
    Quote: "the best overall scores are achieved by applying orthogonality constraints to either the
        key or query matrix alone" (section 6.0.2).
    Test: some strength of key or query alone is significantly better than the baseline. Every one
        of them significantly worse contradicts it. Every one below a gain of {LEAST:g}, by
        one-sided tests at 5 %, is none of that size. {_PRETRAINED}.
    """
    cells = _cells(request, GRAM)
    rows = [cell.row() for cell in cells]
    holds = of_pretrained(request, judge_alone(_tests_alone(cells)))
    return _made(request, cells, (rows, _sweep(cells), about_scores(cells), holds))


@recipe("mcgrath2024/table-1", **_SWEPT)
def table_1(request: Request) -> Reproduction:
    """Scores of the baseline and of the best strength on key, query and both (the runs of figure 1;
    needs --data).

    Claim: overall 0.7596 for the baseline, 0.7620 for key or query alone, 0.7528 for both, of one
        run each.
    Quote: "Baseline 0.485 0.876 0.8358 0.7596" (Table 1).
    Test: key and query alone are significantly better than the baseline and both together
        significantly worse. One of them significantly the other way contradicts it. One that gains
        less than {LEAST:g}, or both together losing less than {LEAST_LOSS:g}, by one-sided tests at
        5 % shared over the three, is none of that size. {_PRETRAINED}.
    """
    cells = _cells(request, GRAM)
    ranked = sorted(
        (cell for cell in cells if cell.scores), key=lambda cell: cell.mean("overall")[0]
    )
    of_group = {cell.group: cell for cell in ranked}
    best = {group: of_group[group] for group in PAPER_TABLE if group in of_group}
    tested = {group: chosen.against for group, chosen in best.items() if chosen.against}
    rows: list[Row] = []
    for group, printed in PAPER_TABLE.items():
        rows.append({"row": group, "source": "paper", **dict(zip(COLUMNS, printed, strict=True))})
        chosen = best.get(group)
        if chosen:
            rows.append({"row": group, "source": "ours", **chosen.row()})

    panels = []
    names = list(PAPER_TABLE)
    at = [names.index(group) for group in best]
    for index, (column, heading) in enumerate(HEADINGS.items()):
        paper = [printed[index] for printed in PAPER_TABLE.values()]
        means, errors = zip(*(chosen.mean(column) for chosen in best.values()), strict=True)
        bars = [error or 0.0 for error in errors]
        series = [
            Series("paper says", range(len(paper)), paper, "dots"),
            Series("we got", at, means, "dots", errors=bars),
        ]
        panels.append(Panel(heading, "penalty", heading, series, legend=index == 0, names=names))
    holds = of_pretrained(request, judge_table_1(tested))

    return _made(request, cells, (rows, panels, about_scores(cells), holds))


@recipe("mcgrath2024/figure-3", power=_DRIFT, **_READS)
def figure_3(request: Request) -> Reproduction:
    """Err_orth of the unconstrained baseline over training, by weight and layer (needs --data).

    Claim: the key ends below its initial error in every layer.
    Quote: "the key projection weight matrix tends towards orthogonalization in every single layer
        in the network" (section 7).
    Test: {DRIFT_TEST}. {_PRETRAINED}.
    Note: random weights begin close to orthogonal.
    Note: he says the same of the other weights, and that the affinity does not fall. Both are
        shown. A few rows of affinities do not decide about weights.
    """
    cells = _cells(request, ())
    errors = error_rows(cells)
    rows = errors[ERROR]
    holds = of_pretrained(request, judge_drift(rows))
    return _made(request, cells, (rows, _drift(rows), about_drift(errors), holds), UNCERTAINTY)


@recipe("mcgrath2024/pretrained", power=replace(_OVERALL, tests=3), **_READS)
def pretrained(request: Request) -> Reproduction:
    """Key and query at 1e-2 and QR at 1e-6 on a pretrained encoder, and its drift (needs --data and
    --encoder).

    Claim: the key ends below its initial err_orth in every layer; key or query alone gain; QR more
        than halves the accuracy.
    Quote: "the key projection weight matrix tends towards orthogonalization in every single layer
        in the network" (section 7).
    Test: three claims, which decide the row only if they agree: (1) {DRIFT_TEST}; (2) key or
        query at 1e-2 is significantly better than the baseline, both significantly worse is against
        it, both below a gain of {LEAST:g} is none of that size; (3) {QR_TEST}.
    """
    if request.encoder is None or from_scratch(request):
        raise ConfigError(
            "a pretrained encoder is fine-tuned here: give --encoder FOLDER, with weights and"
            f" tokenizer; received {request.encoder}"
        )

    cells = _cells(request, PRETRAINED)
    errors = error_rows(cells)
    drift = errors[ERROR]
    parts = {
        "drift to orthogonality": judge_drift(drift),
        "gain of key or query alone": judge_alone(_tests_alone(cells)),
        "failure of the QR loss": judge_shares(every_share(cells)),
    }
    verdicts = "; ".join(f"{part}: {SEEN[verdict]}" for part, verdict in parts.items())
    got = " ".join([f"{verdicts}.", about_scores(cells), about_drift(errors), about_qr(cells)])
    rows = [*(cell.row() for cell in cells), *drift]
    sure = f"(1), (3) {UNCERTAINTY}; (2) {_PAIRED}"

    return _made(request, cells, (rows, _drift(drift), got, judge_parts([*parts.values()])), sure)


def judge_parts(parts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of three claims if they agree; one of them is not the others."""
    return agreed(parts)


@recipe("mcgrath2024/qr", power=_SHARE, **_READS)
def qr(request: Request) -> Reproduction:
    """The QR loss on key and query, by Householder reflections and by Gram-Schmidt (needs --data).

    Claim: a failure: accuracy is more than halved even at 1e-6, and it is too slow.
    Quote: "Both lead to more than half of the accuracy of my baseline described above, even with
        minimal weighting" (section 4.2.1).
    Test: {QR_TEST}. {_PRETRAINED}.
    Note: half of his 0.485 and 0.876 is less than a constant answer gets, so no model could show
        the claim as it is worded.
    Note: he does not say which matrices the loss is on. Keys and queries are tried, with a gradient
        of norm 1e-6 at strength 1e-6. Token embeddings are tried too: there Adam moves rows without
        any other gradient as far as the others.
    """
    cells = _cells(request, QR)
    rows = [cell.row() for cell in cells]
    holds = of_pretrained(request, judge_shares(every_share(cells)))
    return _made(request, cells, (rows, _sweep(cells), about_qr(cells), holds), UNCERTAINTY)


def _made(request: Request, cells: Cells, made: Made, uncertainty: str = _PAIRED) -> Reproduction:
    """Return the result of the cells, with notes on failed runs."""
    runs = [run for cell in cells for run in cell.every_run]
    notes = [f"{run.variant} seed {run.seed}: {run.failure}" for run in runs if run.failure]
    if request.encoder or request.scale != "paper":
        sizes = sizes_of(request)
        part = f", scores of {sizes.eval_batches} batches of dev rows" if sizes.eval_batches else ""
        drawn = " and of random weights" * from_scratch(request)
        notes.append(
            f"{Path(request.encoder).name}, an encoder not his{drawn}, {sizes.steps} steps of"
            f" {sizes.batch_size}{part}"
            if request.encoder
            else "a small encoder from scratch; the paper fine-tunes a pretrained one, so a"
            " difference here says little about his result"
        )

    def fails(run: FinishedRun) -> bool:
        return run.variant.partition(":")[0] in QR_METHODS

    return judged(request, *made, runs, uncertainty=uncertainty, notes=notes, fails=fails)


def _cells(request: Request, names: Sequence[str]) -> list[CellResult]:
    """Train the missing runs; return baseline and cells, with Holm-corrected tests against it."""
    if request.data is None:
        raise ConfigError(
            "McGrath (2024) is about three labelled sets at once: give --data FOLDER with"
            " ids-sst-train.csv, quora-train.csv, sts-train.csv and ids-sst-dev.csv, quora-dev.csv,"
            " sts-dev.csv (plain or .gz)"
        )

    encoder = request.encoder or ("bert-base-uncased" if request.scale == "paper" else None)
    sizes = sizes_of(request)
    group = "-".join(["mcgrath2024", *([Path(encoder).name] if encoder else [])])
    names = (BASELINE, *names)
    planned = [
        PlannedRun(
            request.runs(group) / name.replace(":", "-") / f"seed-{seed}",
            f"{name} seed {seed}",
            _config(request, sizes, encoder, name, seed),
        )
        for name, seed in itertools.product(names, range(sizes.seeds))
    ]
    alone = request.scale == "toy" or sizes.steps > 2000
    jobs = request.jobs or (1 if alone else min(os.cpu_count() or 1, 8))
    runs = map(_ended, train_grid(replace(request, jobs=jobs), planned, test_batches=1))
    cells = [CellResult(name, list(itertools.islice(runs, sizes.seeds))) for name in names]
    base, *others = cells
    tests = holm_correction([compare_seeds(cell.by_seed, base.by_seed) for cell in others])
    tested = zip(others, tests, strict=True)

    return [base, *(replace(cell, against=test) for cell, test in tested)]


def _config(request: Request, sizes: Sizes, encoder: str | None, name: str, seed: int) -> RunConfig:
    options = {"data": request.data, "limit_train": sizes.limit, **sizes.options}
    schedule = options.pop("schedule", "linear")
    if encoder is not None:
        drawn = from_scratch(request)
        folder = Path(encoder).parent if drawn else Path(encoder)
        options["tokenizer"] = f"hf:{folder}" if not drawn or has_tokenizer(folder) else "wordpiece"

    config = run_config(
        "minbert",
        options,
        sizes,
        seed=seed,
        model={"intermediate_size": None, "activation": "gelu", "pooling": "first", "dropout": 0.1},
        schedule=schedule,
        warmup_steps=max(1, sizes.steps // 10),
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        device="cpu" if request.scale in ("toy", "mini") and not request.encoder else "auto",
    )
    if encoder is not None:
        config = replace(config, model=ModelOptions(), start=StartOptions(encoder, new_head=True))
    baseline = "plain" if encoder else "post_ln"

    return apply_variant(baseline if name == BASELINE else name.replace("+", "_"), config)


def _tests_alone(cells: Cells) -> list[PairedComparison]:
    return [cell.against for cell in cells if cell.group in ("key", "query") and cell.against]


def judge_alone(tests: Sequence[PairedComparison]) -> Verdict:
    """Return whether some penalty on key or query alone is better; False if all are worse."""
    return some(gain(test, LEAST) for test in tests) if tests else None


def judge_table_1(tests: Mapping[str, PairedComparison]) -> Verdict:
    """Return whether key and query gain alone and lose together; None if undecided."""
    sizes = {"key": LEAST, "query": LEAST, "key+query": LEAST_LOSS}
    return every(
        gain(tests[name], size, parts=len(sizes), rises=name != "key+query")
        if name in tests
        else None
        for name, size in sizes.items()
    )


def judge_shares(methods: Sequence[Sequence[Sequence[float]]]) -> Verdict:
    """Return whether every QR form leaves less than half of every gain; None if forms differ."""
    verdicts = [every(within(share, high=0.5) for share in shares) for shares in methods]
    return agreed(verdicts) if verdicts else None


def error_rows(cells: Cells) -> dict[str, list[Row]]:
    """Return err_orth of the baseline over training and its scale-free form."""
    rows: dict[str, list[Row]] = {ERROR: [], SCALE_FREE: []}
    for run in (run for run in cells[0].every_run if run.metrics):
        task: Any = build_task(run.config.task, run.config.task_options)
        moments = [{"step": 0, **task.watch(run.untrained)}, *evaluations(run)]
        for moment, (prefix, mine) in itertools.product(moments, rows.items()):
            for name, value in moment.items():
                if name.startswith(prefix):
                    row = {"seed": run.seed, "step": moment["step"]}
                    row |= {"weight": name.removeprefix(prefix), "error": value}
                    first = moments[0][name]
                    mine.append({**row, "error_over_initial": value / first if first else None})
    return rows


def ratios_by_weight(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return final err_orth over its initial value for every weight, by seed."""
    last = max((row["step"] for row in rows), default=0)
    ends = [row for row in where(rows, step=last) if row["error_over_initial"] is not None]
    weights = dict.fromkeys(row["weight"] for row in ends)
    return {
        weight: [row["error_over_initial"] for row in where(ends, weight=weight)]
        for weight in weights
    }


def judge_drift(rows: Sequence[Row]) -> Verdict:
    layers = [
        ratios for weight, ratios in ratios_by_weight(rows).items() if weight.startswith("key")
    ]
    if not layers or not all(map(math.isfinite, itertools.chain(*layers))):
        return None
    tests = holm_correction([paired_comparison(ratios, [1.0] * len(ratios)) for ratios in layers])
    return every(_fell(ratios, test) for ratios, test in zip(layers, tests, strict=True))


def _fell(ratios: Sequence[float], against_1: PairedComparison) -> Verdict:
    # Equal on all seeds, so there is no p-value.
    no_spread = against_1.pairs > 1 and against_1.p_value is None
    if (against_1.significant or no_spread) and (against_1.mean_difference or 0.0) > 0:
        return False
    return within(ratios, high=1) or None


def qr_shares(cell: CellResult, baseline: CellResult) -> dict[str, list[float]]:
    """Return the gain of each accuracy over a constant, divided by that of the baseline, by seed."""
    shares = {}
    constants = baseline.every_run[0].reference
    for score in SETS[:2]:
        ours, plain = (
            {seed: scores[score] - constants[score] for seed, scores in side.scores.items()}
            for side in (cell, baseline)
        )
        shares[score] = [
            gain / plain[seed] for seed, gain in ours.items() if plain.get(seed, 0) > 0
        ]
    return shares


def _weakest(cells: Cells) -> list[CellResult]:
    mine = (cell for cell in cells if cell.group in QR_METHODS and cell.scores)
    by_strength = sorted(mine, key=lambda cell: -cell.strength)
    return list({cell.group: cell for cell in by_strength}.values())


def every_share(cells: Cells) -> list[list[list[float]]]:
    """Return the shares of every QR form at its smallest strength, for every score."""
    return [list(qr_shares(cell, cells[0]).values()) for cell in _weakest(cells)]


def about_scores(cells: Cells) -> str:
    """Return the overall score of every cell and its test against the baseline."""
    return f"Overall scores: {'; '.join(cell.words() for cell in cells)}."


def about_drift(errors: Mapping[str, Sequence[Row]]) -> str:
    """Return the drift of err_orth of the baseline, and of its scale-free form."""
    texts = []
    for (prefix, rows), role in itertools.product(errors.items(), ROLES):
        by_weight = ratios_by_weight(rows).items()
        chosen = [
            ratio for name, ratios in by_weight if name.split(".")[0] == role for ratio in ratios
        ]
        if chosen:
            below = f"below 1 in {sum(ratio < 1 for ratio in chosen)} of {len(chosen)}"
            texts.append(f"{prefix}{role} {mean_se(chosen, 4)} ({below})")
    return (
        "Drift of the unconstrained baseline at the end over its initial value, all layers and"
        f" seeds: {'; '.join(texts)}."
    )


def about_qr(cells: Cells) -> str:
    """Return the share of the baseline's gain that each QR form keeps, and its time."""
    texts = []
    for cell in _weakest(cells):
        shares = qr_shares(cell, cells[0]).items()
        gains = ", ".join(
            f"{method} {mean_se(share) if share else 'none'}" for method, share in shares
        )
        slower = cell.row()["seconds"] / (cells[0].row()["seconds"] or math.inf)
        texts.append(
            f"QR loss, {cell.words()}; shares of the baseline's gain over a constant {gains};"
            f" a training takes {slower:.2f} times as long."
        )
    return " ".join(texts)


def _sweep(cells: Cells) -> list[Panel]:
    """Return one panel for each score: means by strength, and the baseline."""
    groups = dict.fromkeys(cell.group for cell in cells[1:])
    rows = [
        {**scores, "group": cell.group, "strength": cell.strength}
        for cell in cells[1:]
        for scores in cell.scores.values()
    ]
    panels = []
    for column, heading in HEADINGS.items():
        series = [
            mean_series(where(rows, group=group), "strength", column, group) for group in groups
        ]
        level = (BASELINE, cells[0].mean(column)[0]) if cells[0].scores else None
        panels.append(Panel(heading, "strength", heading, series, "log", level=level))

    return panels


def _drift(rows: Sequence[Row]) -> list[Panel]:
    """Return one panel for each role: err_orth of the baseline over its initial value, by layer."""
    measured = [row for row in rows if row["error_over_initial"] is not None]
    by_role = {
        role: [row for row in measured if row["weight"].split(".")[0] == role] for role in ROLES
    }
    return [
        Panel(role, "step", "err_orth", medians(mine, "step", "error_over_initial", by="weight"))
        for role, mine in by_role.items()
    ]
