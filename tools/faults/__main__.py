"""``python -m tools.faults [FAMILY ...]``: look for faults at size; write docs/reliability.md.

The exit status is 1 if a fault was found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.faults.damage import damage, values
from tools.faults.harness import KINDS, Row, import_everything
from tools.faults.hostile import hostile
from tools.faults.kills import kills, writers
from tools.faults.toys import Toys, write_data

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
MARK = "<!-- rows -->\n"
"""What `python -m tools.faults` writes stands behind this line of the page."""
Family = Callable[[Toys, int, int], Iterator[Row]]
FAMILIES: dict[str, tuple[str, Family, int]] = {
    "kills": ("Killed and interrupted", kills, 100),
    "writers": ("Two at once", writers, 20),
    "damage": ("Damaged files", damage, 600),
    "values": ("Odd values", values, 600),
    "hostile": ("Hostile folders", hostile, 1000),
}


def main(words: list[str] | None = None) -> int:
    """Run the families named, keep their rows, write the page of all rows kept."""
    parser = argparse.ArgumentParser("python -m tools.faults", description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=", ".join(FAMILIES))
    parser.add_argument("--count", type=int, help="tries of each family, in place of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, default=ROOT / "runs" / "faults.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(words)
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"unknown family {', '.join(unknown)}; there are: {', '.join(FAMILIES)}")
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    import_everything()
    recorded = json.loads(options.rows.read_text()) if options.rows.is_file() else {}
    faults = 0
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        toys = write_data(Path(folder))
        for name in options.families:
            _, family, usual = FAMILIES[name]
            count = options.count or usual
            rows = []
            for row in family(toys, count, options.seed):
                rows.append(asdict(row))
                faults += len(row.faults)
                say = f"{name}: {row.what}: {row.tried} {row.unit}, {len(row.faults)} faults"
                sys.stdout.write(f"{say}\n")
            command = f"python -m tools.faults {name} --count {count} --seed {options.seed}"
            recorded[name] = {"command": command, **circumstances(), "rows": rows}
            options.rows.parent.mkdir(parents=True, exist_ok=True)
            options.rows.write_text(json.dumps(recorded, indent=1) + "\n")
            head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
            options.page.write_text(f"{head}{MARK}{table(recorded)}", encoding="utf-8")
    return int(faults > 0)


def circumstances() -> dict[str, str]:
    """Return date, machine and versions."""
    from wellposed_lab.training.folder.run_folder import environment

    described = environment([])
    names = ("wellposed", "torch", "transformers", "datasets")
    versions = ", ".join(f"{name} {described['packages'][name]}" for name in names)
    return {"date": described["date"][:10], "machine": described["cpu"], "versions": versions}


def table(recorded: Mapping[str, Any]) -> str:
    """Return the tables of the families whose rows are kept, and each fault."""
    lines = []
    for name in [name for name in FAMILIES if name in recorded]:
        (title, _, _), family = FAMILIES[name], recorded[name]
        lines += [f"\n### {title}\n", f"| what | tried | {' | '.join(KINDS)} |"]
        lines += ["|---" * (len(KINDS) + 2) + "|"]
        for row in family["rows"]:
            counts = Counter(fault["kind"] for fault in row["faults"])
            cells = " | ".join(str(counts[kind]) for kind in KINDS)
            lines.append(f"| {row['what']} | {row['tried']:,} {row['unit']} | {cells} |")
        lines.append(
            f"\n`{family['command']}`, {family['date']}, {family['machine']}; {family['versions']}."
        )
        for row in family["rows"]:
            for fault in row["faults"]:
                plain = fault["case"].encode("ascii", "backslashreplace").decode()[:160]
                lines.append(f"- {fault['kind']}: `{plain}`")
    rows = [row for family in recorded.values() for row in family["rows"]]
    tried, faults = sum(row["tried"] for row in rows), sum(len(row["faults"]) for row in rows)
    return "\n".join([*lines, f"\nIn all {tried:,} tries, {faults} faults.\n"])


if __name__ == "__main__":
    sys.exit(main())
