"""Run by test_small.py: every family at its smallest, and faults planted to see that they are
found; prints JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.faults import (
    children,
    clock,
    damage,
    full_disk,
    fuzz,
    hostile,
    kills,
    page,
    toys,
    two_writers,
)
from tools.faults.outcome import Fault, Row


def planted(number: int) -> list[Fault]:
    """Go wrong in the way of this number."""
    ways: list[Callable[[], object]] = [
        lambda: None,
        lambda: time.sleep(60),
        lambda: os.kill(os.getpid(), signal.SIGSEGV),
        lambda: bytearray(8 << 30),
    ]
    try:
        ways[number]()
    except MemoryError:
        return [Fault("crashed", "memory", "")]
    return []


def found_by_limits() -> list[str]:
    """Return the kinds of fault that limits of time and memory find."""
    found = children.each_in_children(4, planted, str, seconds=2, memory=1 << 30)
    return [fault.kind for fault in found]


def found_by_fuzz() -> list[str]:
    """Return what fuzz says of a parser that lets two foreign exceptions pass."""

    def parse(data: bytes) -> object:
        return {b"a": 1}[data[:1]] if data[:1] < b"b" else int(data)

    target = fuzz.Target("planted", (b"abc", b"12"), parse, 1)
    seen = [fault for index in range(40) for fault in fuzz._one(target, 0, index)]
    return sorted({fault.detail.partition(" ")[0] for fault in seen})


def found_by_kills(made: toys.Toys) -> list[str]:
    """Return what kills say of a command that writes half a file under a good name."""
    row = Row("kills", "planted")
    job = kills.Job(
        "planted", lambda out: ["x", str(out)], lambda out: {"a": (out / "a.json").read_bytes()}, 1
    )
    out = made.root / "planted"
    out.mkdir()
    (out / "a.json").write_text('{"half": ')
    row.add(*(Fault("wrong", "planted", name) for name in kills.check_names(out)))
    row.add(*kills.difference(job, out, {"a": b"{}"}, "planted"))
    return [fault.kind for fault in row.faults]


def main() -> None:
    """Print what every family found."""
    torch.set_num_threads(1)
    children.draw_plainly()
    made = toys.write_data(Path(sys.argv[1]))
    rows = [
        *damage.run(made, 20, 1, only="a finished run"),
        *kills.run(made, 2, 1, only="train"),
        *full_disk.run(made, 40, 1, only="predict"),
        *two_writers.run(made, 20, 1, only="predict"),
        *clock.run(made, 20, 1, only="predict"),
        *fuzz.run(
            6000,
            1,
            made.root / "fuzz",
            only="labelled rows,word vectors,TOML,a manifest,variants,claims",
        ),
    ]
    family = "headers that promise too much"
    tries = [(case, case.verbs[0]) for case in hostile.families(made)[family]]
    row = Row("hostile", family, len(tries))
    for number in range(len(tries)):
        row.add(*hostile._one(made, made.root / "hostile", tries, number))
    rows.append(row)
    kept = {
        "kills": {
            "command": "c",
            **page.circumstances(),
            "rows": [{**vars(row), "faults": []} for row in rows],
        }
    }
    print(
        json.dumps(
            {
                "tried": {f"{row.family}: {row.what}": row.tried for row in rows},
                "faults": [fault.line() for row in rows for fault in row.faults],
                "limits": found_by_limits(),
                "fuzz": found_by_fuzz(),
                "kills": found_by_kills(made),
                "page": page.text(kept),
            }
        )
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
