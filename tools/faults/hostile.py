"""Folders and files made to do harm: links in circles, pipes in the place of files, bombs, code,
pickles, odd names.

Right is an error of our own in seconds and within the memory given, or the answer of a harmless
folder; and no code of a folder runs.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.faults.children import command, each_in_children
from tools.faults.outcome import Fault, Row, chosen
from tools.faults.toys import Toys, copied, make_folders

SECONDS = 20.0
LONGEST_MESSAGE = 20_000
BOMB_BYTES = 4 << 30
ODD_NAMES = (
    "a\nb",
    "a\tb",
    "a\x1b[31mb",
    "\udcff\udcfe",
    "a" * 255,
    "-rf",
    "--out",
    "a b",
    "='x",
    "$(x)",
    "\u202egpj",
    "..x",
    "~",
)
READERS = ("measure", "certify", "predict", "report", "resume")


@dataclass(frozen=True)
class Case:
    """A folder that is changed by ``harm``, and the commands that then meet it."""

    name: str
    harm: Callable[[Path], None]
    verbs: tuple[str, ...] = READERS
    words: Callable[[Path], list[str]] | None = None
    """A command of its own, in the place of verbs on the run folder."""


def run(toys: Toys, only: str = "") -> Iterator[Row]:
    """Meet every case with every command that reads it."""
    make_folders(toys, ["classifier"])
    for title, cases in families(toys).items():
        if not chosen(title, only):
            continue
        tries = [
            (case, verb) for case in cases for verb in (case.verbs if case.words is None else ("",))
        ]
        row = Row("hostile", title, len(tries), "commands")
        place = toys.root / "hostile"
        for number in range(
            len(tries)
        ):  # in a child each, since one may leave little memory to the next
            work, name = partial(_one, toys, place, tries[number:]), partial(_name, tries[number:])
            row.add(*each_in_children(1, work, name, seconds=SECONDS))
        yield row
    shutil.rmtree(toys.root / "hostile", ignore_errors=True)


def families(toys: Toys) -> dict[str, list[Case]]:
    """Return every case by its kind."""
    return {
        "special files in the place of a file": _special_files(),
        "links, access and odd names": [*_links(), *_names(toys)],
        "code and pickles in a model folder": _code(),
        "bombs": _bombs(toys),
        "headers that promise too much": _headers(),
    }


def _name(tries: list[tuple[Case, str]], index: int) -> str:
    case, verb = tries[index]
    return f"{case.name}: {verb}" if verb else case.name


def _one(toys: Toys, place: Path, tries: list[tuple[Case, str]], index: int) -> list[Fault]:
    case, verb = tries[index]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    folder = copied(toys.root / "classifier", place / "run")
    for manifest in folder.rglob("manifest.json"):
        if manifest.parent.name in ("run", "final"):
            manifest.unlink()
    case.harm(folder)
    said = command(case.words(folder) if case.words else _words(toys, folder, verb))
    name = _name(tries, index)
    if said.foreign.startswith("MemoryError"):
        return [Fault("crashed", name, said.foreign)]
    if said.foreign or "Traceback" in said.err or said.status not in (0, 1, 2):
        return [
            Fault("foreign", name, said.foreign or f"exit status {said.status}: {said.err[-500:]}")
        ]
    if (folder / "it-ran").exists():
        return [Fault("wrong", name, "code of the folder ran")]
    if said.status and (len(said.err) > LONGEST_MESSAGE or "\x1b" in said.err):
        return [
            Fault("unclear", name, f"a message of {len(said.err)} characters: {said.err[:200]!r}")
        ]
    return []


def _words(toys: Toys, folder: Path, verb: str) -> list[str]:
    return {
        "measure": ["measure", str(folder)],
        "certify": ["certify", str(folder), "--examples", "0"],
        "predict": ["predict", str(folder), "--text", "a good film x"],
        "report": ["report", str(folder), "--out", str(folder.parent / "page.html")],
        "resume": toys.classify(folder),
    }[verb]


def _replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make(path)

    return harm


def _special_files() -> list[Case]:
    files = {
        "config.toml": READERS,
        "result.json": ("report", "resume"),
        "metrics.jsonl": ("report", "resume"),
        "env.json": ("report", "resume"),
        "measure-final.json": ("report",),
        "certified.json": ("report",),
        "manifest.json": ("report", "resume", "measure"),
        "final/manifest.json": ("measure", "predict"),
        "final/config.json": ("measure", "predict"),
        "final/model.safetensors": ("measure", "certify"),
        "final/tokenizer.json": ("predict",),
        "final/tokenizer_config.json": ("predict",),
        "final": ("measure", "resume"),
        "checkpoint-6": ("resume",),
        "run.lock": ("resume",),
    }
    kinds: dict[str, Callable[[Path], object]] = {
        "a pipe": os.mkfifo,
        "a folder": lambda path: path.mkdir(),
        "a link to itself": lambda path: path.symlink_to(path),
        "a link to nothing": lambda path: path.symlink_to("nowhere/at-all"),
        "an endless device": lambda path: path.symlink_to("/dev/zero"),
        "an empty device": lambda path: path.symlink_to("/dev/null"),
    }
    return [
        Case(f"{name} is {kind}", _replaced(name, make), verbs)
        for name, verbs in files.items()
        for kind, make in kinds.items()
    ]


def _links() -> list[Case]:
    def circle(folder: Path) -> None:
        (folder / "below").mkdir()
        (folder / "below" / "up").symlink_to(folder)
        (folder / "final" / "again").symlink_to(folder / "final")

    def deep(folder: Path) -> None:
        path = folder.parent / "deep"
        for _ in range(400):
            path = path / "d"
        path.mkdir(parents=True)

    def many(folder: Path) -> None:
        for number in range(3000):
            (folder.parent / f"empty-{number}").mkdir()

    return [
        Case("a circle of links", circle),
        Case(
            "four hundred folders deep",
            deep,
            words=lambda f: ["report", str(f.parent), "--out", str(f / "p.html")],
        ),
        Case(
            "three thousand folders",
            many,
            words=lambda f: ["report", str(f.parent), "--out", str(f / "p.html")],
        ),
        Case(
            "the page is a folder",
            lambda _: None,
            words=lambda f: ["report", str(f), "--out", str(f)],
        ),
        Case(
            "the page below a file",
            lambda _: None,
            words=lambda f: ["report", str(f), "--out", str(f / "env.json/p.html")],
        ),
        Case(
            "--out below a file",
            lambda _: None,
            words=lambda f: ["measure", str(f), "--out", str(f / "env.json" / "m")],
        ),
        Case(
            "--out is a file",
            lambda _: None,
            words=lambda f: ["certify", str(f), "--examples", "0", "--out", str(f / "env.json")],
        ),
        Case(
            "--output is a folder",
            lambda _: None,
            words=lambda f: ["predict", str(f), "--text", "a", "--output", str(f)],
        ),
        Case(
            "--input is a pipe",
            lambda f: os.mkfifo(f / "p"),
            words=lambda f: ["predict", str(f), "--input", str(f / "p")],
        ),
        Case(
            "data is a pipe",
            lambda f: os.mkfifo(f / "train.tsv"),
            words=lambda f: [
                "train",
                "text_classification",
                "--data",
                str(f / "train.tsv"),
                "--out",
                str(f.parent / "new"),
            ],
        ),
        Case(
            "data is an endless device",
            lambda _: None,
            words=lambda f: [
                "train",
                "char_lm",
                "--data",
                "/dev/zero",
                "--out",
                str(f.parent / "new"),
            ],
        ),
        Case(
            "--config is an endless device",
            lambda _: None,
            words=lambda f: [
                "train",
                "char_lm",
                "--config",
                "/dev/zero",
                "--out",
                str(f.parent / "new"),
            ],
        ),
        Case(
            "--import of a folder",
            lambda _: None,
            words=lambda f: ["measure", str(f), "--import", str(f)],
        ),
        Case(
            "a name longer than the system takes",
            lambda _: None,
            words=lambda _: ["measure", "x" * 5000],
        ),
        Case(
            "--out longer than the system takes",
            lambda _: None,
            words=lambda f: ["report", str(f), "--out", "x" * 5000],
        ),
    ]


def _names(toys: Toys) -> list[Case]:
    def renamed(name: str) -> Callable[[Path], None]:
        return lambda folder: folder.rename(folder.with_name(name)) and None

    verbs = ("measure", "report", "resume")
    runs = [
        Case(
            f"a run named {name[:20]!r}: {verb}",
            renamed(name),
            words=partial(_words_of, toys, name, verb),
        )
        for name in ODD_NAMES
        for verb in verbs
    ]
    return runs + [
        Case(
            f"lines from a file named {name[:20]!r}",
            partial(_lines, name),
            words=partial(_predicted, name),
        )
        for name in ODD_NAMES
    ]


def _words_of(toys: Toys, name: str, verb: str, folder: Path) -> list[str]:
    return _words(toys, folder.with_name(name), verb)


def _lines(name: str, folder: Path) -> None:
    (folder / name).write_text("a good film x\n")


def _predicted(name: str, folder: Path) -> list[str]:
    return [
        "predict",
        str(folder),
        "--input",
        str(folder / name),
        "--output",
        str(folder / f"{name[:200]}.out"),
    ]


def _edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class _Runs:
    """Pickled so that reading it would write a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return (open, (self.path, "w"))


