"""Storage of runs: rows as JSON, one file per machine and day, compared with the last run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import Row, Setup

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "geotorch",
    "geoopt",
    "orthogonium",
    "deel-torchlip",
)
Json = dict[str, Any]


def machine(device: str) -> Json:
    """Return the processor with cores and relevant flags, and the GPU if it is measured."""
    facts: Json = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "flags": [],
    }
    info = Path("/proc/cpuinfo")
    if info.is_file():
        fields = dict(
            line.split(":", 1) for line in info.read_text("utf-8").splitlines() if ":" in line
        )
        fields = {name.strip(): value.strip() for name, value in fields.items()}
        facts["cpu"] = fields.get("model name", facts["cpu"])
        facts["flags"] = [flag for flag in FLAGS if flag in fields.get("flags", "").split()]
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def key_of(described: Json) -> str:
    """Return the name of a machine in file names."""
    words = [
        described.get("gpu") or f"{described['cpu']} {described['cores']} cores",
        *described["flags"],
    ]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


@dataclass(frozen=True)
class Record:
    """The rows of one machine on one day, in ``folder/<machine>-<day>.json``."""

    folder: Path
    setup: Setup
    described: Json
    day: datetime.date

    @classmethod
    def today(cls, folder: Path, setup: Setup) -> Record:
        """Return the record of this machine and day; tiny sizes count as another machine."""
        return cls(folder, setup, machine(setup.device), datetime.datetime.now(datetime.UTC).date())

    @property
    def machine_key(self) -> str:
        """Key of rows that are compared with each other."""
        return key_of(self.described) + "-quick" * self.setup.quick

    @property
    def path(self) -> Path:
        return self.folder / f"{self.machine_key}-{self.day}.json"

    def last(self, benchmark: str) -> Json:
        """Return the newest rows of a benchmark on this machine, by name."""
        for path in sorted(self.folder.glob(f"{self.machine_key}-????-??-??.json"), reverse=True):
            rows = (
                json.loads(path.read_text("utf-8"))["benchmarks"].get(benchmark, {}).get("rows", [])
            )
            if rows:
                return {row["name"]: {**row, "date": path.stem[-10:]} for row in rows}
        return {}

    def keep(self, benchmark: str, rows: list[Json]) -> None:
        """Write the rows of a benchmark; other rows of the day stay."""
        record: Json = {"benchmarks": {}}
        if self.path.is_file():
            record = json.loads(self.path.read_text("utf-8"))
        record |= {
            "machine": self.described, "device": self.setup.device, "threads": self.setup.threads,
            "quick": self.setup.quick, "date": str(self.day), "versions": versions(),
        }  # fmt: skip
        record["benchmarks"][benchmark] = {"rows": rows}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


def versions() -> dict[str, str]:
    result = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def compared(row: Row, last: Json) -> Json:
    """Return a row as JSON with the load of the machine and the same row of the last run."""
    made = {**asdict(row), "met": row.met, "load": round(os.getloadavg()[0], 1)}
    before = last.get(row.name)
    if before is not None:
        made["last"] = {
            "date": before["date"],
            "value": before["value"],
            "ratio": row.value / before["value"] if before["value"] else None,
            "outside": row.low > before["high"] or row.high < before["low"],
        }
    return made
