"""Data, commands and finished folders of toy size, which every family damages, kills or shares."""

from __future__ import annotations

import gzip
import importlib
import json
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.faults.children import fork, wait

STEPS = 12
_TINY = (
    *("--batch-size", "4", "--model.hidden-size", "16", "--model.num-hidden-layers", "1"),
    *("--model.num-attention-heads", "2", "--eval-batches", "2", "--log-every", "4"),
    *("--checkpoint-every", "3", "--keep-checkpoints", "2", "--quiet"),
)
_UNTIMED = (
    "seconds",
    "tokens_per_second",
    "date",
    "train_seconds",
    "peak_memory_bytes",
    "command",
    "git_hash",
    "sha256",
)


class BrokenToyError(Exception):
    """A toy command does not even work undisturbed."""


@dataclass(frozen=True)
class Toys:
    """Where data and finished folders are, below one folder."""

    root: Path

    @property
    def text(self) -> Path:
        """A plain text for language models."""
        return self.root / "data" / "text.txt"

    @property
    def table(self) -> Path:
        """Labelled lines."""
        return self.root / "data" / "train.tsv"

    def train(self, out: Path, *more: str) -> list[str]:
        """Return the words that train a language model with dropout, a penalty and a constraint."""
        words = [
            "train",
            "char_lm",
            "--data",
            str(self.text),
            "--seq-len",
            "16",
            *_TINY,
            "--steps",
            str(STEPS),
        ]
        words += [
            "--eval-every",
            "4",
            "--learning-rate",
            "0.03",
            "--schedule",
            "constant",
            "--model.dropout",
            "0.2",
        ]
        words += [
            "--penalty.attention",
            "1e-3",
            "--penalty.every",
            "2",
            "--constrain.where",
            "*.q_proj",
        ]
        return [*words, "--out", str(out), "--resume", "auto", *more]

    def classify(self, out: Path, *more: str) -> list[str]:
        """Return the words that train a classifier which can be certified."""
        words = [
            "train",
            "text_classification",
            "--data",
            str(self.table),
            "--max-length",
            "6",
            *_TINY,
        ]
        words += [
            "--steps",
            "6",
            "--eval-every",
            "3",
            "--variant",
            "l2_contractive",
            "--model.norm",
            "none",
        ]
        return [*words, "--out", str(out), "--resume", "auto", *more]

    def compare(self, out: Path, *more: str) -> list[str]:
        """Return the words that compare two variants."""
        words = [
            "compare",
            "char_lm",
            "--data",
            str(self.text),
            "--seq-len",
            "16",
            *_TINY,
            "--steps",
            "6",
        ]
        words += [
            "--eval-every",
            "3",
            "--variants",
            "post_ln,rezero",
            "--out",
            str(out),
            "--resume",
            "auto",
        ]
        return [*words, *more]

    def reproduce(self, out: Path) -> list[str]:
        """Return the words that make a figure without training."""
        return ["reproduce", "kim2021/figure-2", "--scale", "toy", "--quiet", "--out", str(out)]


def write_data(root: Path) -> Toys:
    """Write the data of every toy."""
    toys = Toys(root)
    (root / "data").mkdir(parents=True)
    draw = random.Random(5)
    toys.text.write_text(
        " ".join(draw.choices(["north", "wind", "and", "the", "sun", "were", "disputing"], k=600))
    )
    rows = [
        (label, f"a {word} film {draw.choice('xyz')}")
        for label, word in (("pos", "good"), ("neg", "bad"))
    ] * 30
    toys.table.write_text("label\ttext\n" + "".join(f"{label}\t{text}\n" for label, text in rows))
    (root / "data" / "lines.txt").write_text("".join(f"{text}\n" for _, text in rows))
    return toys


def make(words: Sequence[str], log: Path) -> None:
    """Run a command in a child, which must succeed; then import here what it imported, for the
    children to come."""
    imported = log.with_suffix(".imported")

    def work() -> int:
        from wellposed.cli import main

        status = main(words)
        imported.write_text("\n".join(sys.modules))
        return status

    status = wait(fork(work, log), 300)
    if status != 0:
        raise BrokenToyError(
            f"{' '.join(words[:2])}: exit status {status}:"
            f" {log.read_text(errors='replace')[-2000:]}"
        )
    for name in imported.read_text().split("\n"):
        if name not in sys.modules and not name.startswith("__"):
            with suppress(
                Exception
            ):  # some exist only under the name that another module gave them
                importlib.import_module(name)


def make_folders(toys: Toys, names: Sequence[str]) -> None:
    """Make those finished folders of these names below the root that are not there yet."""
    root, log = toys.root, toys.root / "make.log"
    commands: dict[str, list[list[str]]] = {
        "classifier": [
            toys.classify(root / "classifier"),
            ["certify", str(root / "classifier"), "--examples", "3", "--attack-steps", "1"],
        ],
        "compare": [toys.compare(root / "compare")],
        "reproduce": [toys.reproduce(root / "reproduce")],
    }
    for name in names:
        for words in [] if (root / name).exists() else commands[name]:
            make(words, log)


def in_child(work: Callable[[], Any], log: Path) -> Any:
    """Return what ``work`` returns, computed in a child; it must be JSON."""
    answer = log.with_suffix(".answer")

    def write() -> int:
        answer.write_text(json.dumps(work()))
        return 0

    if wait(fork(write, log), 300) != 0:
        raise BrokenToyError(log.read_text(errors="replace")[-2000:])
    return json.loads(answer.read_text())


def copied(folder: Path, to: Path) -> Path:
    """Return a fresh copy of a folder; what was there before goes."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(folder, to, symlinks=True))


def timeless(value: Any) -> Any:
    """Return JSON values without what may differ between two runs of the same thing."""
    if isinstance(value, dict):
        return {name: timeless(each) for name, each in value.items() if name not in _UNTIMED}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def json_of(path: Path) -> Any:
    """Return a JSON file or the rows of a ``.jsonl`` file, without times."""
    data = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [timeless(json.loads(line)) for line in data.splitlines()]
    return timeless(json.loads(data))


def tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def gzipped(path: Path) -> Path:
    """Write a gzip copy beside a file and return it."""
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    return packed
