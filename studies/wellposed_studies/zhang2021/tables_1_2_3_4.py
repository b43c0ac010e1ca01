"""Zhang et al. (2021), Tables 1 to 4: the variants at three strengths beside the Transformer, paper
beside ours."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.charts import Panel, Row, Series, where
from wellposed.compare.compare import compare
from wellposed.errors import ConfigError
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed.statistics import (
    Failure,
    SeedResults,
    compare_seeds,
    holm_correction,
    mean_and_standard_error,
)
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions
from wellposed_studies.corpora import (
    CHARACTERS,
    SUBWORD,
    T2T_BEAMS,
    WMT16,
    Corpus,
    paper_runs,
    random_walk,
    small_corpus,
)
from wellposed_studies.runs import FinishedRun, mean_and_error, plus_minus
from wellposed_studies.verdicts import every
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
    Column,
)

EMBEDDINGS_NOTE = (
    "embedding average, vector extrema and greedy matching need --vectors, and the cosine of"
    " sentences, which replaces SkipThought, needs --encoder; columns without them are empty"
)
MINI_NOTE = (
    "tiny models on one corpus where the paper has large ones on each; a difference here says"
    " little of theirs"
)
III = (OC3, OC3_PRINTED)
"""Both forms of VAR-III."""
NORM_NOTE = (
    "post-LN; Tensor2Tensor's later settings, which the paper may have used, put LayerNorm before"
    " the sublayer"
)


@dataclass(frozen=True)
class Study:
    """One corpus with its variants."""

    label: str
    base: RunConfig
    paper: Mapping[str, Column]
    """What the paper prints, by metric and variant; empty where no column is of this corpus."""
    metrics: tuple[str, ...] = ("bleu",)
    """Metrics of the test split, the first one decides."""


def table_1(request: Request) -> Reproduction:
    """BLEU of the three variants on subword corpora."""
    paper = _bleu(SUBWORD, TABLE_1)
    if request.scale == "paper":
        studies = _of_corpora(request, SUBWORD, paper)
    else:
        studies = [_small_study(request, "subwords", width=_width(request, 128))]
    return _reproduce(
        request, "table-1", studies, (OC1, OC2, *III), paper, gains=_bleu_gains(TABLE_1_GAINS)
    )


def table_2(request: Request) -> Reproduction:
    """BLEU of VAR-III in the base and the big setting."""
    paper = _bleu(WMT16, TABLE_2)
    if request.scale == "paper":
        studies = _of_corpora(request, WMT16, paper)
    else:
        base = _width(request, 64)
        studies = [
            _small_study(request, "base", width=base),
            _small_study(request, "big", width=2 * base),
        ]
    return _reproduce(request, "table-2", studies, III, paper)


def table_3(request: Request) -> Reproduction:
    """BLEU of VAR-III on characters."""
    paper = _bleu(CHARACTERS, TABLE_3)
    if request.scale == "paper":
        studies = _of_corpora(request, CHARACTERS, paper)
    else:
        studies = [_small_study(request, "characters", width=_width(request, 64), tokenizer="char")]
    return _reproduce(request, "table-3", studies, III, paper, gains=_bleu_gains(TABLE_3_GAINS))


def table_4(request: Request) -> Reproduction:
    """The measures of dialogue of the three variants."""
    studies = _dialogues(request) if request.scale == "paper" else [_small_dialogues(request)]
    return _reproduce(request, "table-4", studies, (OC1, OC2, *III), TABLE_4, gains=TABLE_4_GAINS)


def _bleu(
    corpora: Sequence[Corpus], printed: Mapping[str, Column]
) -> dict[str, Mapping[str, Column]]:
    return {corpus.pair: {"bleu": printed[corpus.pair]} for corpus in corpora}


def _bleu_gains(gains: Mapping[str, float]) -> dict[str, Column]:
    return {label: {"bleu": gain} for label, gain in gains.items()}


def _of_corpora(
    request: Request, corpora: Sequence[Corpus], paper: Mapping[str, Any]
) -> list[Study]:
    configs = paper_runs(request, corpora)
    return [
        Study(corpus.pair, config, paper[corpus.pair])
        for corpus, config in zip(corpora, configs, strict=True)
    ]


def _dialogues(request: Request) -> list[Study]:
    """Return the paper's runs on both sets, which take the settings of its first corpus."""
    if request.data is None:
        raise ConfigError(
            "zhang2021/table-4 at paper scale needs --data FOLDER with the folders personachat and"
            " dailydialog, each in its released format"
        )
    base = replace(SUBWORD[0], steps=20_000).run_config()
    shared = {"vocab_size": 32768, "tokens_per_batch": 4096, **T2T_BEAMS, **_scorers(request)}
    folders = {label: str(Path(request.data) / label.lower()) for label in TABLE_4}
    return [
        Study(
            label,
            replace(base, task="dialogue", task_options={"data": folders[label], **shared}),
            columns,
            _dialogue_metrics(),
        )
        for label, columns in TABLE_4.items()
    ]


