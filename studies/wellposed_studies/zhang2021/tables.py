"""Zhang et al. (2021), Tables 1 to 4: the constraints at three strengths beside the Transformer,
paper beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.charts import Panel, Row, where
from wellposed.compare.compare import compare
from wellposed.recipes.recipe import Criterion, Reproduction, Request, recipe
from wellposed.statistics import SeedResults, compare_seeds, holm_correction
from wellposed.training.config import RunConfig
from wellposed_studies.sentences import READS, random_walk, small_corpus, splits
from wellposed_studies.study import FinishedRun, Sizes, mean_series, run_config, said, seed_results
from wellposed_studies.verdicts import Power, every
from wellposed_studies.zhang2021.printed import (
    FORM_NOTE,
    LABELS,
    OC1,
    OC2,
    OC3,
    OC3_PRINTED,
    STRENGTHS,
    TABLE_1,
    TABLE_1_GAINS,
    TABLE_2,
    TABLE_3,
    TABLE_3_GAINS,
    TABLE_4,
    TABLE_4_GAINS,
    TRANSFORMER,
    Columns,
    about_gains,
)

III = (OC3, OC3_PRINTED)
"""Both forms of VAR-III."""
TEST = (
    "on every corpus some variant, at its best strength on valid, is significantly better than the"
    " Transformer; one on which the significant differences are all for the worse is against the"
    " claim, and a generated corpus cannot say"
)
EMBEDDINGS_NOTE = (
    "embedding average, vector extrema and greedy matching need --vectors, and the cosine of"
    " sentences, which replaces SkipThought, needs --encoder; columns without them are empty"
)
NOTES = (
    "post-LN; Tensor2Tensor's later settings, which the paper may have used, put LayerNorm before"
    " the sublayer",
    "tiny models on one corpus where the paper has large ones on each; a difference here says"
    " little of theirs",
)


def seeds_of(request: Request) -> int:
    """Return the seeds of every table."""
    return request.pick(toy=1, mini=3, medium=5, paper=5)


def _power(tests: int) -> Power:
    scatter = "VAR-III less Transformer after 450 steps on Multi30k, p = 0.88"
    return Power(seeds_of, "BLEU on test", 1.0, scatter, tests=tests)


@dataclass(frozen=True)
class Study:
    """One corpus with what is trained on it."""

    label: str
    base: RunConfig
    metrics: tuple[str, ...] = ("bleu",)
    """Metrics of the test split, the first one decides."""


@recipe(
    "zhang2021/table-1", measured={"mini": 17}, estimated={"medium": 560}, power=_power(4), **READS
)
def table_1(request: Request) -> Reproduction:
    """BLEU of VAR-I, II, III on six subword corpora.

    Claim: constraints raise BLEU on all six corpora, by 1.0 % to 7.3 % (De-En 34.68 to 35.20)
    """
    studies = [_translation(request, "subwords", 128)]
    return _reproduce(request, 1, studies, (OC1, OC2, *III), TABLE_1, TABLE_1_GAINS)


@recipe(
    "zhang2021/table-2", measured={"mini": 14}, estimated={"medium": 590}, power=_power(2), **READS
)
def table_2(request: Request) -> Reproduction:
    """BLEU of VAR-III on WMT'16 En-De, base and big.

    Claim: VAR-III raises base from 27.3 to 28.5 and big from 28.4 to 29.6
    """
    studies = [_translation(request, "base", 64), _translation(request, "big", 64, twice=True)]
    return _reproduce(request, 2, studies, III, TABLE_2)


@recipe(
    "zhang2021/table-3", measured={"mini": 13}, estimated={"medium": 590}, power=_power(2), **READS
)
def table_3(request: Request) -> Reproduction:
    """BLEU of VAR-III on three corpora of characters.

    Claim: VAR-III raises En-Fr from 18.74 to 19.40, Ro-En from 22.04 to 22.61, De-En from 27.59
    to 28.02
    """
    studies = [_translation(request, "characters", 64, tokenizer="char", vocab_size=None)]
    return _reproduce(request, 3, studies, III, TABLE_3, TABLE_3_GAINS)


@recipe(
    "zhang2021/table-4",
    measured={"mini": 21},
    estimated={"medium": 500},
    folders=("dailydialog", "personachat"),
    takes=("data", "encoder", "vectors"),
    builtin="dialogues in which each speaker says backwards what the other said",
    power=_power(4),
)
def table_4(request: Request) -> Reproduction:
    """Nine measures of dialogue on PersonaChat and DailyDialog.

    Claim: the best variant beats the Transformer in all nine measures on both (BLEU-1 13.2 to
    16.3 and 12.1 to 14.0)
    """
    from wellposed.tasks import DIALOGUE_METRICS

    dialogues, limit, generated = request.pick(
        toy=(40, 1000, 4), mini=(1000, 1000, 200), medium=(10_000, 10_000, 500), paper=()
    )
    options = {
        "data": request.data or str(_generate_dialogues(request.out / "dialogues", dialogues)),
        "vocab_size": 2000,
        "max_tokens": 96,
        "limit_dialogues": limit,
        "generate_beams": 1,
        "generate_max_examples": generated,
        "vectors": request.vectors,
        "sentence_encoder": request.encoder,
    }
    study = Study("dialogue", _run(request, "dialogue", options, 64), DIALOGUE_METRICS)
    notes = () if request.vectors and request.encoder else (EMBEDDINGS_NOTE,)
    variants = (OC1, OC2, *III)
    return _reproduce(request, 4, [study], variants, TABLE_4, TABLE_4_GAINS, notes)


def _translation(
    request: Request, label: str, width: int, *, twice: bool = False, **options: Any
) -> Study:
    options = {"tokenizer": "bpe", **small_corpus(request, max_tokens=300), **options}
    return Study(label, _run(request, "translation", options, width, twice=twice))


def _run(
    request: Request, task: str, options: Mapping[str, Any], width: int, *, twice: bool = False
) -> RunConfig:
    """Return what every variant starts from, of a width at medium scale, or of twice that."""
    sizes = request.pick(
        toy=Sizes(3, width=32, layers=1, batch_size=4, evaluations=1),
        mini=Sizes(200, width=32, layers=1, evaluations=1),
        medium=Sizes(2000, width=width, batch_size=96, evaluations=10),
        paper=None,
    )
    width = sizes.width * (2 if twice else 1)
    return run_config(
        task,
        options,
        sizes,
        model={"hidden_size": width, "intermediate_size": 2 * width, "activation": "relu"},
        learning_rate=3e-3,
        warmup_steps=sizes.steps // 10,
        label_smoothing=0.1,
    )


def _generate_dialogues(folder: Path, dialogues: int) -> Path:
    """Write dialogues in which each speaker says what the other said backwards, in the format of
    DailyDialog."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rng, rows in splits("validation", dialogues):
        lines = []
        for _ in range(rows):
            word = " ".join(random_walk(rng))
            turns = [word if turn % 2 == 0 else word[::-1] for turn in range(rng.randint(2, 4))]
            lines.append("".join(f"{turn} __eou__ " for turn in turns))
        (folder / f"dialogues_{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _reproduce(
    request: Request,
    table: int,
    studies: Sequence[Study],
    variants: Sequence[str],
    paper: Mapping[str, Columns],
    gains: Mapping[str, Mapping[str, float]] | None = None,
    notes: Sequence[str] = (),
) -> Reproduction:
    strengths = STRENGTHS if request.scale != "toy" else STRENGTHS[:1]
    names = [f"{variant}:{strength:g}" for variant in variants for strength in strengths]
    rows: list[Row] = []
    found = []
    folder = request.runs(f"zhang2021-table-{table}")
    how: Any = {"seeds": seeds_of(request), "jobs": request.jobs or 1, "resume": "auto"}
    how |= {"progress": False, "announce": request.announce}
    for study in studies:
        finished = compare(study.base, [TRANSFORMER, *names], out=folder / study.label, **how)
        runs = [FinishedRun.of(result) for result in finished.results]
        rows += [_row(study, run) for run in runs]
        found.append(compare_variants(study, runs, variants))
    texts, verdicts = zip(*found, strict=True)
    printed = []
    for label, columns in paper.items():
        column, values = next(iter(columns.items()))
        of_each = [f"{LABELS[variant]} {value:g}" for variant, value in values.items()]
        printed.append(f"{label} {column} {', '.join(of_each)}")
    of_paper, recomputed = f"paper, {studies[0].metrics[0]}: {'; '.join(printed)}", ""
    if gains:
        told = about_gains(paper, gains)
        recomputed = f"gain of the best variant in %, as printed (recomputed): {told}"
    return Reproduction(
        rows,
        [panel for study in studies for panel in panels(study, where(rows, corpus=study.label))],
        got="; ".join(texts),
        holds=None if request.data is None else every(verdicts),
        criterion=Criterion(
            TEST, seeds_of(request), "paired t-tests over seeds, Holm-corrected, at 5 %"
        ),
        notes=tuple(filter(None, (of_paper, recomputed, FORM_NOTE, *notes, *NOTES))),
    )


