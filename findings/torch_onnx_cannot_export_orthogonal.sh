#!/usr/bin/env bash
# Guess: `torch.onnx.export` of a model in evaluation folds parametrised weights into constants, as they depend on no
# input; so one parametrisation exports like another.
# Fact: `spectral_norm` and `weight_norm` become one Gemm with a constant. `orthogonal` in its default map is an error
# of conversion, as its matrix exponential has no ONNX operator and is converted before anything is folded. The
# remedy is `remove_parametrizations(layer, "weight")` on a copy.
# Bites: whoever trains with orthogonal layers and finds out at deployment.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import copy
import logging

logging.disable(logging.ERROR)
import onnx
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

print("torch", torch.__version__, "onnx", onnx.__version__)


def operators(model):
    program = torch.onnx.export(model.eval(), (torch.randn(2, 8),), dynamo=True, verbose=False)
    return [node.op_type for node in program.model.graph]


for wrap in (parametrizations.spectral_norm, parametrizations.weight_norm):
    seen = operators(nn.Sequential(wrap(nn.Linear(8, 8))))
    print(wrap.__name__, seen)
    assert seen == ["Gemm"]

model = nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)))
try:
    operators(model)
except Exception as error:
    print("orthogonal:", type(error).__name__, "matrix_exp" in f"{error} {error.__cause__}")
else:
    raise AssertionError("orthogonal was exported")

plain = copy.deepcopy(model)
parametrize.remove_parametrizations(plain[0], "weight")
seen = operators(plain)
print("without the parametrisation:", seen)
assert seen == ["Gemm"]
PYTHON