def _small_study(request: Request, label: str, *, width: int, tokenizer: str = "bpe") -> Study:
    options = small_corpus(request, max_tokens=300, vocab_size=2000 if tokenizer == "bpe" else None)
    return Study(
        label, _small_run(request, "translation", {**options, "tokenizer": tokenizer}, width), {}
    )


def _width(request: Request, medium: int) -> int:
    return request.pick(toy=32, mini=32, medium=medium, paper=0)


def _small_dialogues(request: Request) -> Study:
    data = request.data or str(
        _generate_dialogues(
            request.out / "dialogues", request.pick(toy=40, mini=1000, medium=10_000, paper=0)
        )
    )
    options = {
        "data": data,
        "vocab_size": 2000,
        "max_tokens": 96,
        "limit_dialogues": request.pick(toy=1000, mini=1000, medium=10_000, paper=0),
        "generate_beams": 1,
        "generate_max_examples": request.pick(toy=4, mini=200, medium=500, paper=0),
        **_scorers(request),
    }
    return Study(
        "dialogue",
        _small_run(request, "dialogue", options, _width(request, 64)),
        {},
        _dialogue_metrics(),
    )


def _scorers(request: Request) -> dict[str, str]:
    """Return the options of the task `dialogue` that the four measures of embeddings need, as far
    as they are given."""
    given = {"vectors": request.vectors, "sentence_encoder": request.encoder}
    return {name: value for name, value in given.items() if value is not None}


