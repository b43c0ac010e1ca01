#!/usr/bin/env bash
# Guess: torch.manual_seed sets one generator where only the CPU is used; its time does not depend on who calls it.
# Fact: it keeps a request to seed CUDA, XPU and MTIA for later, and formats the whole call stack, source lines
# included, for each: three times a call, until that device is used. torch.default_generator.manual_seed does none of it.
# Bites: whoever seeds often on a CPU (each batch of an evaluation, each example, each layer, each test): the call takes
# longer the deeper its caller is, a hundred times the generator's and more, inside a Trainer or a test runner.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import time
import traceback

import torch

print("torch", torch.__version__)
formatted = []
format_stack = traceback.format_stack
traceback.format_stack = lambda *args, **keywords: formatted.append(1) or format_stack(*args, **keywords)
torch.default_generator.manual_seed(0)
assert not formatted, formatted
torch.manual_seed(0)
print("stacks formatted by one torch.manual_seed:", len(formatted))
assert len(formatted) == 3, formatted
traceback.format_stack = format_stack


def microseconds(seed, depth):
    if depth:
        return microseconds(seed, depth - 1)
    began = time.perf_counter()
    for number in range(100):
        seed(number)
    return (time.perf_counter() - began) * 1e4


for depth in (0, 50, 100):
    every, one = (microseconds(seed, depth) for seed in (torch.manual_seed, torch.default_generator.manual_seed))
    print(f"{depth} calls deep: torch.manual_seed {every:.0f} us, default_generator.manual_seed {one:.1f} us")
    assert every > 10 * one, (every, one)
PYTHON
