"""Zhang et al. (2021), Tables 1 to 4: printed values, and the constraints at four strengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from wellposed_lab.charts import Panel, Row, where
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.compare.variants import apply_variant, variant_folder
from wellposed_lab.statistics import SeedResults, compare_seeds, holm_correction
from wellposed_lab.training.config import RunConfig, read_toml
from wellposed_studies.recipe import Reproduction, Request, Verdict, recipe
from wellposed_studies.sentences import READS, random_walk, splits, translation_data
from wellposed_studies.study import (
    FinishedRun,
    Sizes,
    judged,
    mean_se,
    mean_series,
    run_config,
    seed_results,
    train_grid,
)
from wellposed_studies.verdicts import Power, every, gain, some

TRANSFORMER = "post_ln"
OC1 = "oc1"
OC2 = "oc2"
OC3 = "oc3"
OC3_PRINTED = "oc3_printed"
LABELS = {
    TRANSFORMER: "Transformer",
    OC1: "VAR-I",
    OC2: "VAR-II",
    OC3: "VAR-III",
    OC3_PRINTED: "VAR-III, unsquared",
}
FORM_NOTE = (
    "VAR-III squares every norm, and VAR-III, unsquared, all but those of the feed-forward weights,"
    " as the paper prints it; its tables have one VAR-III, which is compared with both"
)
SUMMED = 128
"""Sentences in a batch, if the penalty is a sum over them."""
STRENGTHS = (SUMMED * 1e-6, 1e-6, 1e-8, 1e-10)
"""The three printed strengths, and the largest as a sum over a batch."""
PAPER_RUNS: Mapping[str, tuple[int, int]] = {
    "table-1": (256, 200_000),
    "table-2": (512, 2_000_000),
    "table-3": (256, 200_000),
    "table-4": (256, 20_000),
}
"""Width and steps of the paper's runs, by table (its smallest models)."""
_PAPER_GAMMA = 2.0
_PAPER_WARMUP = 8000
DECODING: Mapping[str, Any] = {
    "generate_beams": 4,
    "generate_length_penalty": 0.6,
    "generate_length_penalty_form": "gnmt",
}
"""Search of the paper."""

PRINTED: Mapping[str, Any] = read_toml(Path(__file__).with_name("printed.toml"))
"""Value of each variant and gain of the best in percent, by table, corpus and measure."""


def about_gains(paper: Mapping[str, Any]) -> str:
    """Return the printed gain in every measure, and the gain recomputed from printed values."""
    texts = []
    for label, measures in paper.items():
        for measure, values in measures.items():
            best = max(values[variant] for variant in (OC1, OC2, OC3) if variant in values)
            gain = 100 * (best / values[TRANSFORMER] - 1)
            texts.append(f"{label} {measure} {values['gain']:g} ({gain:.1f})")
    return ", ".join(texts)


III = (OC3, OC3_PRINTED)
"""Both forms of VAR-III."""
LEAST = 0.01
"""Smallest gain over the Transformer that Table 1 prints, as a share of its score."""
TEST = (
    "on every corpus and in every measure of the table some variant, at its best strength on valid,"
    " is significantly better than the Transformer. A measure in which all are significantly worse"
    f" contradicts it. One in which every variant gains less than {LEAST:.0%} of the Transformer's"
    " score, by one-sided tests at 5 % shared over the measures, has none of that size. A generated"
    " corpus cannot say. Strengths have the paper's doses: strength times the summed learning rate"
)
EMBEDDINGS_NOTE = (
    "embedding average, vector extrema and greedy matching need --vectors, and the cosine of"
    " sentences, which replaces SkipThought, needs --encoder; columns without them are empty"
)
NOTES = (
    "a penalty moves a weight by its dose, the strength times the summed learning rate. The printed"
    " strengths are multiplied by the paper's summed rate over ours. At its strengths themselves a run"
    " of some hundred steps moves nothing, and every variant is a placebo",
    "strengths are of means over a batch. The paper does not say whether its 1e-6 is of a mean or of"
    f" a sum over its batch, which at {SUMMED} sentences is our {STRENGTHS[0]:.2g}; both readings of"
    " its largest strength are tried",
    "post-LN; Tensor2Tensor's later settings, which the paper may have used, put LayerNorm before"
    " the sublayer",
    "tiny models on one corpus; the paper has large ones on each, so a difference here says"
    " little about theirs",
)


