"""``wellposed compare TASK``: train variants on the same batches, with errors and a paired test."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from wellposed.errors import ConfigError, require_extras
from wellposed.options import CheckedOptions, Count, Positive, Size
from wellposed_lab.cli import arguments
from wellposed_lab.compare.variants import VARIANTS, check_options, summary
from wellposed_lab.training.loop.processes import is_first, run_until_stopped

VARIANTS_OF_OURS = "post_ln,pre_ln"
FROM_MODEL_VARIANTS = "plain,key:1e-2"


@dataclass(frozen=True)
class CompareArguments(CheckedOptions):
    """Options of the command itself."""

    variants: str | None = None
    """Comma-separated variants, name:value for one with a number; the first is the baseline
    (default: post_ln,pre_ln; with --from plain,key:1e-2)."""
    seeds: Size = 3
    """Seeds per variant, counted from --seed; 1 gives no test."""
    out: Path = Path("runs/compare")
    """Folder of the comparison; run folders are OUT/VARIANT/seed-K."""
    learning_rates: str | None = None
    """Rates that each variant tries with the first seed, such as 1e-3,3e-3,1e-2; it is compared at its
    best on valid. auto (the default, unless --learning-rate is given): three or more about the
    variant's own, on a third of the steps. none: all use --learning-rate."""
    jobs: Size = 1
    """Runs that train at the same time, each in its own process."""
    resume: Literal["never", "auto"] = "never"
    """auto: keep finished runs of --out and continue unfinished ones."""
    worth: Positive | None = None
    """Smallest gain worth it, in units of the metric (default: 1 % of the baseline's mean)."""
    certify: Count = 0
    """Measure certified and attacked accuracy on this many test examples."""
    track: arguments.TrackerNames = ()
    """Also report to a tracker of Accelerate: trackio, tensorboard, wandb, ...; may be repeated."""
    quiet: bool = False
    """Print the table only."""


def run(words: Sequence[str]) -> int:
    """Train all variants, print the table, write the report and return the exit status."""
    task, rest = arguments.split_task("compare", words)
    if task is None:
        print("\nvariants:\n" + "\n".join(f"  {name:<10} {summary(name)}" for name in VARIANTS))
        return 0
    request = arguments.read_request("compare", task, rest, CompareArguments, "Compare variants")
    resumes = [] if request.command.resume == "auto" else ["--resume", "auto"]
    again = shlex.join(["wellposed", "compare", *words, *resumes])
    return run_until_stopped(partial(_compare, request, words), again)


def _compare(request: arguments.Request[CompareArguments], words: Sequence[str]) -> int:
    config = request.config
    base = request.base
    options = request.command
    # Before any training, not at its end.
    require_extras(("compare", "plots"), "tests and the report of wellposed compare")

    from wellposed_lab.compare.compare import compare
    from wellposed_lab.report.aggregate import aggregate
    from wellposed_lab.report.page import build_report

    usual = FROM_MODEL_VARIANTS if config.start.model else VARIANTS_OF_OURS
    listed = usual if options.variants is None else options.variants
    names = [name.strip() for name in listed.split(",") if name.strip()]
    check_options(config, names, asked_of=base)
    is_rate_given = "learning_rate" in request.typed.get("train", {})
    rates = _rates(options.learning_rates, is_rate_given=is_rate_given)
    if is_rate_given and rates and rates != "auto":
        raise ConfigError(
            f"--learning-rate {config.train.learning_rate:g} and --learning-rates {options.learning_rates}"
            " both set the learning rate; give one of them"
        )
    runs = compare(
        config,
        names,
        seeds=options.seeds,
        jobs=options.jobs,
        out=options.out,
        resume=options.resume,
        progress=not options.quiet,
        command=["wellposed", "compare", *words],
        announce=None if options.quiet or not is_first() else partial(print, flush=True),
        certify=options.certify,
        tracking=options.track,
        learning_rates=rates,
    )
    if runs.cancelled:
        raise KeyboardInterrupt
    if not is_first():
        return int(bool(runs.failed))
    comparison = aggregate(runs.folders)
    print(comparison.table())
    for task_compared in comparison.tasks:
        print("\n".join(task_compared.worth(options.worth)))
    page = build_report(runs.folders, options.out / "report.html", worth=options.worth)
    print(f"report: {page}")
    for folder in runs.failed:
        print(f"failed: {folder} (see {folder / 'result.json'})", file=sys.stderr)
    return 1 if runs.failed else 0


def _rates(text: str | None, *, is_rate_given: bool) -> list[float] | Literal["auto"]:
    if text == "auto" or (text is None and not is_rate_given):
        return "auto"
    if text is None or text == "none":
        return []
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--learning-rates {text!r:.80}: expected numbers joined by commas, as in"
            " 1e-3,3e-3,1e-2, or auto, or none"
        ) from None
