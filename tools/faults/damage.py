"""Every file that a command reads, damaged in many ways; then every command that reads it.

Right is an error of our own that names the file, or exactly the answer of the undamaged folder.
Where nothing in the folder can tell a changed digit from a true one (no manifest), only a foreign
exception, a hang or a crash is a fault.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.faults import damages
from tools.faults.children import Answer, command, each_in_children
from tools.faults.outcome import Fault, Row, chosen
from tools.faults.toys import Toys, copied, make_folders

LONGEST_MESSAGE = 20_000
Verbs = dict[str, list[str]]


@dataclass(frozen=True)
class Subject:
    """A folder, the files of it that may be damaged, and who reads them."""

    name: str
    folder: Path
    files: tuple[str, ...]
    verbs: Callable[[Path, str], Verbs]
    """From the folder and the damaged file to commands."""
    guarded: bool = True
    """Whether something in the folder tells what its files were."""
    prepare: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True)
class Case:
    """One damaged file."""

    subject: Subject
    file: str
    damage: str
    manifests: bool
    seed: int

    def __str__(self) -> str:
        without = "" if self.manifests else ", no manifests"
        return f"{self.subject.name}/{self.file} {self.damage}{without} (seed {self.seed})"


def run(toys: Toys, count: int, seed: int, only: str = "", jobs: int = 1) -> Iterator[Row]:
    """Damage ``count`` files of all kinds of folder, or ``only`` of some; return a row for each."""
    everything = [subject for subject in subjects(toys) if chosen(subject.name, only)]
    make_folders(toys, [subject.folder.name for subject in everything])
    cases = list(_cases(everything, count, seed))
    rows = {
        subject.name: Row("damage", f"files of {subject.name}", unit="damaged files")
        for subject in everything
    }
    for case in cases:
        rows[case.subject.name].tried += 1
    whole: dict[tuple[str, str], Answer] = {}
    work = partial(_one, cases, toys.root / "damaged", whole)
    for fault in each_in_children(
        len(cases), work, lambda index: str(cases[index]), seconds=60, jobs=jobs
    ):
        rows[fault.case.split("/")[0]].add(fault)
    yield from rows.values()


def subjects(toys: Toys) -> list[Subject]:
    """Return every folder that is damaged."""
    root = toys.root
    final = (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "manifest.json",
    )
    records = (
        "config.toml",
        "env.json",
        "metrics.jsonl",
        "result.json",
        "measure-initial.json",
        "measure-final.json",
        "manifest.json",
    )
    checkpoint = (
        "model.safetensors",
        "optimizer.safetensors",
        "random_states_0.safetensors",
        "trainer_state.json",
        "manifest.json",
        "config.json",
    )
    steps = [f"checkpoint-{step}/{name}" for step in (3, 6) for name in checkpoint]
    runs = [
        f"{variant}/seed-0/{name}"
        for variant in ("post_ln", "rezero")
        for name in ("result.json", "config.toml")
    ]
    return [
        Subject(
            "a finished run",
            root / "classifier",
            (*records, "certified.json", *(f"final/{name}" for name in final)),
            partial(_run_verbs, toys),
        ),
        Subject(
            "an unfinished run",
            root / "classifier",
            ("env.json", "config.toml", "metrics.jsonl", *steps),
            lambda folder, _: {"resume": toys.classify(folder)},
            prepare=_unfinish,
        ),
        Subject(
            "a comparison",
            root / "compare",
            ("compare.json", *runs),
            lambda folder, _: {"report": _report(folder), "compare": toys.compare(folder)},
        ),
        Subject(
            "a reproduction",
            root / "reproduce",
            ("kim2021-figure-2.json", "kim2021-figure-2.csv", "kim2021-figure-2.svg"),
            lambda folder, _: {"report": _report(folder)},
            guarded=False,
        ),
    ]


def _report(folder: Path) -> list[str]:
    return ["report", str(folder), "--out", str(folder.parent / "page.html")]


def _run_verbs(toys: Toys, folder: Path, file: str) -> Verbs:
    verbs: Verbs = {
        "measure": ["measure", str(folder)],
        "certify": ["certify", str(folder), "--examples", "0"],
        "predict": ["predict", str(folder), "--text", "a good film x"],
        "report": _report(folder),
        "resume": toys.classify(folder),
    }
    if file == "config.toml":
        verbs["certify"][-1] = "2"
        return verbs
    if file.startswith("final/"):
        return {name: verbs[name] for name in ("measure", "certify", "predict")}
    return {name: verbs[name] for name in ("report", "resume")}


def _unfinish(folder: Path) -> None:
    for name in ("result.json", "manifest.json", "certified.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "final")


def _cases(everything: list[Subject], count: int, seed: int) -> Iterator[Case]:
    """Yield every file with every damage, in random order and again with other places until there
    are enough."""
    draw = random.Random(seed)
    pairs = [
        (subject, file, damage)
        for subject in everything
        for file in subject.files
        for damage in damages.DAMAGES
    ]
    made = 0
    while True:
        draw.shuffle(pairs)
        for subject, file, damage in pairs:
            if made == count:
                return
            made += 1
            kept = not subject.guarded or "manifest" in file or draw.random() < 0.6
            yield Case(subject, file, damage, kept, draw.randrange(1 << 30))


def _one(
    cases: list[Case], place: Path, whole: dict[tuple[str, str], Answer], index: int
) -> list[Fault]:
    """Damage one file, run the commands that read it, and compare."""
    case = cases[index]
    folder = place / str(os.getpid()) / "it"
    faults = []
    for verb in case.subject.verbs(folder, case.file):
        before = whole.get((case.subject.name, verb + str(case.file == "config.toml")))
        if before is None:
            copied(case.subject.folder, folder)
            case.subject.prepare(folder)
            before = _answer(case.subject.verbs(folder, case.file)[verb], folder)
            whole[case.subject.name, verb + str(case.file == "config.toml")] = before
            if before.foreign or before.status:
                return [
                    Fault(
                        "foreign",
                        str(case),
                        f"{verb} fails undamaged: {before.foreign or before.err}",
                    )
                ]
        copied(case.subject.folder, folder)
        case.subject.prepare(folder)
        if not case.manifests:
            for manifest in folder.rglob("manifest.json"):
                if not manifest.parent.name.startswith("checkpoint-"):
                    manifest.unlink()
        if not damages.apply(case.damage, folder / case.file, random.Random(case.seed)):
            continue
        after = _answer(case.subject.verbs(folder, case.file)[verb], folder)
        kind = _judge(case, before, after)
        if kind:
            said = (
                after.foreign
                or f"exit status {after.status}: {after.err.strip() or after.out.strip()}"
            )
            faults.append(Fault(kind, str(case), f"{verb}: {said}"))
    return faults


def _judge(case: Case, before: Answer, after: Answer) -> str | None:
    if after.foreign or "Traceback" in after.err or after.status not in (0, 1, 2):
        return "foreign"
    if after.status:
        named = Path(case.file).name in after.err or Path(case.file).parent.name in after.err
        other = case.file.endswith("manifest.json") or not case.manifests
        return None if (named or other) and len(after.err) < LONGEST_MESSAGE else "unclear"
    unguarded = not case.manifests or not case.subject.guarded or case.file in _UNGUARDED
    said = Path(case.file).parent.name in after.err or "Not counted" in after.out
    return None if unguarded or said or after.out == before.out else "wrong"


_UNGUARDED = ("compare.json", "certified.json")
"""Files that no manifest describes; those of a run in progress are checked by what comes out."""


def _answer(words: list[str], folder: Path) -> Answer:
    """Run a command; a page or a model that it wrote is part of what it said."""
    page = folder.parent / "page.html"
    page.unlink(missing_ok=True)
    said = command(words)
    out = said.out.replace("\r", "\n")
    if page.exists():
        out += page.read_text(encoding="utf-8", errors="replace")
    if words[0] == "train" and said.status == 0:
        weights = folder / "final" / "model.safetensors"
        out += weights.read_bytes().hex() if weights.is_file() else "no weights"
    if words[0] == "train":
        out = re.sub(r"^\w*bytes.*$", "", out, flags=re.MULTILINE)
    return Answer(said.status, out, said.err, said.foreign)