def seeds_of(request: Request) -> int:
    return request.pick(toy=1, mini=3, medium=5, paper=5)


def _power(tests: int) -> Power:
    scatter = "VAR-III less Transformer after 450 steps on Multi30k, p = 0.88"
    return Power(seeds_of, "BLEU on test", 1.0, scatter, tests=tests)


@recipe("zhang2021/table-1", power=_power(4), **READS)
def table_1(request: Request) -> Reproduction:
    """BLEU of VAR-I, II, III on six subword corpora.

    Claim: constraints raise BLEU on all six corpora, by 1.0 % to 7.3 % (De-En 34.68 to 35.20).
    Quote: "they are able to achieve +1.0% to +7.3% relative gain over the standard transformer"
        (section 3.1).
    Test: {TEST}.
    """
    bases = {"subwords": _translation(request, 128)}
    return _reproduce(request, "table-1", bases, (OC1, OC2, *III))


@recipe("zhang2021/table-2", power=_power(2), **READS)
def table_2(request: Request) -> Reproduction:
    """BLEU of VAR-III on WMT'16 En-De, base and big.

    Claim: VAR-III raises base from 27.3 to 28.5 and big from 28.4 to 29.6.
    Quote: "increasing the BLEU from 28.4 to 29.6" (section 3.1).
    Test: {TEST}.
    """
    bases = {size: _translation(request, 64, twice=size == "big") for size in ("base", "big")}
    return _reproduce(request, "table-2", bases, III)


@recipe("zhang2021/table-3", power=_power(2), **READS)
def table_3(request: Request) -> Reproduction:
    """BLEU of VAR-III on three corpora of characters.

    Claim: VAR-III raises En-Fr from 18.74 to 19.40, Ro-En from 22.04 to 22.61, De-En from 27.59 to
        28.02.
    Quote: "consistently boost the performance of standard transformers on all the three language
        pairs" (section 3.1).
    Test: {TEST}.
    """
    bases = {"characters": _translation(request, 64, tokenizer="char", vocab_size=None)}
    return _reproduce(request, "table-3", bases, III)


@recipe(
    "zhang2021/table-4",
    folders=("dailydialog", "personachat"),
    takes=("data", "encoder", "vectors"),
    builtin="dialogues in which each speaker says backwards what the other said",
    power=_power(36),
)
def table_4(request: Request) -> Reproduction:
    """Nine measures of dialogue on PersonaChat and DailyDialog.

    Claim: the best variants gain in all nine measures on both corpora: BLEU-1 23.5 % and 15.7 %,
        down to 0.7 % of embedding average; but vector extrema of PersonaChat gains 0.0 %, so that
        as printed it is eight of nine there.
    Quote: "peaking at +23.5% on BLEU-1 scores" (section 3.2).
    Test: {TEST}.
    """
    from wellposed_studies.tasks.dialogue_scores import DIALOGUE_METRICS

    dialogues, limit, generated = request.effort("zhang2021/table-4")
    options = {
        "data": request.data or str(_generate_dialogues(request.out / "dialogues", dialogues)),
        "vocab_size": 2000,
        "max_tokens": 96,
        "limit_dialogues": limit,
        **DECODING,
        "generate_max_examples": generated,
        "vectors": request.vectors,
        "sentence_encoder": request.encoder,
    }
    bases = {"dialogue": _run(request, "dialogue", options, 64)}
    notes = () if request.vectors and request.encoder else (EMBEDDINGS_NOTE,)
    return _reproduce(request, "table-4", bases, (OC1, OC2, *III), DIALOGUE_METRICS, notes)


def _translation(request: Request, width: int, *, twice: bool = False, **options: Any) -> RunConfig:
    """Return the base run on the user's sentences, or on generated words."""
    pairs, limit, generated = request.pick(
        toy=(60, 6000, 4), mini=(3000, 6000, 200), medium=(20_000, 100_000, 500), paper=()
    )
    corpus = translation_data(request, words=True, pairs=pairs)
    corpus |= {"max_tokens": 300, "overflow": "drop", "limit_pairs": limit, "tokenizer": "bpe"}
    corpus |= {**DECODING, "generate_max_examples": generated, "vocab_size": 2000}
    return _run(request, "translation", {**corpus, **options}, width, twice=twice)