def _code() -> list[Case]:
    def auto_map(folder: Path, file: str, **values: object) -> None:
        (folder / "final" / "code.py").write_text(
            f"open({str(folder / 'it-ran')!r}, 'w').close()\nclass C: pass\n"
        )
        _edit(folder / "final" / file, **values)

    def pickled(name: str) -> Callable[[Path], None]:
        def harm(folder: Path) -> None:
            (folder / "final" / "model.safetensors").unlink()
            (folder / "final" / name).write_bytes(pickle.dumps(_Runs(str(folder / "it-ran"))))

        return harm

    models = ("measure", "certify", "predict")
    return [
        Case(
            "auto_map in config.json",
            partial(
                auto_map,
                file="config.json",
                auto_map={"AutoConfig": "code.C", "AutoModel": "code.C"},
                model_type="unheard_of",
            ),
            models,
        ),
        Case(
            "auto_map beside a known model",
            partial(
                auto_map,
                file="config.json",
                auto_map={"AutoModelForSequenceClassification": "code.C"},
            ),
            models,
        ),
        Case(
            "auto_map in tokenizer_config.json",
            partial(
                auto_map,
                file="tokenizer_config.json",
                auto_map={"AutoTokenizer": [None, "code.C"]},
                tokenizer_class="C",
            ),
            models,
        ),
        Case(
            "auto_map of another repository",
            partial(
                auto_map,
                file="config.json",
                auto_map={"AutoConfig": "me/else--code.C"},
                model_type="unheard_of",
            ),
            models,
        ),
        Case("a pickle named model.safetensors", pickled("model.safetensors"), models),
        Case("a pickle named pytorch_model.bin", pickled("pytorch_model.bin"), models),
        Case(
            "a pickle named optimizer.safetensors",
            lambda f: _unfinished(f, "optimizer.safetensors"),
            ("resume",),
        ),
        Case(
            "a pickle named trainer_state.json",
            lambda f: _unfinished(f, "trainer_state.json"),
            ("resume",),
        ),
        Case("imports in config.toml", _imports, ("measure", "resume", "report")),
        Case(
            "a class name with a path",
            lambda f: _edit(f / "final/config.json", architectures=["../../x", 7]),
            models,
        ),
        Case(
            "a model type that is a list",
            lambda f: _edit(f / "final/config.json", model_type=["x"]),
            models,
        ),
        Case(
            "sizes beyond any memory",
            lambda f: _edit(f / "final/config.json", hidden_size=1 << 40),
            models,
        ),
        Case(
            "10^9 layers", lambda f: _edit(f / "final/config.json", num_hidden_layers=10**9), models
        ),
        Case("a negative width", lambda f: _edit(f / "final/config.json", hidden_size=-8), models),
        Case(
            "labels that are no labels",
            lambda f: _edit(f / "final/config.json", id2label={"x": [1]}),
            models,
        ),
        Case(
            "a vocabulary of 10^9",
            lambda f: _edit(f / "final/config.json", vocab_size=10**9),
            models,
        ),
    ]


