"""Zhang et al. (2021), Tables 1 to 4: the variants at three strengths beside the Transformer, paper beside ours."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.charts import Panel, Series
from wellposed.errors import ConfigError, listed
from wellposed.recipes.compare import compare
from wellposed.recipes.corpora import CHARACTERS, SUBWORD, WMT16, Corpus
from wellposed.recipes.huang2020.pairs import NOTE, translation_data, walk
from wellposed.recipes.recipe import Reproduction, Request
from wellposed.recipes.zhang2021.printed import (
    LABELS,
    OC1,
    OC2,
    OC3,
    STRENGTHS,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    TRANSFORMER,
    Column,
)
from wellposed.report.statistics import Failure, SeedResults, compare_seeds, holm_correction, mean_and_standard_error
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

MINI_NOTE = "tiny models on one corpus where the paper has large ones on each; a difference here says little of theirs"
NORM_NOTE = "post-LN; Tensor2Tensor's later settings, which the paper may have used, put LayerNorm before the sublayer"


@dataclass(frozen=True)
class Study:
    """One corpus with its variants."""

    label: str
    base: RunConfig
    paper: Mapping[str, Column]
    """What the paper prints, by metric and variant; empty where no column is of this corpus."""
    metrics: tuple[str, ...] = ("bleu",)
    """Metrics of the test split, the first one decides."""


@dataclass(frozen=True)
class Row:
    """One finished run."""

    study: str
    variant: str
    strength: float | None
    seed: int
    perplexity: float
    """On valid, which chooses the strength."""
    scores: Mapping[str, float]
    """On test."""


def table_1(request: Request) -> Reproduction:
    """BLEU of the three variants on subword corpora."""
    paper = {corpus.pair: {"bleu": TABLE_1[corpus.pair]} for corpus in SUBWORD}
    studies = _of_corpora(request, SUBWORD, paper) if request.scale == "paper" else [_tiny(request, "subwords")]
    return _reproduce(request, "table-1", studies, (OC1, OC2, OC3), paper)


def table_2(request: Request) -> Reproduction:
    """BLEU of VAR-III in the base and the big setting."""
    paper = {corpus.pair: {"bleu": TABLE_2[corpus.pair]} for corpus in WMT16}
    if request.scale == "paper":
        studies = _of_corpora(request, WMT16, paper)
    else:
        studies = [_tiny(request, "base"), _tiny(request, "big", width=64)]
    return _reproduce(request, "table-2", studies, (OC3,), paper)


def table_3(request: Request) -> Reproduction:
    """BLEU of VAR-III on characters."""
    paper = {corpus.pair: {"bleu": TABLE_3[corpus.pair]} for corpus in CHARACTERS}
    if request.scale == "paper":
        studies = _of_corpora(request, CHARACTERS, paper)
    else:
        studies = [_tiny(request, "characters", tokenizer="char")]
    return _reproduce(request, "table-3", studies, (OC3,), paper)


def table_4(request: Request) -> Reproduction:
    """The measures of dialogue of the three variants."""
    if request.scale != "paper":
        return _reproduce(request, "table-4", [_tiny_dialogue(request)], (OC1, OC2, OC3), TABLE_4)
    if request.data is None:
        raise ConfigError(
            "zhang2021/table-4 at paper scale needs --data FOLDER with the folders personachat and dailydialog, each "
            "in its released format"
        )
    size = replace(SUBWORD[0], steps=20_000)
    studies = []
    for label, columns in TABLE_4.items():
        base = size.run_config()
        options = {"data": str(Path(request.data) / label.lower()), "vocab_size": 32768, "tokens_per_batch": 4096}
        studies.append(Study(label, replace(base, task="dialogue", task_options=options), columns, _dialogue_metrics()))
    return _reproduce(request, "table-4", studies, (OC1, OC2, OC3), TABLE_4)


def _of_corpora(request: Request, corpora: Sequence[Corpus], paper: Mapping[str, Any]) -> list[Study]:
    """Return the paper's runs; a corpus without an ``hf:`` id is the folder of its name in the request's data."""
    missing, studies = [], []
    for corpus in corpora:
        config = corpus.run_config()
        if corpus.data is None:
            folder = Path(request.data or ".") / corpus.name
            if request.data is None or not folder.is_dir():
                missing.append(f"{corpus.name}: train, valid, test .{corpus.src} and .{corpus.tgt} ({corpus.origin})")
            config = replace(config, task_options={**config.task_options, "data": str(folder)})
        studies.append(Study(corpus.pair, config, paper[corpus.pair]))
    if missing:
        raise ConfigError("give --data FOLDER with these folders of aligned files in it:\n" + listed(missing))
    return studies


def _tiny(request: Request, label: str, *, width: int = 32, tokenizer: str = "bpe") -> Study:
    options = {
        **translation_data(request, words=True, pairs=request.pick(toy=60, mini=3000, paper=0)),
        "tokenizer": tokenizer,
        "max_tokens": 300,
        "overflow": "drop",
        "limit_pairs": 6000,
        "generate_beams": 1,
        "generate_max_examples": request.pick(toy=4, mini=200, paper=0),
        **({"vocab_size": 2000} if tokenizer == "bpe" else {}),
    }
    return Study(label, RunConfig("translation", options, model=_model(width), train=_train(request)), {})


def _tiny_dialogue(request: Request) -> Study:
    data = request.data or str(_generate_dialogues(request.out / "dialogues", request.pick(toy=40, mini=1000, paper=0)))
    options = {
        "data": data,
        "vocab_size": 2000,
        "max_tokens": 96,
        "limit_dialogues": 1000,
        "generate_beams": 1,
        "generate_max_examples": request.pick(toy=4, mini=200, paper=0),
    }
    base = RunConfig("dialogue", options, model=_model(32), train=_train(request))
    return Study("dialogue", base, {}, _dialogue_metrics())


def _dialogue_metrics() -> tuple[str, ...]:
    from wellposed.tasks import DIALOGUE_METRICS

    return DIALOGUE_METRICS


def _generate_dialogues(folder: Path, dialogues: int) -> Path:
    """Write dialogues in which each speaker says what the other said backwards, in the format of DailyDialog."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        rng = random.Random(f"{split}/{dialogues}")
        lines = []
        for _ in range(dialogues if split == "train" else max(8, dialogues // 10)):
            said = " ".join(walk(rng))
            turns = [said if turn % 2 == 0 else said[::-1] for turn in range(rng.randint(2, 4))]
            lines.append("".join(f"{turn} __eou__ " for turn in turns))
        (folder / f"dialogues_{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _model(width: int) -> ModelOptions:
    return ModelOptions(hidden_size=width, num_hidden_layers=1, intermediate_size=2 * width, activation="relu")


def _train(request: Request) -> TrainOptions:
    steps = request.pick(toy=3, mini=200, paper=0)
    return TrainOptions(
        steps=steps, batch_size=request.pick(toy=4, mini=32, paper=0), learning_rate=3e-3, warmup_steps=steps // 10,
        eval_every=steps, checkpoint_every=steps, log_every=max(1, steps // 10), label_smoothing=0.1,
    )  # fmt: skip


def _reproduce(
    request: Request, item: str, studies: Sequence[Study], variants: Sequence[str], paper: Mapping[str, Any]
) -> Reproduction:
    strengths = STRENGTHS if request.scale != "toy" else STRENGTHS[:1]
    seeds = 3 if request.scale == "mini" else 1
    names = [TRANSFORMER, *(f"{variant}:{strength:g}" for variant in variants for strength in strengths)]
    rows: list[Row] = []
    for study in studies:
        rows += _run(request, item, study, names, seeds)
    metric = studies[0].metrics[0]
    found = [_compare(study, [row for row in rows if row.study == study.label], variants) for study in studies]
    verdicts = {verdict for _, verdict in found}
    printed = "; ".join(
        f"{label} {column} " + ", ".join(f"{LABELS[variant]} {value:g}" for variant, value in values.items())
        for label, columns in paper.items()
        for column, values in list(columns.items())[:1]
    )
    notes = (f"paper, {metric}: {printed}", NORM_NOTE, *((MINI_NOTE,) if request.scale != "paper" else ()))
    notes += (NOTE,) if request.data is None and request.scale != "paper" else ()
    return Reproduction(
        [_flat(row, studies) for row in rows],
        [_panel(study, rows) for study in studies],
        got="; ".join(text for text, _ in found),
        holds=None if request.scale == "toy" or None in verdicts else verdicts == {True},
        notes=notes,
    )


def _run(request: Request, item: str, study: Study, names: Sequence[str], seeds: int) -> list[Row]:
    folder = request.out / "runs" / f"zhang2021-{item}-{request.scale}" / study.label.replace(" ", "-")
    finished = compare(
        study.base, names, seeds=seeds, out=folder, resume="auto", progress=False, announce=request.announce
    )
    if finished.cancelled:
        raise KeyboardInterrupt
    rows = []
    for result in finished.results:
        values = result.result.get("results", {}).get(study.base.task, {})
        name, _, strength = str(result.result["variant"]).partition(":")
        failed = result.status == "failed"
        rows.append(
            Row(
                study.label,
                name,
                float(strength) if strength else None,
                int(result.result["seed"]),
                float("inf") if failed else float(values["perplexity,valid"]),
                {metric: float(values[f"{metric},test"]) for metric in study.metrics if f"{metric},test" in values},
            )
        )
    return rows


def _tuned(rows: Sequence[Row], variant: str) -> list[Row]:
    """Return the runs of the strength with the least mean perplexity on valid, as the paper tunes it there."""
    mine = [row for row in rows if row.variant == variant]
    strengths = dict.fromkeys(row.strength for row in mine)
    best = min(strengths, key=lambda strength: sum(row.perplexity for row in mine if row.strength == strength))
    return [row for row in mine if row.strength == best]


def _compare(study: Study, rows: Sequence[Row], variants: Sequence[str]) -> tuple[str, bool | None]:
    """Return what was found in words and whether some variant is better; None where the seeds cannot tell."""
    plain = _by_seed(study, _tuned(rows, TRANSFORMER))
    texts = [f"{study.label}, {study.metrics[0]}: Transformer {_mean(plain)}"]
    tests = []
    for variant in variants:
        chosen = _tuned(rows, variant)
        mine = _by_seed(study, chosen)
        texts.append(f"{LABELS[variant]} ({chosen[0].strength:g}) {_mean(mine)}")
        tests.append(compare_seeds(mine, plain, higher_is_better=True))
    tests = holm_correction(tests)
    unsaid = [f"{LABELS[name]}: {test.verdict}" for name, test in zip(variants, tests, strict=True) if test.obstacle]
    if unsaid:
        return ", ".join([*texts, *unsaid]), None
    gains = [test.mean_difference or 0.0 for test in tests]
    if len(plain.values) < 2:
        return ", ".join(texts), all(gain > 0 for gain in gains)
    different = [gain for gain, test in zip(gains, tests, strict=True) if test.significant]
    if not different:
        return ", ".join([*texts, "differences within the noise of the seeds"]), None
    return ", ".join(texts), any(gain > 0 for gain in different)


def _by_seed(study: Study, rows: Sequence[Row]) -> SeedResults:
    metric = study.metrics[0]
    return SeedResults(
        LABELS[rows[0].variant],
        {row.seed: row.scores[metric] for row in rows if metric in row.scores},
        {row.seed: Failure("failed", f"no {metric}") for row in rows if metric not in row.scores},
    )


def _mean(results: SeedResults) -> str:
    if not results.values:
        return "failed"
    mean, error = mean_and_standard_error(list(results.values.values()))
    return f"{mean:.2f}" if error is None else f"{mean:.2f} +- {error:.2f}"


def _flat(row: Row, studies: Sequence[Study]) -> dict[str, Any]:
    study = next(study for study in studies if study.label == row.study)
    flat: dict[str, Any] = {
        "corpus": row.study, "variant": LABELS[row.variant], "strength": row.strength, "seed": row.seed,
        "valid_perplexity": row.perplexity,
    }  # fmt: skip
    for metric in study.metrics:
        flat[f"{metric}_ours"] = row.scores.get(metric)
        column = "skip_thought" if metric == "sentence_cosine" else metric
        flat[f"{metric}_paper"] = study.paper.get(column, {}).get(row.variant)
    return flat


def _panel(study: Study, rows: Sequence[Row]) -> Panel:
    mine = [row for row in rows if row.study == study.label]
    metric = study.metrics[0]
    series = []
    for variant in dict.fromkeys(row.variant for row in mine):
        points = [(row.strength, row.scores.get(metric)) for row in mine if row.variant == variant]
        known = [(x or STRENGTHS[-1] / 10, y) for x, y in points if y is not None]
        series.append(Series(LABELS[variant], [x for x, _ in known], [y for _, y in known], "dots"))
    return Panel(study.label, "strength (Transformer: leftmost)", f"{metric} on test", series, x_scale="log")