def _run(
    request: Request, task: str, options: Mapping[str, Any], width: int, *, twice: bool = False
) -> RunConfig:
    """Return the base run of every variant; ``twice`` doubles the width."""
    sizes = request.pick(
        toy=Sizes(3, width=32, layers=1, batch_size=4, evaluations=1),
        mini=Sizes(200, width=32, layers=1, evaluations=8),
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


def dose_factor(table: str, base: RunConfig) -> float:
    """Return the paper's summed learning rate over that of ``base``: equal doses need this factor.

    The paper's schedule is ``kim2021``, gamma / sqrt(d) min(t^-1/2, t w^-3/2), summed as an integral.
    """
    from wellposed_lab.training.loop.schedules import learning_rate

    width, steps = PAPER_RUNS[table]
    after = 2 * (math.sqrt(steps) - math.sqrt(_PAPER_WARMUP))
    paper = _PAPER_GAMMA / math.sqrt(width) * (math.sqrt(_PAPER_WARMUP) / 2 + after)
    train = base.train
    hidden = base.model.hidden_size
    ours = math.fsum(learning_rate(step, train, hidden) for step in range(1, train.steps + 1))
    return paper / ours


def _generate_dialogues(folder: Path, dialogues: int) -> Path:
    """Write DailyDialog files in which each speaker says the last turn backwards."""
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
    table: str,
    bases: Mapping[str, RunConfig],
    variants: Sequence[str],
    metrics: Sequence[str] = ("bleu",),
    notes: Sequence[str] = (),
) -> Reproduction:
    """Train the variants of each corpus and compare them; the first metric on test is quoted."""
    strengths = STRENGTHS if request.scale != "toy" else STRENGTHS[1:2]
    rows: list[Row] = []
    texts = []
    verdicts = []
    panels = []
    chosen = []
    folder = request.runs(f"zhang2021-{table}")
    for label, base in bases.items():
        factor = dose_factor(table, base)
        names = [f"{name}:{factor * strength:.2g}" for name in variants for strength in strengths]
        planned = [
            PlannedRun(
                folder / label / variant_folder(name) / f"seed-{seed}",
                f"{label}, {name}, seed {seed}",
                apply_variant(name, replace(base, train=replace(base.train, seed=seed))),
            )
            for name, seed in itertools.product([TRANSFORMER, *names], range(seeds_of(request)))
        ]
        runs = train_grid(request, planned)
        mine = [_row(label, metrics, run) for run in runs]
        best = {name: _best_strength(runs, name) for name in (TRANSFORMER, *variants)}
        parts = len(bases) * len(metrics)
        text, verdict = compare_variants(label, metrics, best, parts)
        rows += mine
        texts.append(text)
        verdicts.append(verdict)
        panels += _panels(label, metrics, mine)
        chosen += itertools.chain(*best.values())

    printed = []
    recomputed = ""
    for label, measures in PRINTED[table].items():
        measure, values = next(iter(measures.items()))
        of_each = [f"{LABELS[name]} {value:g}" for name, value in values.items() if name in LABELS]
        printed.append(f"{label} {measure} {', '.join(of_each)}")
        if "gain" in values:
            gains = about_gains(PRINTED[table])
            recomputed = f"gain of the best variant in %, as printed (recomputed): {gains}"

    of_paper = f"paper, {metrics[0]}: {'; '.join(printed)}"
    got = "; ".join(texts)
    holds = None if request.data is None else every(verdicts)
    uncertainty = "paired t-tests over seeds, Holm-corrected, at 5 %"
    notes = tuple(filter(None, (of_paper, recomputed, FORM_NOTE, *notes, *NOTES)))
    return judged(request, rows, panels, got, holds, chosen, uncertainty=uncertainty, notes=notes)


def _split_name(run: FinishedRun) -> tuple[str, float | None]:
    name, _, strength = run.variant.partition(":")
    return name, float(strength) if strength else None