def _small_run(request: Request, task: str, options: Mapping[str, Any], width: int) -> RunConfig:
    steps = request.pick(toy=3, mini=200, medium=2000, paper=0)
    model = ModelOptions(
        hidden_size=width,
        num_hidden_layers=request.pick(toy=1, mini=1, medium=2, paper=0),
        intermediate_size=2 * width,
        activation="relu",
    )
    evaluate = steps // request.pick(toy=1, mini=1, medium=10, paper=1)
    train = TrainOptions(
        steps=steps,
        batch_size=request.pick(toy=4, mini=32, medium=96, paper=0),
        learning_rate=3e-3,
        warmup_steps=steps // 10,
        eval_every=evaluate,
        checkpoint_every=evaluate,
        log_every=max(1, steps // 10),
        label_smoothing=0.1,
    )
    return RunConfig(task, dict(options), model=model, train=train)


def _dialogue_metrics() -> tuple[str, ...]:
    from wellposed.tasks import DIALOGUE_METRICS

    return DIALOGUE_METRICS


def _generate_dialogues(folder: Path, dialogues: int) -> Path:
    """Write dialogues in which each speaker says what the other said backwards, in the format of
    DailyDialog."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        rng = random.Random(f"{split}/{dialogues}")
        dialogue_lines = []
        for _ in range(dialogues if split == "train" else max(8, dialogues // 10)):
            said = " ".join(random_walk(rng))
            turns = [said if turn % 2 == 0 else said[::-1] for turn in range(rng.randint(2, 4))]
            dialogue_lines.append("".join(f"{turn} __eou__ " for turn in turns))
        (folder / f"dialogues_{split}.txt").write_text(
            "\n".join(dialogue_lines) + "\n", encoding="utf-8"
        )
    return folder


def seeds_of(request: Request) -> int:
    """Return the seeds of every table."""
    return request.pick(toy=1, mini=3, medium=5, paper=3)


def _reproduce(
    request: Request,
    item: str,
    studies: Sequence[Study],
    variants: Sequence[str],
    paper: Mapping[str, Any],
    *,
    gains: Mapping[str, Column] | None = None,
) -> Reproduction:
    strengths = STRENGTHS if request.scale != "toy" else STRENGTHS[:1]
    names = [
        TRANSFORMER,
        *(f"{variant}:{strength:g}" for variant in variants for strength in strengths),
    ]
    seeds = seeds_of(request)
    generated = request.scale != "paper" and request.data is None
    rows: list[dict[str, Any]] = []
    texts, verdicts = [], []
    for study in studies:
        runs = _train(request, item, study, names, seeds=seeds)
        rows += [_row(study, run) for run in runs]
        text, better = compare_variants(study, runs, variants)
        texts.append(text)
        verdicts.append(better)
    metric = studies[0].metrics[0]
    first_columns = [(label, *next(iter(columns.items()))) for label, columns in paper.items()]
    printed = "; ".join(
        f"{label} {column} "
        + ", ".join(f"{LABELS[variant]} {value:g}" for variant, value in values.items())
        for label, column, values in first_columns
    )
    small = request.scale != "paper"
    return Reproduction(
        rows,
        [
            panel
            for study in studies
            for panel in table_panels(study, where(rows, corpus=study.label))
        ],
        got="; ".join(texts),
        holds=None if generated else every(verdicts),
        criterion=Criterion(
            "on every corpus some variant, at its best strength on valid, is significantly better"
            " than the Transformer; one on which the significant differences are all for the worse"
            " is against the claim, and a generated corpus cannot say",
            seeds,
            "paired t-tests over seeds, Holm-corrected, at 5 %",
        ),
        notes=(
            f"paper, {metric}: {printed}",
            *(
                [
                    "gain of the best variant in %, as printed (recomputed):"
                    f" {about_gains(paper, gains)}"
                ]
                if gains
                else []
            ),
            FORM_NOTE,
            NORM_NOTE,
            *(
                [EMBEDDINGS_NOTE]
                if len(studies[0].metrics) > 1 and len(_scorers(request)) < 2
                else []
            ),
            *((MINI_NOTE,) if small else ()),
        ),
    )


def about_gains(paper: Mapping[str, Mapping[str, Column]], gains: Mapping[str, Column]) -> str:
    """Return the printed gains in every measure of each corpus beside those that its printed values
    give.

    >>> about_gains({"De-En": {"bleu": {TRANSFORMER: 20.0, OC1: 21.0}}}, {"De-En": {"bleu": 4.9}})
    'De-En bleu 4.9 (5.0)'
    """
    texts = []
    for label, columns in paper.items():
        for measure, values in columns.items():
            best = max(value for variant, value in values.items() if variant != TRANSFORMER)
            texts.append(
                f"{label} {measure} {gains[label][measure]:g}"
                f" ({100 * (best / values[TRANSFORMER] - 1):.1f})"
            )
    return ", ".join(texts)


def _train(
    request: Request, item: str, study: Study, names: Sequence[str], seeds: int
) -> list[FinishedRun]:
    folder = request.runs(f"zhang2021-{item}") / study.label.replace(" ", "-")
    finished = compare(
        study.base,
        names,
        seeds=seeds,
        out=folder,
        jobs=request.jobs or 1,
        resume="auto",
        progress=False,
        announce=request.announce,
    )
    return [FinishedRun.of(result) for result in finished.results]


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
    return min(
        by_strength.items(),
        key=lambda item: sum(run.metric("perplexity,valid", math.inf) for run in item[1]),
    )


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
    unsaid = [
        f"{LABELS[name]}: {test.verdict}"
        for name, test in zip(variants, tests, strict=True)
        if test.obstacle
    ]
    if unsaid:
        return ", ".join([*texts, *unsaid]), None
    gains = [test.mean_difference or 0.0 for test in tests]
    different = [gain for gain, test in zip(gains, tests, strict=True) if test.significant]
    if not different:
        return ", ".join([*texts, "differences within the noise of the seeds"]), None
    return ", ".join(texts), any(gain > 0 for gain in different)


def _by_seed(study: Study, runs: Sequence[FinishedRun]) -> SeedResults:
    metric = f"{study.metrics[0]},test"
    return SeedResults(
        LABELS[_split_name(runs[0])[0]],
        {run.seed: run.metric(metric) for run in runs if metric in run.metrics},
        {
            run.seed: Failure("failed", f"no {study.metrics[0]}")
            for run in runs
            if metric not in run.metrics
        },
    )


def _mean(results: SeedResults) -> str:
    return (
        plus_minus(mean_and_standard_error(list(results.values.values())))
        if results.values
        else "failed"
    )


def _row(study: Study, run: FinishedRun) -> dict[str, Any]:
    variant, strength = _split_name(run)
    row: dict[str, Any] = {
        "corpus": study.label,
        "variant": LABELS[variant],
        "strength": strength,
        "seed": run.seed,
        "valid_perplexity": run.metric("perplexity,valid", math.inf),
    }
    for metric in study.metrics:
        row[f"{metric}_ours"] = run.metrics.get(f"{metric},test")
        column = "skip_thought" if metric == "sentence_cosine" else metric
        row[f"{metric}_paper"] = study.paper.get(column, {}).get(OC3 if variant in III else variant)
    return row


def table_panels(study: Study, rows: Sequence[Row]) -> list[Panel]:
    """Return a panel for each measure that was computed: means and errors by strength, and the
    paper's values."""
    known = {
        metric: [row for row in rows if row[f"{metric}_ours"] is not None]
        for metric in study.metrics
    }
    return [
        _panel(f"{study.label}, {metric}", metric, mine) for metric, mine in known.items() if mine
    ]


def _panel(title: str, metric: str, rows: Sequence[Row]) -> Panel:
    strengths = list(dict.fromkeys(row["strength"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    printed = {
        row["variant"]: row[f"{metric}_paper"] for row in rows if row[f"{metric}_paper"] is not None
    }
    series = []
    for number, variant in enumerate(variants):
        mine = where(rows, variant=variant)
        shift = 0.12 * (number - (len(variants) - 1) / 2)
        found = [
            (
                place + shift,
                *mean_and_error([row[f"{metric}_ours"] for row in where(mine, strength=strength)]),
            )
            for place, strength in enumerate(strengths)
            if where(mine, strength=strength)
        ]
        found += (
            [(len(strengths) + shift, printed[variant], math.nan)] if variant in printed else []
        )
        x, means, errors = (list(column) for column in zip(*found, strict=True))
        series.append(
            Series(
                variant,
                x,
                means,
                "dots",
                number,
                [0.0 if math.isnan(each) else each for each in errors],
            )
        )
    names = ["none" if strength is None else f"{strength:g}" for strength in strengths]
    return Panel(
        title,
        "strength",
        f"{metric} on test",
        series,
        names=[*names, *(["paper"] if printed else [])],
    )
