"""`constrain_` and penalties on a model after `fully_shard` do what they do in one process, for the
families of the README: fused weights, experts in stacks, shards of unequal size, ranks without a part."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

README = [
    "bert",
    "distilbert",
    "gpt2",
    "llama",
    "phi3",
    "vit",
    "t5",
    "bart",
    "torch encoder",
    "mixtral",
]
UNEVEN = ["phi3", "mixtral", "gpt oss", "torch encoder"]
"""Three ranks cut 32 and 48 rows unevenly; of four, one has none of the three experts."""


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "families"), [(2, README), (3, UNEVEN[:1]), (4, UNEVEN[1:])])
def test_every_family_is_held_and_penalised_in_shards_as_in_one_process(
    processes, families, tmp_path
):
    worker = [sys.executable, "-m", "tests.support.sharded_families_worker"]
    subprocess.run(
        [*worker, str(tmp_path), str(processes), *families],
        check=True, timeout=500, cwd=Path(__file__).parents[1], capture_output=True,
    )  # fmt: skip
    for rank in range(processes):
        rows = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert {name.split(", ")[0] for name in rows} == {*families}
        for name, row in rows.items():
            assert "alone" not in row, (name, row)
            tolerance = 2**-7 if "bfloat16" in name else 1e-12
            assert row["held"] > 0, name
            assert row["missing"] == [], name
            assert row["weights"] <= tolerance, (name, row)
            assert row["errors"] <= tolerance, (name, row)
            assert row["moved"] > 1e-4, (name, row)
            assert row["restored"] == "", (name, row)
            steered = "orthogonal" in name
            exchanges = {"alltoall_base_": 4 if steered else 2}
            assert row["counts"] in ({}, exchanges), (name, row)