def _best_strength(runs: Sequence[FinishedRun], variant: str) -> list[FinishedRun]:
    """Return the runs of a variant at the strength with the lowest mean perplexity on valid."""
    mine = (run for run in runs if _split_name(run)[0] == variant)
    by_strength = [list(same) for _, same in itertools.groupby(mine, lambda run: run.variant)]
    return min(
        by_strength, key=lambda runs: sum(r.metric("perplexity,valid", math.inf) for r in runs)
    )


def compare_variants(
    label: str, metrics: Sequence[str], chosen: Mapping[str, Sequence[FinishedRun]], parts: int = 1
) -> tuple[str, Verdict]:
    """Return the result in words, and whether a variant is better in all measures.

    None if undecided or a measure is missing; ``parts`` is the number of parts of the claim.
    """
    plain, *variants = chosen
    by_seed = {
        (metric, name): seed_results(LABELS[name], chosen[name], f"{metric},test")
        for metric, name in itertools.product(metrics, chosen)
    }
    pairs = list(itertools.product(metrics, variants))
    tests = [compare_seeds(by_seed[pair], by_seed[pair[0], plain]) for pair in pairs]
    tested = dict(zip(pairs, holm_correction(tests), strict=True))
    texts = []
    verdicts = []
    failed = any(run.failure for runs in chosen.values() for run in runs)
    measured = {metric for (metric, _), results in by_seed.items() if results.values}
    absent = [metric for metric in metrics if not (failed or metric in measured)]
    if absent:
        texts.append(f"{label}: not measured {', '.join(absent)}")
        verdicts.append(None)

    for metric in metrics:
        if metric in absent:
            continue
        texts.append(f"{label}, {metric}: {LABELS[plain]} {_mean(by_seed[metric, plain])}")
        for name in variants:
            strength = _split_name(chosen[name][0])[1]
            texts.append(f"{LABELS[name]} ({strength:g}) {_mean(by_seed[metric, name])}")
        mine = {name: tested[metric, name] for name in variants}
        unsaid = [f"{LABELS[name]}: {test.verdict}" for name, test in mine.items() if test.obstacle]
        if not (unsaid or any(test.significant for test in mine.values())):
            texts.append("differences within the noise of the seeds")
        texts += unsaid
        plain_scores = by_seed[metric, plain].values.values()
        smallest = LEAST * abs(fmean(plain_scores)) if plain_scores else math.inf
        gains = some(gain(test, smallest, parts=parts) for test in mine.values())
        verdicts.append(None if unsaid else gains)

    return ", ".join(texts), every(verdicts)


def _mean(results: SeedResults) -> str:
    return mean_se(list(results.values.values())) if results.values else "failed"


def _row(label: str, metrics: Sequence[str], run: FinishedRun) -> Row:
    variant, strength = _split_name(run)
    row = {"corpus": label, "variant": LABELS[variant], "strength": strength}
    perplexity = run.metric("perplexity,valid", math.inf)
    scores = {f"{metric}_ours": run.metrics.get(f"{metric},test") for metric in metrics}
    return {**row, "seed": run.seed, "valid_perplexity": perplexity, **scores}


def _panels(label: str, metrics: Sequence[str], rows: Sequence[Row]) -> list[Panel]:
    """Return a panel for each computed measure: means and errors by strength."""
    strengths = list(dict.fromkeys(row["strength"] for row in rows))
    names = ["none" if strength is None else f"{strength:g}" for strength in strengths]
    placed = [{**row, "place": strengths.index(row["strength"])} for row in rows]
    panels = []
    for metric in metrics:
        column = f"{metric}_ours"
        series = []
        measured = [row for row in placed if row[column] is not None]
        for number, variant in enumerate(dict.fromkeys(row["variant"] for row in measured)):
            mine = where(measured, variant=variant)
            shift = 0.12 * (number - 2)
            series.append(mean_series(mine, "place", column, variant, "dots", number, shift=shift))
        if measured:
            title = f"{label}, {metric}"
            y = f"{metric} on test"
            panels.append(Panel(title, "strength", y, series, names=names))

    return panels
