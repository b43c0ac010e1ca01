"""``wellposed train TASK``: train one model into a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wellposed_lab.cli import arguments
from wellposed_lab.cli.parser import TypedValues
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.loop.processes import is_first, is_one_of_several

SCALED = ("learning_rate", "gamma")
"""Rates that variants multiply. Typed ones are not multiplied: they are those of the run."""


@dataclass(frozen=True)
class TrainArguments:
    """Options of the command itself."""

    out: Path | None = None
    """Run folder to create (default: runs/TASK, runs/TASK-2, ...; with --resume the last existing one)."""
    variant: str | None = None
    """Variant to train; see `wellposed compare --help`. Options on the command line override the variant's."""
    resume: str = "never"
    """never | auto (newest complete checkpoint of --out). With more --steps, train longer."""
    track: arguments.TrackerNames = ()
    """Also report to this tracker of Accelerate: trackio, tensorboard, wandb, mlflow, ...; may be repeated."""
    quiet: bool = False
    """Print the result only."""


def run(words: Sequence[str]) -> int:
    """Train, print the result and return the exit status."""
    task, rest = arguments.split_task("train", words)
    if task is None:
        return 0
    request = arguments.read_request(
        "train", task, rest, TrainArguments, "Train one model", changed=with_variant
    )
    options = request.command

    from wellposed_lab.training.folder.run_folder import usual_folder
    from wellposed_lab.training.loop.train import train

    out = options.out or usual_folder(
        task, last=options.resume != "never", first=is_one_of_several()
    )
    result = train(
        request.config,
        out,
        resume=options.resume,
        progress=not options.quiet,
        command=["wellposed", "train", *words],
        longer=True,
        tracking=options.track,
    )
    if not is_first():
        return result.exit_code
    for metric, value in sorted(result.result.get("results", {}).get(task, {}).items()):
        print(f"{metric:<28} {value:.6g}")
    for metric, value in sorted(result.result.get("train_reference", {}).items()):
        print(f"{f'reference {metric}':<28} {value:.6g} (best constant answer on train)")
    print(f"{result.status}: {out}", flush=True)
    return result.exit_code


def with_variant(base: RunConfig, typed: TypedValues) -> RunConfig:
    """Return ``base`` as the variant of ``--variant`` has it, which sees the typed options."""
    variant = typed.get("command", {}).get("variant")
    if not variant:
        return base

    from wellposed_lab.compare.variants import apply_variant

    train = {name: value for name, value in typed.get("train", {}).items() if name not in SCALED}
    return apply_variant(variant, arguments.with_typed(base, {**typed, "train": train}))
