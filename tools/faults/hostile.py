"""Folders and files made to do harm: special files, links, code, pickles, bombs, odd names.

Right is an error of our own in seconds and within the memory given, or the answer of a harmless
folder; no code of a folder runs, and no file outside it is touched.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools.faults.harness import Row
from tools.faults.toys import Toys, copied

BOMB_BYTES = 4 << 30
ODD_NAMES = ("a\nb", "a\x1b[31mb", "\udcff\udcfe", "a" * 255, "-rf", "='x", "$(x)", "\u202egpj")
FILES = (
    *("config.toml", "result.json", "metrics.jsonl", "env.json", "manifest.json", "run.lock"),
    *("certified.json", "measure-final.json", "final/config.json", "final/model.safetensors"),
    *("final/tokenizer.json", "final/tokenizer_config.json", "final", "checkpoint-6"),
)
SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to("nowhere/at-all"),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file of the user": lambda path: path.symlink_to(_treasure(path)),
}
VERBS = ("measure", "certify", "predict", "report", "resume")
Harm = Callable[[Path], object]


class _Runs:
    """Pickled so that reading it would write a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (open, (self.path, "w"))


def hostile(toys: Toys, count: int, seed: int) -> Iterator[Row]:
    """Meet the cases with the commands that read them, at most ``count`` pairs a group."""
    draw = random.Random(seed)

    def some(pairs: Iterable[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
        choices = list(pairs)
        return draw.sample(choices, min(count, len(choices)))

    special = {
        f"{name} is {kind}": partial(_in_place_of, name, make)
        for name in FILES
        for kind, make in SPECIAL.items()
    }
    groups: dict[str, dict[str, Harm]] = {
        "special files and links": {**special, "a circle of links": _circle},
        "an index of weights that lie elsewhere": _elsewhere(),
        "code and pickles": _code(),
        "sizes beyond any memory": _sizes(),
    }
    for title, cases in groups.items():
        row = Row(title)
        for name, harm, verb in some((*case, verb) for case in cases.items() for verb in VERBS):
            folder = _harmed(toys, harm)
            _meet(row, folder, toys.reading(folder)[verb], f"{name}: {verb}", toys)
        yield row
    row = Row("odd names and places to write to")
    for name, verb, _ in some((name, verb, None) for name in ODD_NAMES for verb in VERBS):
        folder = _harmed(toys, lambda _: None).rename(toys.root / "hostile" / name)
        _meet(row, folder, toys.reading(folder)[verb], f"{name[:20]!r}: {verb}", toys)
    for name, words in _places(toys).items():
        folder = _harmed(toys, lambda folder: os.mkfifo(folder / "pipe"))
        _meet(row, folder, words(folder), name, toys)
    yield row
    row = Row("packed data that grows without end")
    for task, head, piece in (
        ("text_classification", b"label\ttext\n" + b"pos\ta\nneg\tb\n" * 99, b"pos\t" + b"a" * 999),
        ("char_lm", b"", b"the north wind "),
    ):
        folder = _harmed(toys, lambda folder, h=head, p=piece: _bomb(folder / "train.tsv.gz", h, p))
        words = ["train", task, "--data", str(folder / "train.tsv.gz"), "--steps", "1"]
        _meet(row, folder, [*words, "--out", str(folder / "new")], f"{task} in gzip", toys)
    yield row
    shutil.rmtree(toys.root / "hostile", ignore_errors=True)


def _harmed(toys: Toys, harm: Harm) -> Path:
    """Return a copy of a run without manifests, which ``harm`` has changed."""
    shutil.rmtree(toys.root / "hostile", ignore_errors=True)
    folder = copied(toys.finished("classifier"), toys.root / "hostile" / "run")
    for manifest in folder.rglob("manifest.json"):
        if manifest.parent.name in ("run", "final"):
            manifest.unlink()
    _treasure(folder / "x").write_text("dear to the user")
    harm(folder)
    return folder


def _treasure(path: Path) -> Path:
    """Return a file of the user that lies outside the run folder."""
    return next(p for p in path.parents if p.name == "hostile") / "treasure.txt"


def _meet(row: Row, folder: Path, words: list[str], case: str, toys: Toys) -> None:
    row.meet(words, case, toys.root / "hostile.log")
    if any(folder.parent.rglob("it-ran")):
        row.add("wrong", case, "code of the folder ran")
    if _treasure(folder / "x").read_text() != "dear to the user":
        row.add("lost", case, "a file outside the folder was changed")


def _in_place_of(name: str, make: Harm, folder: Path) -> None:
    path = folder / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    make(path)


def _circle(folder: Path) -> None:
    (folder / "up").symlink_to(folder)
    (folder / "final" / "again").symlink_to(folder / "final")


def _edit(folder: Path, file: str, **values: object) -> None:
    path = folder / "final" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _elsewhere() -> dict[str, Harm]:
    def index(folder: Path, target: str, make: Harm | None = None) -> None:
        final = folder / "final"
        (final / "model.safetensors").rename(final / "real.safetensors")
        if make:
            make(final / target)
        shards = json.dumps({"weight_map": {"x": "real.safetensors", "y": target}})
        (final / "model.safetensors.index.json").write_text(shards)

    names = ("/dev/zero", "../../treasure.txt", "", ".", "a\0b", "~/x", "x/../real.safetensors")
    named = {f"an index names {name!r}": partial(index, target=name) for name in names}
    made = {f"an index names {k}": partial(index, target="y", make=v) for k, v in SPECIAL.items()}
    return {**named, **made}


def _code() -> dict[str, Harm]:
    def auto_map(folder: Path, file: str = "config.json", **values: object) -> None:
        text = f"open({str(folder / 'it-ran')!r}, 'w').close()\nclass C: pass\n"
        (folder / "final" / "code.py").write_text(text)
        _edit(folder, file, **values)

    def pickled(folder: Path, name: str) -> None:
        (folder / name).write_bytes(pickle.dumps(_Runs(str(folder / "it-ran"))))

    def imports(folder: Path) -> None:
        code = folder / "code.py"
        code.write_text(f"open({str(folder / 'it-ran')!r}, 'w').close()\n")
        with (folder / "config.toml").open("a") as file:
            file.write(f'\n[imports]\n"{code}" = "{"0" * 64}"\n')

    new_type = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.C"}}
    classifier = {"AutoModelForSequenceClassification": "code.C"}
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "code.C"]}, "tokenizer_class": "C"}
    return {
        "auto_map of a new model type": partial(auto_map, **new_type),
        "auto_map beside a known model": partial(auto_map, auto_map=classifier),
        "auto_map of a tokenizer": partial(auto_map, file="tokenizer_config.json", **tokenizer),
        "a pickle as weights": partial(pickled, name="final/model.safetensors"),
        "a pickle as pytorch_model.bin": partial(pickled, name="final/pytorch_model.bin"),
        "a pickle as the optimizer": partial(pickled, name="checkpoint-6/optimizer.safetensors"),
        "imports in config.toml": imports,
    }


