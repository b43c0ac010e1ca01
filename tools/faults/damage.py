"""Every file that a command reads, damaged; odd values in files, in data and on the command line.

Right is an error of our own that names the file, or exactly the answer of the undamaged folder.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools.faults.harness import Answer, Row, run
from tools.faults.toys import Toys, copied, labelled_rows

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, -5, 1.5, 1e300, 10**30, float("nan"), float("inf")),
    *(
        "",
        "x",
        " ",
        "\n",
        "a\nb\tc",
        "\ud800",
        "a\0b",
        "\x1b[31mred",
        "\u202egpj",
        "=1+1",
        "../../x",
    ),
    *([], {}, [None], [True], ["\ud800"], {"a": "b"}, {"0": 1}),
    *("/dev/zero", "owner/name", "x" * 30_000),
)
"""Values that readers trip over: types, ranges, text that is no text, text that acts."""
RAW_VALUES = (b"1e999", b"9" * 5000, b"-0", b"0x10", b"\xff\xfe", b"[" * 5000)
"""Values that no writer of JSON produces."""
WORDS = ("", "nan", "inf", "-1", "1e999", "9" * 5000, "\udcff", "a\nb", "x:nan", "x,")
"""Values for an option."""
UNGUARDED = ("compare.json", "certified.json")
"""Files that no manifest describes."""
TIMED = re.compile(r"^.*(bytes|seconds|tokens/s| s\b).*$", re.MULTILINE)
"""Lines that differ between two runs of a command."""
TOKENIZERS = ("words", "bytes", "bpe")
Damage = Callable[[bytes, random.Random], bytes | None]


def _flip(data: bytes, draw: random.Random) -> bytes | None:
    offset = draw.randrange(max(1, len(data)))
    return data[:offset] + bytes([data[offset] ^ (1 << draw.randrange(8))]) + data[offset + 1 :]


def _zeroed(data: bytes, draw: random.Random) -> bytes:
    start, size = draw.randrange(max(1, len(data))), draw.choice((16, 512, 4096))
    return data[:start] + bytes(len(data[start : start + size])) + data[start + size :]


def _spliced(piece: bytes, data: bytes, draw: random.Random) -> bytes:
    offset = draw.randrange(len(data) + 1)
    return data[:offset] + piece + data[offset:]


def odd_value(data: bytes, draw: random.Random) -> bytes | None:
    """Put an odd value in the place of a random one of a JSON file, or of a line of one."""
    if draw.random() < 0.3:
        numbers = list(re.finditer(rb"\d+", data[:100_000]))
        number = draw.choice(numbers) if numbers else None
        raw = draw.choice(RAW_VALUES)
        return data[: number.start()] + raw + data[number.end() :] if number else None
    lines = data.split(b"\n")
    row = draw.randrange(len(lines))
    head, tail = b"\n".join(lines[:row]), b"\n".join(lines[row + 1 :])
    for text, before, after in ((data, b"", b""), (lines[row], head, tail)):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        changed = json.dumps(_replaced(value, draw)).encode()
        return b"\n".join(part for part in (before, changed, after) if part)
    return None


def _replaced(value: Any, draw: random.Random) -> Any:
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.1:
        return draw.choice(VALUES)
    key = draw.choice(list(value) if isinstance(value, dict) else list(range(len(value))))
    changed = dict(value) if isinstance(value, dict) else list(value)
    if draw.random() < 0.15:
        del changed[key]
    else:
        changed[key] = _replaced(value[key], draw)
    return changed


DAMAGES: dict[str, Damage] = {
    "one bit": _flip,
    "cut": lambda data, draw: data[: draw.randrange(max(1, len(data)))],
    "a zeroed block": _zeroed,
    "emptied": lambda _, __: b"",
    "twice": lambda data, _: data + data,
    "noise": lambda data, draw: draw.randbytes(max(8, min(len(data), 4096))),
    "not UTF-8": partial(_spliced, b"\xff\xfe\xed\xa0\x80"),
    "deep": partial(_spliced, b'{"a":' * 100_000),
    "an odd value": odd_value,
    "deleted": lambda _, __: None,
}


def damage(toys: Toys, count: int, seed: int) -> Iterator[Row]:
    """Damage ``count`` files of finished and unfinished folders and run every reader of each."""
    finished = toys.finished("classifier")
    compared = toys.finished("compare")
    target = toys.root / "damaged" / "it"
    reading = toys.reading(target)
    unfinished = {"resume": reading["resume"]}
    several = {"report": reading["report"], "compare": toys.compare(target)}
    for what, folder, share, readers, prepare in (
        ("a finished run", finished, 0.6, reading, lambda _: None),
        ("an unfinished run", finished, 0.25, unfinished, _unfinish),
        ("a comparison", compared, 0.15, several, lambda _: None),
    ):
        row = Row(f"files of {what}", "damaged files")
        draw = random.Random(f"{seed}/{what}")
        prepare(copied(folder, target))
        skipped = (".lock", ".html", ".txt", ".svg")
        files = sorted(
            str(path.relative_to(target))
            for path in target.rglob("*")
            if path.is_file() and path.suffix not in skipped
        )
        expected = {}
        for verb, words in readers.items():
            prepare(copied(folder, target))
            _, expected[verb] = _answer(words, target, toys)
        for _ in range(round(count * share)):
            row.tried += 1
            file, name = draw.choice(files), draw.choice(list(DAMAGES))
            verb = draw.choice(list(readers))
            prepare(copied(folder, target))
            guarded = Path(file).name not in UNGUARDED and draw.random() < 0.6
            if not guarded:
                for manifest in target.rglob("manifest.json"):
                    manifest.unlink()
            path = target / file
            if not path.exists():
                continue
            changed = DAMAGES[name](path.read_bytes(), draw)
            path.unlink() if changed is None else path.write_bytes(changed)
            after, left = _answer(readers[verb], target, toys)
            case = f"{what}: {file}, {name}, {'' if guarded else 'no manifests, '}{verb}"
            if kind := after.fault() or _judged(file, guarded, after, left == expected[verb]):
                row.add(kind, case, after.output[-600:])
        yield row


def _unfinish(folder: Path) -> None:
    for name in ("result.json", "manifest.json", "certified.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "final")


def _answer(words: list[str], folder: Path, toys: Toys) -> tuple[Answer, str | bytes]:
    """Run a command; return also what must stay: the weights that it wrote, or its text but times."""
    answer = run(words, toys.root / "damage.log")
    weights = folder / "final" / "model.safetensors"
    if words[0] == "train" and answer.status == 0 and weights.is_file():
        return answer, weights.read_bytes()
    return answer, TIMED.sub("", answer.output)


def _judged(file: str, guarded: bool, after: Answer, same: bool) -> str | None:
    path = Path(file)
    if not guarded or path.name in after.output or path.parent.name in after.output:
        return None
    if after.status:
        return None if path.name == "manifest.json" else "unclear"
    return None if same else "wrong"


def values(toys: Toys, count: int, seed: int) -> Iterator[Row]:
    """Put odd values into data, model folders and behind every option of ``train``."""
    draw = random.Random(seed)
    target = toys.root / "values"
    log = toys.root / "values.log"
    target.mkdir(exist_ok=True)
    row = Row("cells of labelled data")
    for number in range(round(count * 0.4)):
        path = target / f"train.{draw.choice(('jsonl', 'json', 'csv', 'tsv', 'parquet'))}"
        path.write_bytes(_table(path.suffix, draw))
        tokenizer = ["--tokenizer", draw.choice(TOKENIZERS)]
        out = ["--out", str(target / f"run-{number}"), "--steps", "1"]
        words = [*toys.classify(target), "--data", str(path), *tokenizer, *out]
        row.meet(words, f"{path.name} {path.read_bytes()[:80]!r}", log)
    yield row
    row = Row("entries of a model's JSON files")
    for _ in range(round(count * 0.4)):
        folder = copied(toys.finished("classifier"), target / "run")
        for manifest in folder.rglob("manifest.json"):
            manifest.unlink()
        file = draw.choice(sorted((folder / "final").glob("*.json")))
        file.write_bytes(odd_value(file.read_bytes(), draw) or b"")
        words = draw.choice(["measure {}", "certify {} --examples 0", "predict {} --text a"])
        verb = words.partition(" ")[0]
        row.meet(words.format(folder).split(" "), f"{file.name}, {verb}", log)
    yield row
    row = Row("options on the command line")
    listed = run(["train", "text_classification", "--help-all"], toys.root / "help.log").output
    options = sorted(set(re.findall(r"--[a-z][\w.-]+", listed)) - {"--help", "--help-all"})
    for number in range(round(count * 0.2)):
        option, word = draw.choice(options), draw.choice(WORDS)
        out = target / f"words-{number}"
        words = [*toys.classify(out, "--steps", "1"), option, os.fsdecode(os.fsencode(word))]
        row.meet(words, f"{option} {word[:20]!r}", log)
    yield row


def _table(suffix: str, draw: random.Random) -> bytes:
    """Return labelled rows in the form of ``suffix``, with an odd value in one of the cells."""
    rows: list[dict[str, Any]] = [{"label": a, "text": b} for a, b in labelled_rows()]
    column, value = draw.choice(("label", "text")), draw.choice(VALUES)
    odd = draw.randrange(len(rows))
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        cells = {name: [row[name].encode() for row in rows] for name in ("label", "text")}
        cells[column][odd] = draw.choice((b"\xff\xfe", b"", b"\xed\xa0\x80", b"9" * 5000, b"a\nb"))
        # A view, unlike a cast, does not ask whether the bytes are text.
        columns = {name: pyarrow.array(data).view("string") for name, data in cells.items()}
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), out)
        return out.getvalue()
    rows[odd][column] = value
    if suffix == ".json":
        return json.dumps(rows).encode()
    if suffix == ".jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    mark = "," if suffix == ".csv" else "\t"
    lines = ["label" + mark + "text"] + [f"{row['label']}{mark}{row['text']}" for row in rows]
    return "\n".join(lines).encode("utf-8", "surrogatepass")
