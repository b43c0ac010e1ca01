"""Every parser with mutated input: bits, splices, repeats and a dictionary of what parsers trip
over.

Right is a value or an error of our own, of moderate length, in seconds and within the memory given.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tools.faults.children import each_in_children, where_raised, working_in
from tools.faults.outcome import Fault, Row, chosen
from tools.faults.parsers import Target, targets

LONGEST_MESSAGE = 20_000
NASTY = (
    b"\x00",
    b"\xff",
    b"\xfe\xff",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    "\u2028\u0085\u200f".encode(),
    b"\r",
    b"\x0c",
    b"\n",
    b'"',
    b"'",
    b'""',
    b"\\",
    b"\t",
    b",",
    b";",
    b":",
    b"=",
    b"#",
    b"[",
    b"]",
    b"{",
    b"}",
    b"(",
    b")",
    b"*",
    b"[!",
    b"null",
    b"true",
    b"NaN",
    b"Infinity",
    b"-0",
    b"1e999",
    b"-1e-999",
    b"9" * 5000,
    b"0x10",
    b"1_0",
    "\u0661\u00b2\u00bd".encode(),
    b"[" * 5000,
    b'{"a":' * 3000,
    b"a." * 3000,
    b"=1+1",
    b"../../x",
    b"%s{0}",
    b"--",
    b"-",
    b"/",
    b"~",
    b"$HOME",
    b" ",
    b"",
)


def run(count: int, seed: int, place: Path, only: str = "", jobs: int = 1) -> Iterator[Row]:
    """Give every parser its share of ``count`` inputs."""
    place.mkdir(parents=True, exist_ok=True)
    with working_in(place):
        found = targets(Path())
        whole = sum(target.share for target in found)
        for target in [each for each in found if chosen(each.name, only)]:
            row = Row("fuzz", target.name, max(1, round(count * target.share / whole)), "inputs")
            work = partial(_in_own_folder, place, target, seed)
            seen: set[str] = set()
            for fault in each_in_children(row.tried, work, partial(_name, target, seed), jobs=jobs):
                if fault.detail not in seen:  # one fault is met thousands of times
                    seen.add(fault.detail)
                    row.add(fault)
            yield row


def mutated(target: Target, seed: int, index: int) -> bytes:
    """Return the input with this number; equal arguments, equal bytes."""
    draw = random.Random(f"{target.name}/{seed}/{index}")
    data = draw.choice(target.seeds)
    for _ in range(draw.choice((0, 1, 1, 2, 3, 6)) if index >= len(target.seeds) else 0):
        data = _mutation(data, draw, target)
    return data


def _mutation(data: bytes, draw: random.Random, target: Target) -> bytes:
    place = draw.randrange(len(data) + 1)
    end = min(len(data), place + draw.choice((1, 1, 2, 8, 64)))
    kind = draw.randrange(7)
    if kind == 0 and data:
        place = min(place, len(data) - 1)
        return data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
    if kind == 1:
        return data[:place] + draw.choice(NASTY) + data[place:]
    if kind == 2:
        return data[:place] + draw.choice(NASTY) + data[end:]
    if kind == 3:
        return data[:place] + data[end:]
    if kind == 4:
        return data[:place]
    if kind == 5:
        other = draw.choice(target.seeds)
        return data[:place] + other[draw.randrange(len(other) + 1) :]
    return data[:place] + data[place:end] * draw.choice((2, 3, 50)) + data[end:]


def _in_own_folder(place: Path, target: Target, seed: int, index: int) -> list[Fault]:
    """Work as `_one` in a copy of ``place`` that is this process's alone."""
    own = place.with_name(f"{place.name}-{os.getpid()}")
    if not own.exists():
        shutil.copytree(place, own)
        os.chdir(own)
        warnings.simplefilter("ignore")
    return _one(target, seed, index)


def _name(target: Target, seed: int, index: int) -> str:
    return f"{target.name} {index}: {mutated(target, seed, index)[:80]!r}"


def _one(target: Target, seed: int, index: int) -> list[Fault]:
    from wellposed.errors import WellposedError

    data = mutated(target, seed, index)
    try:
        target.call(
            data.decode("utf-8", "surrogateescape").encode("utf-8", "replace")
            if target.text
            else data
        )
    except WellposedError as error:
        long = len(str(error)) > LONGEST_MESSAGE
        return (
            [
                Fault(
                    "unclear",
                    _name(target, seed, index),
                    f"a message of {len(str(error))} characters",
                )
            ]
            if long
            else []
        )
    except MemoryError as error:
        return [Fault("crashed", _name(target, seed, index), where_raised(error))]
    except Exception as error:
        return [Fault("foreign", _name(target, seed, index), _without_values(where_raised(error)))]
    return []


def _without_values(said: str) -> str:
    """Return the kind of an exception and where it came from: what the input held is in the name of
    the case."""
    return f"{said.partition(':')[0]} {said[said.rfind('(') :]}"
