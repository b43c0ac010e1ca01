#!/usr/bin/env bash
# Guess: Householder reflection adaptation keeps a weight's singular values, and `apply_GS=True`, which makes the
# vectors orthonormal by Gram-Schmidt, keeps them all the more. Like every adapter it starts as the identity.
# Fact: without it the adapter is orthogonal to rounding. With `apply_GS=True` it is not orthogonal (singular values
# of an orthogonal weight: 2.7 to 0.05 after 20 steps), and the model has changed before the first step.
# Bites: whoever picks the option for more stability, or reads HRA as "orthogonal fine-tuning" and does not measure.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import peft
import torch
from peft import HRAConfig, get_peft_model
from torch import nn

print("torch", torch.__version__, "peft", peft.__version__)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return self.layer(x)


def run(apply_gs):
    torch.manual_seed(0)
    model = Model()
    nn.init.orthogonal_(model.layer.weight)
    before = model.layer.weight.detach().clone()
    model = get_peft_model(model, HRAConfig(r=8, apply_GS=apply_gs, target_modules=["layer"]))
    start = (model(torch.eye(32)).detach().T - before).norm() / before.norm()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.005)
    for _ in range(20):
        optimizer.zero_grad()
        (model(torch.randn(8, 32)) - torch.randn(8, 32)).square().sum().backward()
        optimizer.step()
    values = torch.linalg.svdvals(model(torch.eye(32)).detach().double())
    return float(start), float(values[0]), float(values[-1])


plain = run(False)
schmidt = run(True)
for name, (start, largest, smallest) in (("plain", plain), ("apply_GS", schmidt)):
    print(f"{name}: moved at the start {start:.2g}, singular values {smallest:.4f} to {largest:.4f}")
assert plain[0] < 1e-6 and plain[1] - plain[2] < 1e-5
assert schmidt[0] > 0.1 and schmidt[1] > 1.5 and schmidt[2] < 0.5
PYTHON
