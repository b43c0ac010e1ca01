"""The harness of faults at its smallest: nothing is found in the package, and what is planted is
found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FAMILIES = {"kills", "damage", "full disk", "two writers", "clock", "fuzz", "hostile"}


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the harness forks and reads /proc"
)
def test_every_family_at_its_smallest(tmp_path: Path) -> None:
    script = Path(__file__).with_name("small.py")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "toys")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == []
    assert {name.partition(":")[0] for name in found["tried"]} == FAMILIES
    assert all(found["tried"].values()), found["tried"]
    assert found["limits"] == ["hung", "crashed", "crashed"]
    assert found["fuzz"] == ["KeyError", "ValueError"]
    assert found["kills"] == ["wrong", "wrong"]
    tried = sum(found["tried"].values())
    assert f"In all {tried:,} tries, 0 faults." in found["page"]
