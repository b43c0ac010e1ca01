"""kill -9, ``--resume auto``, run to the end: every bit as in the run that was not killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_killed_at_random_moments_and_at_the_last_renames(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "support" / "kill_and_resume.py"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) >= 3 + 2 * 3  # of env.json, manifest.json and result.json at least
    assert any(-9 in outcome["kills"] for outcome in outcomes)
    for outcome in outcomes:
        assert outcome["resumed"] == 0, (outcomes, done.stderr)
        assert outcome["different"] == [], outcomes
        assert outcome["same_rows"], outcomes
        assert outcome["litter"] == [], outcomes
        assert outcome["recorded"], outcomes