def _sizes() -> dict[str, Harm]:
    cases: dict[str, Harm] = {
        f"{name} = {value}": partial(_edit, file="config.json", **{name: value})
        for name, value in (
            ("hidden_size", 1 << 40),
            ("num_hidden_layers", 10**9),
            ("vocab_size", 10**9),
            ("num_labels", 100_000_000),
            ("hidden_size", -8),
            ("id2label", {"x": [1]}),
            ("architectures", ["../../x", 7]),
            ("model_type", ["x"]),
        )
    }
    huge = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
    for what, header, length in (
        ("four tebibytes promised", {"x": huge}, None),
        ("a header longer than the file", {}, 1 << 62),
        ("a negative shape", {"x": {**huge, "shape": [-1], "data_offsets": [0, 4]}}, None),
        ("offsets out of order", {"x": {**huge, "shape": [1], "data_offsets": [8, 4]}}, None),
    ):
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text) if length is None else length) + text + bytes(4)
        cases[f"weights: {what}"] = lambda folder, data=data: (
            folder / "final/model.safetensors"
        ).write_bytes(data)
    for name, piece, size in (("config.toml", b"# x\n", 50), ("result.json", b" ", 200)):
        cases[f"{name} of {size} MB"] = lambda folder, name=name, piece=piece, size=size: (
            folder / name
        ).write_bytes((folder / name).read_bytes() + piece * ((size << 20) // len(piece)))
    return cases


def _places(toys: Toys) -> dict[str, Callable[[Path], list[str]]]:
    return {
        "the page is a folder": lambda f: ["report", str(f), "--out", str(f)],
        "the page below a file": lambda f: ["report", str(f), "--out", str(f / "env.json/p.html")],
        "--out is a file": lambda f: ["measure", str(f), "--out", str(f / "env.json")],
        "--out is longer than any name": lambda f: ["report", str(f), "--out", "x" * 5000],
        "--output is a folder": lambda f: toys.predict(f, f),
        "--output is the input": lambda f: toys.predict(f, toys.root / "lines.txt"),
        "--input is a pipe": lambda f: ["predict", str(f), "--input", str(f / "pipe")],
        "--data is a pipe": lambda f: ["train", "char_lm", "--data", str(f / "pipe")],
        "--data is an endless device": lambda _: ["train", "char_lm", "--data", "/dev/zero"],
        "--config is an endless device": lambda _: ["train", "char_lm", "--config", "/dev/zero"],
        "--import of a folder": lambda f: ["measure", str(f), "--import", str(f)],
    }


def _bomb(path: Path, head: bytes, piece: bytes) -> None:
    """Write gzip data, a member a mebibyte, that unpacks to `BOMB_BYTES`."""
    block = gzip.compress((piece + b"\n") * ((1 << 20) // (len(piece) + 1)))
    path.write_bytes(gzip.compress(head) + block * (BOMB_BYTES >> 20))