def _split_name(run: FinishedRun) -> tuple[str, float | None]:
    """Return a run's variant and its strength."""
    name, _, strength = run.variant.partition(":")
    return name, float(strength) if strength else None


def _best_strength(
    runs: Sequence[FinishedRun], variant: str
) -> tuple[float | None, list[FinishedRun]]:
    """Return the strength with the least mean perplexity on valid, as the paper tunes it there, and
    its runs."""
    by_strength: dict[float | None, list[FinishedRun]] = {}
    for run in runs:
        name, strength = _split_name(run)
        if name == variant:
            by_strength.setdefault(strength, []).append(run)

    def perplexity(item: tuple[float | None, list[FinishedRun]]) -> float:
        return sum(run.metric("perplexity,valid", math.inf) for run in item[1])

    return min(by_strength.items(), key=perplexity)


def compare_variants(
    study: Study, runs: Sequence[FinishedRun], variants: Sequence[str]
) -> tuple[str, bool | None]:
    """Return what was found in words and whether some variant is better; None where the seeds
    cannot tell."""
    plain = _by_seed(study, _best_strength(runs, TRANSFORMER)[1])
    texts = [f"{study.label}, {study.metrics[0]}: Transformer {_mean(plain)}"]
    tests = []
    for variant in variants:
        strength, chosen = _best_strength(runs, variant)
        mine = _by_seed(study, chosen)
        texts.append(f"{LABELS[variant]} ({strength:g}) {_mean(mine)}")
        tests.append(compare_seeds(mine, plain, higher_is_better=True))
    tests = holm_correction(tests)
    named = zip(variants, tests, strict=True)
    unsaid = [f"{LABELS[name]}: {test.verdict}" for name, test in named if test.obstacle]
    if unsaid:
        return ", ".join([*texts, *unsaid]), None
    different = [test.mean_difference or 0.0 for test in tests if test.significant]
    if not different:
        return ", ".join([*texts, "differences within the noise of the seeds"]), None
    return ", ".join(texts), any(gain > 0 for gain in different)


