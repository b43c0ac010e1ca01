#!/usr/bin/env bash
# Guess: `save_file({"a": z.conj()})` saves the conjugate, as `torch.save` and `torch.distributed.checkpoint` do, or
# refuses it, as it refuses tensors that are transposed or share memory.
# Fact: torch conjugates by setting a bit, and safetensors writes the memory below: the file holds z. Nothing is
# said, and the file loads without a complaint.
# Bites: whoever saves complex weights or tables (rotary codes, state-space models, Fourier layers) after `.conj()`.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0

FOLDER="$folder" "$folder/venv/bin/python" - <<'PYTHON'
import os

import safetensors
import torch
from safetensors.torch import load_file, save_file

print("torch", torch.__version__, "safetensors", safetensors.__version__)
torch.manual_seed(0)
path = os.environ["FOLDER"] + "/file"
number = torch.randn(3, dtype=torch.complex64)
conjugate = number.conj()
assert not torch.equal(conjugate, number)

save_file({"a": conjugate}, path)
loaded = load_file(path)["a"]
print("safetensors: the conjugate", torch.equal(loaded, conjugate), "- the original", torch.equal(loaded, number))
assert torch.equal(loaded, number)

torch.save(conjugate, path)
print("torch.save: the conjugate", torch.equal(torch.load(path), conjugate))
assert torch.equal(torch.load(path), conjugate)

save_file({"a": conjugate.resolve_conj()}, path)
print("safetensors after resolve_conj(): the conjugate", torch.equal(load_file(path)["a"], conjugate))
assert torch.equal(load_file(path)["a"], conjugate)

try:
    save_file({"a": torch.randn(2, 3).T}, path)
except ValueError as error:
    print("a transposed tensor is refused:", str(error)[:60])
else:
    raise AssertionError("a transposed tensor was saved")
PYTHON