def _unfinished(folder: Path, name: str) -> None:
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "final")
    for checkpoint in folder.glob("checkpoint-*"):
        (checkpoint / name).write_bytes(pickle.dumps(_Runs(str(folder / "it-ran"))))
        _true_manifest(checkpoint)


def _true_manifest(folder: Path) -> None:
    """Make the manifest of a checkpoint describe what is there now, as whoever means harm would."""
    from hashlib import sha256

    files = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"
    }
    entries = {
        name: {"bytes": len(data), "sha256": sha256(data).hexdigest()}
        for name, data in files.items()
    }
    _edit(folder / "manifest.json", files=entries)


def _imports(folder: Path) -> None:
    code = folder / "code.py"
    code.write_text(f"open({str(folder / 'it-ran')!r}, 'w').close()\n")
    with (folder / "config.toml").open("a") as file:
        file.write(f'\n[imports]\n"{code}" = "{"0" * 64}"\n')


def _bombs(toys: Toys) -> list[Case]:
    def table(folder: Path, name: str = "train.tsv.gz") -> None:
        head = b"label\ttext\n" + b"pos\ta film\nneg\ta film\n" * 200
        _gzip_bomb(folder / name, head, b"pos\t" + b"a" * 1000 + b"\n")

    def trained(task: str, name: str) -> Callable[[Path], list[str]]:
        return lambda f: [
            "train",
            task,
            "--data",
            str(f / name),
            "--out",
            str(f.parent / "new"),
            "--steps",
            "1",
            "--quiet",
        ]

    def image(folder: Path) -> None:
        (folder / "bomb.png").write_bytes(_png(60_000, 60_000))

    def decompressed_header(folder: Path) -> None:
        _safetensors(
            folder / "final/model.safetensors",
            {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
            1 << 20,
        )

    return [
        Case("a table in gzip", table, words=trained("text_classification", "train.tsv.gz")),
        Case(
            "a text in gzip",
            lambda f: _gzip_bomb(f / "a.txt.gz", b"", b"the north wind "),
            words=trained("char_lm", "a.txt.gz"),
        ),
        Case(
            "zeros in gzip",
            lambda f: _gzip_bomb(f / "z.txt.gz", b"", b"\0"),
            words=trained("char_lm", "z.txt.gz"),
        ),
        Case(
            "lines to predict in gzip",
            lambda f: _gzip_bomb(f / "l.gz", b"a\n", b"a" * 1000),
            words=lambda f: ["predict", str(f), "--input", str(f / "l.gz")],
        ),
        Case(
            "images in npz",
            lambda f: _npz_bomb(f / "train.npz"),
            words=trained("image", "train.npz"),
        ),
        Case(
            "word vectors in gzip",
            lambda f: _gzip_bomb(f / "v.gz", b"the 1 2\n", b"x" * 1000),
            words=lambda f: [
                "train",
                "dialogue",
                "--data",
                str(toys.text),
                "--word-vectors",
                str(f / "v.gz"),
                "--out",
                str(f.parent / "new"),
            ],
        ),
        Case(
            "a picture of 3.6 thousand million points",
            image,
            words=lambda f: ["predict", str(f), "--input", str(f / "bomb.png")],
        ),
        Case("a header of a megabyte of spaces", decompressed_header, ("measure", "predict")),
        Case("a configuration of 50 MB", lambda f: _long(f / "config.toml", b"# x\n"), READERS),
        Case("a result of 200 MB", lambda f: _long(f / "result.json", b" "), ("report", "resume")),
        Case(
            "metrics of one line of 200 MB",
            lambda f: _long(f / "metrics.jsonl", b"9"),
            ("report", "resume"),
        ),
        Case(
            "a tokenizer of 50 MB", lambda f: _long(f / "final/tokenizer.json", b" "), ("predict",)
        ),
        Case(
            "a template that repeats",
            lambda f: _edit(
                f / "final/tokenizer_config.json",
                chat_template="{% for i in range(9999999) %}x{% endfor %}",
            ),
            ("predict",),
        ),
    ]


def _gzip_bomb(path: Path, head: bytes, repeated: bytes) -> None:
    """Write gzip data that unpacks to `BOMB_BYTES`."""
    piece = repeated * ((1 << 20) // len(repeated))
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        file.write(packer.compress(head))
        block = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = block.compress(piece) + block.flush(zlib.Z_FULL_FLUSH)
        file.write(packer.flush(zlib.Z_FULL_FLUSH))
        for _ in range(BOMB_BYTES // len(piece)):
            file.write(packed)
        file.write(b"\x03\x00" + bytes(8))


def _npz_bomb(path: Path) -> None:
    header = io.BytesIO()
    import numpy as np

    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (BOMB_BYTES // 784, 28, 28)}
    )
    labels = io.BytesIO()
    np.save(labels, np.zeros(BOMB_BYTES // 784, np.int64))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as file:
            file.write(header.getvalue())
            for _ in range(64):
                file.write(bytes(1 << 20))
        archive.writestr("y.npy", labels.getvalue())


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
        + chunk(b"IEND", b"")
    )


def _long(path: Path, piece: bytes) -> None:
    size = (50 << 20) if path.suffix == ".toml" or path.name == "tokenizer.json" else (200 << 20)
    with path.open("ab") as file:
        file.write(piece * (size // len(piece)))


def _headers() -> list[Case]:
    huge = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
    return [
        Case(
            f"weights: {what}",
            partial(_bad_weights, header=header, length=length),
            ("measure", "predict"),
        )
        for what, header, length in (
            ("four tebibytes promised", {"x": huge}, None),
            ("a header longer than the file", {}, 1 << 62),
            ("a header of no length", {}, 0),
            (
                "offsets out of order",
                {"x": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}},
                None,
            ),
            (
                "a shape of 10,000 sizes",
                {"x": {"dtype": "F32", "shape": [1] * 10_000, "data_offsets": [0, 4]}},
                None,
            ),
            (
                "a negative shape",
                {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
                None,
            ),
            ("an unknown type", {"x": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, None),
            ("no format", {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, None),
            ("metadata that are numbers", {"__metadata__": {"format": 7}}, None),
        )
    ]


def _bad_weights(folder: Path, header: dict[str, object], length: int | None) -> None:
    _safetensors(folder / "final" / "model.safetensors", header, 0, length)


def _safetensors(
    path: Path, header: dict[str, object], spaces: int, length: int | None = None
) -> None:
    text = json.dumps(header).encode() + b" " * spaces
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(4))
