"""Compare well-posed Transformers with plain ones in a few minutes, on text that ships with Python.

1. 24 layers, no warm-up: post-LN does not learn; T-Fixup and ReZero do, without any LayerNorm.
2. Is a sentence about code or about networks? Replaced words change the answer of a plain
   classifier. A Lipschitz classifier certifies how many replaced words cannot change its answer.

You can type each step yourself: ``OUT/log.txt`` has the commands and their output.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn

DEPTH = ("post_ln", "pre_ln", "rezero", "t_fixup")
SEEDS = 3
DEEP = (
    f"compare char_lm --variants {','.join(DEPTH)} --seeds {SEEDS} --jobs 2 --steps 100"
    " --batch-size 8 --seq-len 32 --limit-chars 100000 --learning-rate 2e-3 --eval-every 50"
    " --eval-batches 10 --checkpoint-every 100 --log-every 10 --model.num-hidden-layers 24"
    " --model.hidden-size 64 --resume auto"
)
WRITE = "--text 'The value of ' --max-new-tokens 44 --temperature 0.5"
SENTENCES = (
    "train text_classification --data builtin --steps 300 --eval-every 100 --checkpoint-every 300"
    " --model.hidden-size 64 --model.intermediate-size 128 --resume auto --quiet"
)
CLASSIFIERS = {
    "plain": "--variant pre_ln --learning-rate 1e-3",
    "ours": "--variant lipschitz --learning-rate 0.03 --margin-loss words:2",
}
TEXT = "send the message to the mail server and wait for the reply"
LAST_LINES = 10
CERTIFIED, ATTACKED = 2, 3


class Commands:
    """Runs commands with one progress bar, those of one call side by side; output goes to a file."""

    def __init__(self, out: Path, steps: int) -> None:
        self.out, self.steps, self.began = out, steps, time.perf_counter()
        out.mkdir(parents=True, exist_ok=True)
        self.log = out / "log.txt"
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), transient=True)
        self.task = self.bar.add_task("", total=steps)

    def run(self, label: str, *commands: str, steps: int = 1) -> list[str]:
        """Run commands side by side, which are so many ``steps`` of the bar; return their outputs.

        Raises:
            SystemExit: a command failed; the message has the last lines of its output.
        """
        before = self.bar.tasks[0].completed
        files = [self.out / f"printed-{number}.txt" for number in range(len(commands))]
        running = [_start(words, file) for words, file in zip(commands, files, strict=True)]
        while any(process.poll() is None for process in running):
            trained = len(list(self.out.glob("deep/*/seed-*/result.json")))
            self._show(label, max(before, min(before + steps, trained)))
            time.sleep(0.5)
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        for file in files:
            file.unlink()
        with self.log.open("a", encoding="utf-8") as log:
            log.writelines(
                f"$ wellposed {words}\n{text}\n"
                for words, text in zip(commands, texts, strict=True)
            )
        for words, text, process in zip(commands, texts, running, strict=True):
            if process.returncode:
                self.bar.stop()
                tail = "\n".join(text.splitlines()[-LAST_LINES:])
                raise SystemExit(f"{tail}\nfailed: wellposed {words}\nall of it: {self.log}")
        self._show(label, before + steps)
        return texts

    def _show(self, label: str, completed: float) -> None:
        spent = time.perf_counter() - self.began
        left = f", {spent * (self.steps / completed - 1):.0f} s left" if completed else ""
        number = min(int(completed) + 1, self.steps)
        description = f"{number} of {self.steps}{left}: {label}"
        self.bar.update(self.task, completed=completed, description=description)


def _start(words: str, printed: Path) -> subprocess.Popen[bytes]:
    with printed.open("w") as file:
        command = [sys.executable, "-m", "wellposed", *shlex.split(words)]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def measured(out: Path, variant: str) -> str:
    """Return mean and standard error of the nats per character of test."""
    files = (out / "deep" / variant).glob("seed-*/result.json")
    results = [json.loads(file.read_text())["results"]["char_lm"] for file in files]
    values = [result["nats_per_char,test"] for result in results]
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


def shares(printed: str, column: int) -> str:
    """Return a column of the table that ``certify --words`` printed."""
    lines = (line.split() for line in printed.splitlines())
    rows = [row for row in lines if row[:1] in (["none"], ["words"]) and row[1].isdigit()]
    return " ".join(f"{float(row[column]):6.2f}" for row in rows)


def line(printed: str, start: str) -> str:
    """Return the last line with this start."""
    return [text for text in printed.splitlines() if text.startswith(start)][-1]


def main() -> int:
    """Run the commands and print their results in a few lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder of the runs and the report"
    )
    out = parser.parse_args().out
    # Models this small gain nothing from a second thread; two runs train at the same time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs = len(DEPTH) * SEEDS
    commands = Commands(out, steps=runs + 4)
    print(
        "Four kinds of Transformer, 24 layers deep, learn English; then two classifiers of sentences"
        " are attacked\nby replaced words. Two to five minutes on two cores; nothing is downloaded."
    )
    with commands.bar:
        commands.run("24 layers, 4 kinds, 3 seeds", f"{DEEP} --out {out / 'deep'}", steps=runs)
        predictions = [f"predict {out / 'deep' / kind / 'seed-0'} {WRITE}" for kind in DEPTH]
        written = dict(zip(DEPTH, commands.run("writing", *predictions), strict=True))
        trainings = [
            f"{SENTENCES} {words} --out {out / name}" for name, words in CLASSIFIERS.items()
        ]
        commands.run("two classifiers", *trainings)
        ask = f"--words 1,2,3 --examples 100 --text '{TEXT}'"
        attacks = [f"certify {out / name} {ask}" for name in CLASSIFIERS]
        certified = dict(
            zip(CLASSIFIERS, commands.run("words are replaced", *attacks), strict=True)
        )
        folders = " ".join(str(out / name) for name in ("deep", *CLASSIFIERS))
        commands.run("the report", f"report {folders} --out {out / 'report.html'}")
    print("\n24 layers, no warm-up: nats per character (lower is better), and what each writes")
    for kind in DEPTH:
        print(f"  {kind:8} {measured(out, kind)}  {written[kind].strip()!r}")
    print("\nIs it about code or networks? Share of 100 sentences still right if k words change")
    print("  k                 0      1      2      3")
    print(f"  plain, attacked {shares(certified['plain'], ATTACKED)}")
    print(f"  ours, attacked  {shares(certified['ours'], ATTACKED)}")
    print(f"  ours, certified {shares(certified['ours'], CERTIFIED)}  by proof, for any words")
    print(f"\n{TEXT!r}")
    for name, text in certified.items():
        print(f"  {name:5}  {line(text, 'answer: ')}\n         {line(text, 'no ')}")
    print(
        f"\ndone in {time.perf_counter() - commands.began:.0f} s; every command: {commands.log}\n"
        f"Open {out / 'report.html'} in a browser; for your own texts and labels, try"
        " `wellposed compare text_classification --data mine.csv`"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
