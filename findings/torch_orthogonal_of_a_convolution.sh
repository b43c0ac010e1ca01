#!/usr/bin/env bash
# Guess: `parametrizations.orthogonal` on a convolution gives an orthogonal (or at least 1-Lipschitz) layer, or the
# flattened kernel (out, in x width) has orthonormal rows.
# Fact: it takes the kernel as a batch of matrices (in, width), one for each output channel, and makes each of them
# orthonormal. The layer stretches by up to 2.9 (8 channels) or 4.0 (width 5), and the flattened kernel has singular
# values of 0.8 to 3. No warning is given.
# Bites: whoever builds a Lipschitz or invertible network with convolutions by the parametrisation of that name.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import math

import torch
from torch import nn
from torch.nn.utils import parametrizations

print("torch", torch.__version__)


def norm_of_map(layer):
    """Largest singular value of the circular convolution, by its Fourier transform."""
    kernel = layer.weight.detach().to(torch.complex128)
    largest = 0.0
    for k in range(400):
        phases = torch.exp(1j * torch.arange(kernel.shape[2]) * (math.pi * k / 399))
        largest = max(largest, float(torch.linalg.matrix_norm(kernel @ phases.to(kernel.dtype), 2)))
    return largest


for channels, width in ((8, 3), (8, 5), (32, 3)):
    torch.manual_seed(0)
    layer = nn.Conv1d(channels, channels, width, padding=width // 2, padding_mode="circular", bias=False)
    parametrizations.orthogonal(layer)
    slice_ = layer.weight[0].detach().double()
    is_orthonormal = torch.allclose(slice_.T @ slice_, torch.eye(width).double(), atol=1e-5)
    flat = torch.linalg.svdvals(layer.weight.detach().double().flatten(1))
    x = torch.randn(256, channels, 64)
    attained = float((layer(x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)).max().detach())
    norm = norm_of_map(layer)
    print(
        f"{channels} channels, width {width}: each (in, width) orthonormal: {is_orthonormal};"
        f" flattened {flat[-1]:.2f} to {flat[0]:.2f}; norm of the layer {norm:.2f}, attained {attained:.2f}"
    )
    assert is_orthonormal and norm > 2 and attained > 1.5
PYTHON
