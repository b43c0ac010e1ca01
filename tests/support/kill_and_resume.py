"""Run by test_kill.py: train, kill -9 at random moments and at the last renames, resume; print how
the files compare.

Each run is a process of its own, forked from this one once the imports are done; this one never
trains.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import accelerate  # noqa: F401  (imported before the forks, to save time)
import torch

import wellposed.measurement
import wellposed.models
import wellposed.penalize  # noqa: F401
from wellposed.tasks import build_task
from wellposed.training import (
    ConstrainOptions,
    ModelOptions,
    PenaltyOptions,
    RunConfig,
    TrainOptions,
    read_metrics,
    train,
)

Run = Callable[[Path], None]
Outcome = dict[str, object]
STEPS = 40
FILES = (
    f"checkpoint-{STEPS}/model.safetensors",
    f"checkpoint-{STEPS}/optimizer.safetensors",
    f"checkpoint-{STEPS}/random_states_0.safetensors",
    "final/model.safetensors",
)


def configuration(folder: Path) -> RunConfig:
    words = random.Random(5).choices(["north", "wind", "and", "the", "sun", "disputing"], k=1500)
    (folder / "text.txt").write_text(" ".join(words))
    return RunConfig(
        "char_lm",
        {"data": str(folder / "text.txt"), "seq_len": 16},
        model=ModelOptions(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, dropout=0.2),
        penalty=PenaltyOptions(affinity=1e-3, attention=1e-3, estimator="probes", every=2),
        constrain=ConstrainOptions("*.q_proj"),
        train=TrainOptions(
            steps=STEPS, batch_size=4, gradient_accumulation=2, learning_rate=0.03, schedule="constant", eval_every=5,
            eval_batches=2, checkpoint_every=3, log_every=4, keep_checkpoints=2,
        ),
    )  # fmt: skip


def forked(work: Callable[[], None]) -> int:
    """Start ``work`` in a process of its own and return its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at_rename(work: Callable[[], None], number: int, *, after: bool) -> None:
    """Run ``work`` and die just before or after the rename with this number, counted from 0."""
    rename, count = Path.replace, itertools.count()

    def replace(path: Path, target: Path) -> Path:
        here = next(count) == number
        if here and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        renamed = rename(path, target)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed

    Path.replace = replace  # type: ignore[method-assign]
    work()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    config = configuration(folder)
    task = build_task(config.task, config.task_options)

    def run(out: Path) -> None:
        train(config, out, resume="auto", progress=False, task=task, command=[])

    began = time.monotonic()
    assert exit_code(forked(lambda: run(folder / "straight"))) == 0
    whole = time.monotonic() - began
    outcomes = [*at_random_moments(run, folder, whole), *at_the_last_renames(run, folder)]
    print(json.dumps(outcomes))


def at_random_moments(run: Run, folder: Path, whole: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < 3:
        out = folder / f"killed-{len(outcomes)}"
        kills = []
        # Two kills in each run, at random moments of the first nine tenths; what is too late ends
        # as a finished run.
        for _ in range(2):
            child = forked(lambda out=out: run(out))
            time.sleep(random.uniform(0.1, 0.9) * whole)
            os.kill(child, signal.SIGKILL)
            kills.append(exit_code(child))
        again = exit_code(forked(lambda out=out: run(out)))
        outcomes.append({"kills": kills, "resumed": again, **compare(folder / "straight", out)})
    return outcomes


def at_the_last_renames(run: Run, folder: Path) -> list[Outcome]:
    """Kill a run that ends, before and after each rename; every start has the last ones alone to
    do."""
    outcomes: list[Outcome] = []
    begun = folder / "begun"
    assert exit_code(forked(lambda: run(begun))) == 0
    for name in ("result.json", "manifest.json"):
        (begun / name).unlink()
    for moment in itertools.count():
        number, after = divmod(moment, 2)
        out = folder / f"rename-{number}-{'after' if after else 'before'}"
        shutil.copytree(begun, out)
        killed = exit_code(
            forked(partial(killed_at_rename, partial(run, out), number, after=bool(after)))
        )
        if killed == 0:
            return outcomes
        again = exit_code(forked(lambda out=out: run(out)))
        outcomes.append({"kills": [killed], "resumed": again, **compare(folder / "straight", out)})
    raise AssertionError("unreachable")


def compare(straight: Path, out: Path) -> dict[str, object]:
    rows = [[dict(row) for row in read_metrics(each)] for each in (straight, out)]
    for row in itertools.chain(*rows):
        for timed in ("seconds", "tokens_per_second"):
            row.pop(timed, None)
    starts = json.loads((out / "env.json").read_text())["starts"]
    different = [
        name for name in FILES if (straight / name).read_bytes() != (out / name).read_bytes()
    ]
    return {
        "different": different,
        "same_rows": rows[0] == rows[1],
        "litter": [path.name for path in out.iterdir() if path.name.startswith(".")],
        "recorded": (out / "manifest.json").is_file(),
        "starts": [start["from_step"] for start in starts],
    }


if __name__ == "__main__":
    main()
