#!/usr/bin/env bash
# Guess: torch_compile=True of one Trainer compiles the model of that Trainer; an Accelerator() that is made afterwards
# without options compiles nothing, as in a fresh process.
# Fact: the choice stays in accelerate's state of the process, so each later Accelerator() compiles what it prepares,
# until another Trainer is made or the state is reset.
# Bites: notebooks, sweeps and test suites that mix a Trainer with loops of their own: timings, hooks and tracebacks of
# the second model are those of a compiled one, and nothing says so.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 \
    transformers==5.23.0 accelerate==1.15.0

FOLDER=$folder "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import os

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import nn

print("torch", torch.__version__, "transformers", transformers.__version__, "accelerate", accelerate.__version__)


def prepared():
    return type(accelerate.Accelerator(cpu=True).prepare(nn.Linear(2, 2))).__name__


def make_trainer(**options):
    arguments = transformers.TrainingArguments(os.environ["FOLDER"], use_cpu=True, report_to=[], **options)
    transformers.Trainer(nn.Linear(2, 2), arguments)


kinds = [prepared()]
make_trainer(torch_compile=True, torch_compile_backend="eager")
kinds.append(prepared())
make_trainer()
kinds.append(prepared())
make_trainer(torch_compile=True, torch_compile_backend="eager")
AcceleratorState._reset_state()
kinds.append(prepared())
print("before | after a compiled Trainer | after a plain one | after a reset:", " | ".join(kinds))
assert kinds == ["Linear", "OptimizedModule", "Linear", "Linear"], kinds
PYTHON
