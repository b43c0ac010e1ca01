#!/usr/bin/env bash
# Guess: `AveragedModel(model, use_buffers=True)` also averages what BatchNorm counts, so it is the careful choice, and
# the averaged model keeps what `spectral_norm` promises: a norm of 1.
# Fact: the buffers are the two vectors of the power iteration. They turn while the model trains, so their average is
# short and points nowhere: the norm of the averaged layer is about 20 after 500 steps. By default (`use_buffers=False`)
# the vectors are copied, and the norm is 1.05. No warning is given.
# Bites: whoever keeps an EMA of a GAN, a robust classifier or another Lipschitz model under `spectral_norm`.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

print("torch", torch.__version__)


def norms(use_buffers):
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(32, 64)), nn.ReLU(), nn.Linear(64, 32))
    inputs, targets = torch.randn(256, 32), torch.randn(256, 32) @ torch.randn(32, 32)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=use_buffers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(500):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    model.eval()
    averaged.eval()
    layers = (model[0], averaged.module[0])
    lengths = [float(averaged.module[0].parametrizations.weight[0]._u.norm())]
    return [float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)) for layer in layers] + lengths


default, buffers = norms(False), norms(True)
for name, (live, average, length) in (("default", default), ("use_buffers=True", buffers)):
    print(f"{name}: norm of the trained layer {live:.3f}, of the average {average:.3f}; length of _u {length:.2f}")
assert default[1] < 1.3 and buffers[1] > 5 and buffers[2] < 0.9
PYTHON
