"""Measure the rows of this folder, on a CPU or a GPU, and store them.

python -m benchmarks --list                         benchmarks: what each measures, minutes, goal
python -m benchmarks                                every benchmark without inputs
python -m benchmarks ball penalties --rounds 3
python -m benchmarks gpu                            7 minutes of GPU rows; tiny sizes without a GPU
python -m benchmarks predict --model runs/de-en --data lines.txt
python -m benchmarks ball --quick --out /tmp/tried  tiny sizes, to test the code
python -m benchmarks --page                         rewrite SPEED.md from results/, without measuring

Rows go to benchmarks/results/<machine>-<day>.json, the table of all results to benchmarks/SPEED.md.
Each row is compared with the last run on the same machine. Run it in the repository, on an idle machine.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import math
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

# Math libraries read it when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.page import cell, lines_while_measuring, table
from benchmarks.record import Json, Record, compared
from benchmarks.rows import Benchmark, Setup

HERE = Path(__file__).parent
GPU_MINUTES = 7
GPU_SECONDS = {
    "steps": 150,
    "flex_attention": 45,
    "l2_attention": 45,
    "transject": 60,
    "reversible": 20,
    "ball": 15,
    "attention_interface": 40,
    "compiled": 45,
}
"""Seconds for the first benchmarks on a GPU; others share the rest of `GPU_MINUTES`."""


def benchmarks() -> Iterator[tuple[str, Benchmark]]:
    for module in pkgutil.iter_modules([str(HERE)]):
        loaded = (
            None
            if module.name == "__main__"
            else importlib.import_module(f"benchmarks.{module.name}")
        )
        if hasattr(loaded, "BENCHMARK"):
            yield module.name, getattr(loaded, "BENCHMARK")  # noqa: B009


def arguments_of(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="benchmarks to run; default: all without inputs")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")
    parser.add_argument(
        "--page", action="store_true", help="rewrite SPEED.md from results/ and exit"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--rounds", type=int, help="number of measured rounds, instead of each row's own"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, without goals; stored only with --out"
    )
    parser.add_argument("--out", type=Path, help="folder of SPEED.md and results/")
    parser.add_argument("--model", help="a model folder, for benchmarks that need one")
    parser.add_argument("--data", help="a data file, for benchmarks that need one")
    return parser.parse_args(words)


def refusal(name: str, one: Benchmark, setup: Setup) -> str | None:
    """Return in a line why a benchmark cannot run here."""
    if setup.device not in one.devices and not setup.quick:
        return f"runs on {' and '.join(one.devices)} only"
    missing = [f"--{need} ..." for need in one.needs if getattr(setup, need) is None]
    return f"python -m benchmarks {name} {' '.join(missing)}" if missing else None


def measure(
    one: Benchmark, setup: Setup, last: Json, until: float, keep: Callable[[list[Json]], None]
) -> bool:
    """Show and store each row; return whether no error occurred. No row begins after ``until``."""
    rows: list[Json] = []
    try:
        for row in one.rows(setup):
            goal = one.goal_of(row.name, setup.device)
            wanted = None if setup.quick else goal.wanted if goal else row.goal
            rows.append(compared(replace(row, goal=wanted), last))
            for line in lines_while_measuring(rows[-1]):
                print(line, flush=True)
            keep(rows)
            if time.perf_counter() > until:
                print("  its time is over; later rows are left out", flush=True)
                break
    except Exception:
        traceback.print_exc()
        return False
    return True


def write_page(folder: Path, registered: dict[str, Benchmark]) -> None:
    """Write the page of all results, with today's goals."""
    (folder / "SPEED.md").write_text(table(folder / "results", registered), "utf-8")


def choose_gpu_rows(args: argparse.Namespace, registered: dict[str, Benchmark]) -> None:
    """Make of ``gpu`` the benchmarks that run there, the first ones first."""
    others = [name for name, one in registered.items() if "cuda" in one.devices]
    args.names = list(dict.fromkeys([*GPU_SECONDS, *others]))
    if torch.cuda.is_available():
        args.device = "cuda"
    else:
        print("no CUDA here: tiny sizes on the CPU, which are stored only with --out")
        args.quick = True


def print_list(registered: dict[str, Benchmark]) -> None:
    print("| benchmark | measures | minutes | goal | on |\n|---|---|---|---|---|")
    for name, one in registered.items():
        print(
            f"| {name} | {cell(one.measures)} | {one.minutes:g} | {cell(one.goal)} |"
            f" {', '.join(one.devices)} |"
        )


def main(words: list[str] | None = None) -> int:
    args = arguments_of(words)
    registered = dict(benchmarks())
    is_gpu = args.names == ["gpu"]
    if is_gpu:
        choose_gpu_rows(args, registered)
    unknown = [name for name in args.names if name not in registered]
    if unknown:
        near = {name: difflib.get_close_matches(name, registered, 3) for name in unknown}
        lines = (
            f"no benchmark {name!r}; near: {near[name] or list(registered)}" for name in unknown
        )
        print("; ".join(lines), file=sys.stderr)
        return 2
    if args.list:
        print_list(registered)
        return 0
    if args.page:
        write_page(args.out or HERE, registered)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA here")
        return 0
    failed = measure_all(args, registered, is_gpu=is_gpu)
    if failed:
        print(f"stopped by an error: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def measure_all(
    args: argparse.Namespace, registered: dict[str, Benchmark], *, is_gpu: bool
) -> list[str]:
    """Measure and store the rows of all chosen benchmarks; return those that an error stopped."""
    ends = time.perf_counter() + 60 * GPU_MINUTES if is_gpu else math.inf
    torch.set_num_threads(args.threads)
    setup = Setup(args.device, args.threads, args.rounds, args.quick, args.model, args.data)
    out = args.out or (None if args.quick else HERE)
    record = Record.today((out or HERE) / "results", setup)
    gc.collect()
    gc.freeze()  # so that garbage collection does not walk loaded modules while a clock runs
    failed: list[str] = []
    for name in args.names or registered:
        began = time.perf_counter()
        why_not = refusal(name, registered[name], setup)
        why_not = why_not or (f"left out, {GPU_MINUTES} minutes are over" if began > ends else None)
        print(f"{name}: {why_not or registered[name].measures}", flush=True)
        if why_not is not None:
            continue
        until = min(ends, began + GPU_SECONDS.get(name, math.inf)) if is_gpu else math.inf

        def keep(rows: list[Json], name: str = name) -> None:
            if out is not None:
                record.keep(name, rows)
                write_page(out, registered)

        is_whole = measure(registered[name], setup, record.last(name), until, keep)
        print(f"  {time.perf_counter() - began:.0f} s", flush=True)
        failed += [] if is_whole else [name]
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
