"""The main job in a few minutes: four Transformers side by side on short ListOps and on English prose.

Everything it does, a user can type: it runs the three commands it prints.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path

from wellposed.cli import main as wellposed

# Models this small gain nothing from a second thread, and two threads wait for each other when a core is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

VARIANTS = "post_ln,pre_ln,rezero,oc3:1e-4"
LISTOPS = (
    "compare listops --max-depth 3 --max-args 4 --max-length 40 --num-train 8000 --num-valid 500 --num-test 500 "
    f"--variants {VARIANTS} --seeds 2 --steps 400 --warmup-steps 50 --eval-every 100 --checkpoint-every 200 "
    "--log-every 50 --model.hidden-size 64 --resume auto"
)
CHAR_LM = (
    f"compare char_lm --seq-len 128 --limit-chars 400000 --variants {VARIANTS} --seeds 2 --steps 200 --batch-size 16 "
    "--learning-rate 3e-3 --warmup-steps 40 --eval-every 100 --checkpoint-every 200 --log-every 50 "
    "--model.hidden-size 64 --resume auto"
)


def main() -> int:
    """Run the comparison on both tasks and write one report about them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the runs and the report")
    out = parser.parse_args().out
    began = time.perf_counter()
    for command in (
        f"{LISTOPS} --out {out / 'listops'}",
        f"{CHAR_LM} --out {out / 'char_lm'}",
        f"report {out / 'listops'} {out / 'char_lm'} --out {out / 'report.html'}",
    ):
        print(f"\n$ wellposed {command}", flush=True)
        status = wellposed(shlex.split(command))
        if status:
            return status
    print(f"\ndone in {time.perf_counter() - began:.0f} s; open {out / 'report.html'} in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