def _by_seed(study: Study, runs: Sequence[FinishedRun]) -> SeedResults:
    return seed_results(LABELS[_split_name(runs[0])[0]], runs, f"{study.metrics[0]},test")


def _mean(results: SeedResults) -> str:
    return said(list(results.values.values())) if results.values else "failed"


def _row(study: Study, run: FinishedRun) -> Row:
    variant, strength = _split_name(run)
    row = {"corpus": study.label, "variant": LABELS[variant], "strength": strength}
    perplexity = run.metric("perplexity,valid", math.inf)
    scores = {f"{metric}_ours": run.metrics.get(f"{metric},test") for metric in study.metrics}
    return {**row, "seed": run.seed, "valid_perplexity": perplexity, **scores}


def panels(study: Study, rows: Sequence[Row]) -> list[Panel]:
    """Return a panel for each measure that was computed: means and errors by strength."""
    strengths = list(dict.fromkeys(row["strength"] for row in rows))
    names = ["none" if strength is None else f"{strength:g}" for strength in strengths]
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    found = []
    placed = [{**row, "place": strengths.index(row["strength"])} for row in rows]
    for metric in study.metrics:
        column, title = f"{metric}_ours", f"{study.label}, {metric}"
        known = [row for row in placed if row[column] is not None]
        series = []
        for number, variant in enumerate(variants):
            mine, shift = where(known, variant=variant), 0.12 * (number - (len(variants) - 1) / 2)
            series.append(mean_series(mine, "place", column, variant, "dots", number, shift=shift))
        if known:
            found.append(Panel(title, "strength", f"{metric} on test", series, names=names))
    return found
