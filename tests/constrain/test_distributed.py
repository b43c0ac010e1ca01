"""One process, DDP x 2 and FSDP2 x 2 train the same constrained weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
def test_ddp_and_fsdp2_train_as_one_process_does(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "constrain_worker.py"
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    pairs = [("ddp", "single"), ("fsdp2", "single")]
    pairs += [(f"fsdp2 {how}", f"single {how}") for how in ("bf16", "decay")]
    for to in ("spectral", "columns"):
        pairs += [(f"{way} {to}", f"single {to}") for way in ("ddp", "fsdp2")]
    for kind, reference in pairs:
        half = "bf16" in kind
        for found in ranks:
            losses = ranks[0][reference]["losses"]
            assert found[kind]["losses"] == pytest.approx(losses, rel=0.03 if half else 1e-5)
            assert max(found[kind]["errors"].values()) <= (4e-3 if half else 1e-5)
            assert len(found[kind]["errors"]) == 3
            if not half:
                for name, value in found[kind]["weights"].items():
                    expected = torch.tensor(ranks[0][reference]["weights"][name])
                    assert torch.allclose(torch.tensor(value), expected, atol=2e-5), (kind, name)
        assert ranks[0][kind]["weights"] == ranks[1][kind]["weights"], kind
    # The mark of Lie coordinates travels with a sharded optimizer checkpoint: one square weight has
    # it.
    assert ranks[0]["fsdp2"]["marks"] == 1
