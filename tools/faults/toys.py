"""Data, commands and finished folders of toy size, which every family damages, kills or shares."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.faults.harness import run

TINY = shlex.split(
    "--batch-size 4 --model.hidden-size 16 --model.num-hidden-layers 1 --log-every 4 --quiet"
    " --model.num-attention-heads 2 --eval-batches 2 --checkpoint-every 3 --keep-checkpoints 2"
)
LANGUAGE_MODEL = shlex.split(
    "--steps 12 --eval-every 4 --learning-rate 0.03 --schedule constant --model.dropout 0.2"
    " --penalty.attention 1e-3 --penalty.every 2 --constrain.where *.q_proj"
)
CLASSIFIER = shlex.split(
    "--max-length 6 --steps 6 --eval-every 3 --variant l2_contractive --model.norm none"
)
UNTIMED = {
    *("seconds", "tokens_per_second", "date", "train_seconds", "peak_memory_bytes", "command"),
    *("git_hash", "sha256"),
}
SAID_ANEW = (".lock", ".toml", ".html")
"""Files that say when and how a command was started last."""


@dataclass(frozen=True)
class Toys:
    """Where data and finished folders are, below one folder."""

    root: Path

    def train(self, out: Path, *more: str) -> list[str]:
        """Return the words that train a language model with dropout, a penalty and a constraint."""
        data = ["--data", str(self.root / "text.txt"), "--seq-len", "16"]
        return ["train", "char_lm", *data, *TINY, *LANGUAGE_MODEL, *_to(out), *more]

    def classify(self, out: Path, *more: str) -> list[str]:
        """Return the words that train a classifier which can be certified."""
        data = ["--data", str(self.root / "train.tsv")]
        return ["train", "text_classification", *data, *TINY, *CLASSIFIER, *_to(out), *more]

    def compare(self, out: Path) -> list[str]:
        """Return the words that compare two variants."""
        data = ["--data", str(self.root / "text.txt"), "--seq-len", "16", "--steps", "6"]
        more = ["--eval-every", "3", "--variants", "post_ln,rezero", "--seeds", "1"]
        return ["compare", "char_lm", *data, *TINY, *more, *_to(out)]

    def certify(self, folder: Path, examples: int = 3) -> list[str]:
        """Return the words that certify a classifier."""
        return ["certify", str(folder), "--examples", str(examples), "--attack-steps", "1"]

    def predict(self, folder: Path, out: Path) -> list[str]:
        """Return the words that label lines of text."""
        lines = str(self.root / "lines.txt")
        return ["predict", str(folder), "--input", lines, "--output", str(out)]

    def reading(self, folder: Path) -> dict[str, list[str]]:
        """Return the words of every command that reads the folder of a classifier."""
        return {
            "measure": ["measure", str(folder)],
            "certify": self.certify(folder, 0),
            "predict": ["predict", str(folder), "--text", "a good film x"],
            "report": ["report", str(folder), "--out", str(folder.parent / "page.html")],
            "resume": self.classify(folder),
        }

    def finished(self, name: str) -> Path:
        """Return a finished folder, made on first use."""
        folder = self.root / name
        if not folder.exists():
            self.make(self.classify(folder) if name == "classifier" else self.compare(folder))
            if name == "classifier":
                self.make(self.certify(folder))
        return folder

    def make(self, words: list[str]) -> None:
        """Run a command that must succeed."""
        answer = run(words, self.root / "make.log", 300)
        if answer.status != 0:
            raise RuntimeError(f"{' '.join(words[:2])}: {answer.status}: {answer.output[-2000:]}")


def _to(out: Path) -> list[str]:
    return ["--out", str(out), "--resume", "auto"]


def write_data(root: Path) -> Toys:
    """Write the data of every toy."""
    draw = random.Random(5)
    words = draw.choices(["north", "wind", "and", "the", "sun", "were", "disputing"], k=600)
    (root / "text.txt").write_text(" ".join(words))
    rows = labelled_rows()
    (root / "train.tsv").write_text("label\ttext\n" + "".join(f"{a}\t{b}\n" for a, b in rows))
    (root / "lines.txt").write_text("".join(f"{text}\n" for _, text in rows))
    return Toys(root)


def labelled_rows() -> list[tuple[str, str]]:
    """Return sixty labelled texts."""
    kinds = (("pos", "good"), ("neg", "bad"))
    return [(label, f"a {word} film {n % 3}") for n in range(30) for label, word in kinds]


def copied(folder: Path, to: Path) -> Path:
    """Return a fresh copy of a folder; what was there before goes."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(folder, to, symlinks=True))


def timeless(value: Any) -> Any:
    """Return JSON values without what may differ between two runs of the same thing."""
    if isinstance(value, dict):
        return {name: timeless(item) for name, item in value.items() if name not in UNTIMED}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def leaves(out: Path) -> dict[str, Any]:
    """Return every file with a good name, without times; JSON that is not whole raises.

    Of the checkpoints of a run that is the last: one asked to stop has saved another on its way.
    """
    contents: dict[str, Any] = {}
    steps = sorted(out.rglob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    old = {*steps} - {*{path.parent: path for path in steps}.values()}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name, skipped = path.relative_to(out), (*SAID_ANEW, "env.json")
        if path.name.startswith(".tmp-") or path.name.endswith(skipped) or old & {*path.parents}:
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            value = timeless(json.loads(data))
            contents[str(name)] = sorted(value["files"]) if path.name == "manifest.json" else value
        elif path.suffix == ".jsonl":
            contents[str(name)] = [timeless(json.loads(line)) for line in data.splitlines()]
        else:
            contents[str(name)] = data
    return contents
