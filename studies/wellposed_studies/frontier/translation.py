"""BLEU of T-Fixup, pre-LN, post-LN and the constraints of Zhang et al. (2021), each tuned.

T-Fixup has no warm-up and no LayerNorm; the other models warm up over the first tenth. Transformers
try three learning rates (more if the best is at an end), then three dropouts; constraints try three
strengths at the rate and dropout of post-LN. The steps of the Transformers are doubled until each
stops gaining or overfits. The verdict is about these longest runs; constraints train as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from wellposed_lab.charts import Panel, Row, where
from wellposed_lab.compare.rates import rates_about
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.statistics import SeedResults, compare_seeds, holm_correction
from wellposed_lab.tasks.task import Task, build_task
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_studies.recipe import Reproduction, Request, recipe
from wellposed_studies.sentences import READS, translation_data
from wellposed_studies.study import (
    FinishedRun,
    Sizes,
    curves,
    folder_name,
    judged,
    mean_se,
    mean_series,
    minus,
    run_config,
    seed_results,
    sizes_at,
    train_grid,
)
from wellposed_studies.tuning import Tuned, tune
from wellposed_studies.verdicts import PLATEAU, UNCERTAINTY, Power, overfits, plateau, within

Trained = Mapping[str, Sequence[FinishedRun]]
"""Runs of each model, one for each seed."""


def double_until_plateau(
    first: Trained, train: Callable[[int], Trained], most: int
) -> list[Trained]:
    """Double the steps, up to ``most`` times, until each model stops gaining or overfits."""
    lengths = [first]
    while len(lengths) <= most and not _ended(lengths):
        lengths.append(train(2 ** len(lengths)))
    return lengths


def at_plateau(lengths: Sequence[Trained]) -> bool:
    """Return whether each model gained less than 1 % by the last doubling, and no seed overfits."""
    return _ended(lengths) and not any(
        _overfits(run) for name in lengths[0] for run in lengths[-1][name]
    )


def _ended(lengths: Sequence[Trained]) -> bool:
    """Return whether longer training helps no model: each gains nothing by it, or overfits."""
    if len(lengths) < 2:
        return False
    shorter, longer = lengths[-2:]
    return all(
        plateau(_losses(shorter[name]), _losses(longer[name])) or all(map(_overfits, longer[name]))
        for name in shorter
    )


def _overfits(run: FinishedRun) -> bool:
    return not run.failure and overfits([loss for _, loss in run.curve("valid")])


def _losses(runs: Sequence[FinishedRun]) -> list[float]:
    return [run.metric("loss,valid", math.inf) for run in runs]


TRANSFORMERS: Mapping[str, str] = {"post_ln": "post-LN", "pre_ln": "pre-LN", "t_fixup": "T-Fixup"}
CONSTRAINTS: Mapping[str, str] = {"oc1": "VAR-I", "oc2": "VAR-II", "oc3": "VAR-III"}
LABELS = {**TRANSFORMERS, **CONSTRAINTS}
JUDGED = "t_fixup"
NORMALISED = ("post_ln", "pre_ln")
CONSTRAINED = "post_ln"
DROPOUTS = (0.0, 0.1, 0.3)
"""Dropouts that every Transformer tries at its best rate; constraints use that of post-LN."""
MARGIN = 0.5
"""BLEU that T-Fixup may lose against the better Transformer with LayerNorm."""
STRENGTHS = (1e-6, 1e-4, 1e-2)
USUAL_RATE = 3e-3
BLEU = "bleu,test"
TEST = (
    f"BLEU on test of T-Fixup less that of the better of post-LN and pre-LN is above -{MARGIN:g} by"
    f" {UNCERTAINTY}, and the three are at a plateau: {PLATEAU}"
)


def sizes_of(request: Request) -> Sizes:
    return sizes_at(request, "frontier/translation")


@recipe(
    "frontier/translation",
    beyond="43 h",
    power=Power(
        sizes_of, "BLEU on test", 1.0, "VAR-III less Transformer on Multi30k", ended=PLATEAU
    ),
    **READS,
)
def translation(request: Request) -> Reproduction:
    """BLEU of T-Fixup, pre-LN, post-LN and the constraints of Zhang et al., each at the best of its
    settings.

    Claim: a claim of ours about Huang et al. (2020) and Zhang et al. (2021) on a small corpus:
        T-Fixup, without warm-up and LayerNorm, is within half a BLEU of the better of post-LN and
        pre-LN with warm-up.
    Test: {TEST}.
    Note: Huang et al. put T-Fixup beside post-LN; every side tries the same dropouts.
    Note: post-LN, pre-LN and constraints warm up over the first tenth, T-Fixup not; cosine to 0 for
        all; greedy translations.
    """
    study = Study.for_request(request, sizes_of(request))
    models = {name: study.tune_transformer(name) for name in TRANSFORMERS}
    models |= {name: study.tune(name, like=models[CONSTRAINED].runs[0]) for name in CONSTRAINTS}
    transformers = {name: models[name].runs for name in TRANSFORMERS}
    constrained = {name: models[name].runs for name in CONSTRAINTS}
    lengths = double_until_plateau(
        transformers, lambda times: study.lengthen(transformers, times), study.doublings
    )
    settled = at_plateau(lengths)
    if len(lengths) > 1:
        constrained = study.lengthen(constrained, 2 ** (len(lengths) - 1))

    longest = lengths[-1] = {**lengths[-1], **constrained}
    sizes = study.sizes
    rows = []
    texts = []
    for name, tuned in models.items():
        rows += _rows(name, tuned.runs, tuned.trials)
        texts.append(f"{LABELS[name]} ({setting_of(tuned.runs[0])}) {_summary(tuned.runs)}")

    for runs in lengths[1:]:
        rows += [row for name, those in runs.items() for row in _rows(name, those)]
    texts += [*map(about_length, lengths), *about_constraints(longest)]
    texts += [] if settled else ["not yet at a plateau"]
    texts.append(
        f"BLEU on test, {sizes.seeds} seeds, {sizes.steps} steps of {sizes.batch_size} by"
        f" default, width {sizes.width}, {sizes.layers}+{sizes.layers} layers"
    )
    decidable = request.data is not None and settled
    panels = _panels(lengths, models)
    got = "; ".join(texts)
    holds = judge(gains_over_norms(_bleu_by_model(longest))) if decidable else None
    runs = [run for name in TRANSFORMERS for run in longest[name]]
    notes = (
        "the first seed keeps the setting with the least loss on valid: Transformers of"
        " three learning rates, and further ones while the best is the least or the"
        f" greatest, then of the dropouts {', '.join(f'{rate:g}' for rate in DROPOUTS)};"
        f" constraints of the strengths {', '.join(f'{strength:g}' for strength in STRENGTHS)}, at the"
        " rate and dropout of post-LN",
        "the steps of the Transformers are then doubled, with the same settings,"
        f" {study.doublings} times at most, until each gains less than 1 % of its loss on"
        " valid or overfits. The constraints, at their strengths, train for the longest"
        " number of steps",
    )

    return judged(request, rows, panels, got, holds, runs, notes=notes)


def judge(gains: Sequence[float]) -> bool | None:
    """Return whether T-Fixup keeps up with LayerNorm, from BLEU gains over the better one by seed."""
    return within(gains, low=-MARGIN)


def gains_over_norms(bleu: Mapping[str, Sequence[float]]) -> list[float]:
    """Return BLEU of T-Fixup minus that of the better normalised Transformer, by seed."""
    return minus(bleu[JUDGED], max((bleu[name] for name in NORMALISED), key=fmean))


def about_length(runs: Trained) -> str:
    """Return the scores of the three Transformers after these steps, and the judged difference."""
    scores = ", ".join(f"{label} {_summary(runs[name])}" for name, label in TRANSFORMERS.items())
    gains = mean_se(gains_over_norms(_bleu_by_model(runs)))
    return f"after {_steps(runs)} steps {scores}, T-Fixup less the better with LayerNorm {gains}"


def about_constraints(runs: Trained) -> list[str]:
    """Return the score of each constraint and its Holm-corrected test against post-LN."""
    baseline = _by_seed(CONSTRAINED, runs[CONSTRAINED])
    tests = holm_correction(
        [compare_seeds(_by_seed(name, runs[name]), baseline) for name in CONSTRAINTS]
    )
    return [
        f"after {_steps(runs)} steps {LABELS[name]} {_summary(runs[name])}, beside post-LN:"
        f" {test.verdict}"
        for name, test in zip(CONSTRAINTS, tests, strict=True)
    ]


def setting_of(run: FinishedRun) -> str:
    """Return the tried setting of a run: strength, or learning rate and dropout."""
    _, _, strength = run.variant.partition(":")
    if strength:
        return f"strength {float(strength):g}"
    return f"rate {run.rate:g}, dropout {run.config.model.dropout:g}"


@dataclass(frozen=True)
class Study:
    request: Request
    sizes: Sizes
    base: RunConfig
    task: Task

    @classmethod
    def for_request(cls, request: Request, sizes: Sizes) -> Study:
        base = _base(request, sizes)
        return cls(request, sizes, base, build_task(base.task, base.task_options))

    @property
    def doublings(self) -> int:
        return self.sizes.options.get("doublings", 0)

    def tune_transformer(self, name: str) -> Tuned:
        rated = self.tune(name)
        dropped = self.tune(name, like=rated.runs[0], values=DROPOUTS)
        return Tuned([*rated.trials, *dropped.trials], dropped.runs)

    def tune(
        self, name: str, *, like: FinishedRun | None = None, values: Sequence[float] = STRENGTHS
    ) -> Tuned:
        """Try learning rates, or strengths or dropouts for the run ``like``, and keep the best."""
        strengths = like is not None and values is STRENGTHS

        def plan(tried: float, seed: int) -> PlannedRun:
            rate = tried if like is None else like.rate
            dropout = 0.0 if like is None else like.config.model.dropout if strengths else tried
            variant = f"{name}:{tried:g}" if strengths else name
            train = replace(self.base.train, learning_rate=rate, seed=seed)
            return self._plan(variant, train, dropout)

        return tune(
            self._train,
            plan,
            rates_about(USUAL_RATE) if like is None else values,
            1 if like is None else self.sizes.seeds,
            score=lambda run: -run.metric("loss,valid", math.inf),
            widen=like is None,
        )

    def lengthen(self, models: Trained, times: int) -> Trained:
        """Train models for a multiple of the steps; warm-up and cosine are stretched."""
        planned = [self._longer(run, times) for runs in models.values() for run in runs]
        done = iter(self._train(planned))
        return {name: [next(done) for _ in runs] for name, runs in models.items()}

    def _longer(self, run: FinishedRun, times: int) -> PlannedRun:
        steps = times * self.sizes.steps
        train = replace(
            self.base.train,
            steps=steps,
            warmup_steps=steps // 10,
            eval_every=max(1, steps // self.sizes.evaluations),
            learning_rate=run.rate,
            seed=run.seed,
        )
        return self._plan(run.variant, train, run.config.model.dropout)

    def _plan(self, variant: str, train: TrainOptions, dropout: float) -> PlannedRun:
        setting = f"rate {train.learning_rate:g}, dropout {dropout:g}, {train.steps} steps"
        label = f"{variant}, {setting}, seed {train.seed}"
        folder = self.request.runs("frontier-translation") / folder_name(label)
        base = replace(self.base, train=train, model=replace(self.base.model, dropout=dropout))
        return PlannedRun(folder, label, apply_variant(variant, base))

    def _train(self, planned: Sequence[PlannedRun]) -> list[FinishedRun]:
        return train_grid(self.request, planned, task=self.task)


def _base(request: Request, sizes: Sizes) -> RunConfig:
    options = {
        **translation_data(request, pairs=sizes.pairs, words=True),
        "vocab_size": 2000,
        "max_tokens": 300,
        "overflow": "drop",
        "limit_pairs": sizes.limit,
        "generate_beams": 1,
        "generate_max_examples": sizes.options.get("translated"),
    }
    return run_config(
        "translation",
        options,
        sizes,
        model={"activation": "relu"},
        label_smoothing=0.1,
        warmup_steps=sizes.steps // 10,
    )


def _column(runs: Sequence[FinishedRun]) -> list[float]:
    return [run.metric(BLEU, 0.0) for run in runs]


def _by_seed(name: str, runs: Sequence[FinishedRun]) -> SeedResults:
    return seed_results(LABELS[name], runs, BLEU)


def _bleu_by_model(runs: Trained) -> dict[str, list[float]]:
    return {name: _column(those) for name, those in runs.items()}


def _steps(runs: Trained) -> int:
    return runs[JUDGED][0].config.train.steps


def _summary(runs: Sequence[FinishedRun]) -> str:
    return mean_se(_column(runs))


def _rows(name: str, best: Sequence[FinishedRun], trials: Sequence[FinishedRun] = ()) -> list[Row]:
    others = [run for run in trials if run not in best]
    rows: list[Row] = []
    for run in [*best, *others]:
        row = {"model": LABELS[name], "learning_rate": run.rate, "setting": setting_of(run)}
        row |= {"steps": run.config.train.steps, "kept": run in best, "seed": run.seed}
        row["valid_loss"] = run.metric("loss,valid", math.inf)
        row |= {f"{metric}_test": run.metrics.get(f"{metric},test") for metric in ("bleu", "chrf")}
        rows.append({**row, "error": run.failure})
    return rows


def _panels(lengths: Sequence[Trained], models: Mapping[str, Tuned]) -> list[Panel]:
    bleu = []
    longer = []
    for index, (name, label) in enumerate(LABELS.items()):
        rows = [
            {"place": index, "steps": _steps(length), "bleu": value}
            for length in lengths
            for value in _column(length.get(name, ()))
        ]
        last = where(rows, steps=_steps(lengths[-1]))
        bleu.append(mean_series(last, "place", "bleu", label, "dots", index))
        longer.append(mean_series(rows, "steps", "bleu", label, "solid", index))

    names = {tuned.runs[0].folder: LABELS[name] for name, tuned in models.items()}
    first = [tuned.runs[0] for tuned in models.values()]
    losses = curves(first, "valid", lambda run: names[run.folder])
    y = "BLEU on test"
    title = f"after {_steps(lengths[-1])} steps"
    return [
        Panel(title, "model", y, bleu, names=list(LABELS.values()), legend=False),
        Panel("ever longer", "steps", y, longer, x_scale="log"),
        Panel("valid", "step", "nats per token", losses),
    ]
