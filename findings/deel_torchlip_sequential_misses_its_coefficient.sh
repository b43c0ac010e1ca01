#!/usr/bin/env bash
# Guess: `Sequential(..., k_coef_lip=4)` of deel-torchlip makes a network whose Lipschitz constant is 4, as it is
# documented ("the Lipschitz coefficient to ensure globally on the model"), and layers share it evenly.
# Fact: each of three modules is given the cube root of 4, but linear layers were normalised when they were made, and
# only the activation applies it: the network stretches by 1.59 at most. Without an activation that scales, it is 1.
# The bound of 4 is true, and not reached; margins that are divided by 4 are 2.5 times too small. `k_coef_lip=4` of a
# single layer is applied.
# Bites: whoever compares certified radii of networks that were built with k_coef_lip other than 1.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 deel-torchlip==1.0.5

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import importlib.metadata

import torch
from deel import torchlip
from torch.autograd.functional import jacobian

print("torch", torch.__version__, "deel-torchlip", importlib.metadata.version("deel-torchlip"))


def largest_stretch(layers, bound):
    torch.manual_seed(0)
    model = torchlip.Sequential(*layers(), k_coef_lip=bound).train()
    for _ in range(20):
        model(torch.randn(4, 8))
    model.eval()
    points = torch.randn(50, 8)
    norms = [torch.linalg.matrix_norm(jacobian(lambda x: model(x[None])[0], x), 2) for x in points]
    return float(max(norms))


def linear():
    return torchlip.SpectralLinear(8, 8)


KINDS = {
    "linear, GroupSort, linear": lambda: (linear(), torchlip.GroupSort2(), linear()),
    "linear, linear": lambda: (linear(), linear()),
}
seen = {}
for name, layers in KINDS.items():
    for bound in (1.0, 4.0):
        seen[name, bound] = largest_stretch(layers, bound)
        print(f"{name}, k_coef_lip={bound:g}: largest stretch {seen[name, bound]:.3f}")
alone = torchlip.SpectralLinear(8, 8, k_coef_lip=4.0).eval()
stretch = float(torch.linalg.matrix_norm(alone.weight.detach(), 2))
print(f"one layer with k_coef_lip=4: {stretch:.3f}")
assert 1.5 < seen["linear, GroupSort, linear", 4.0] < 1.7
assert abs(seen["linear, linear", 4.0] - 1) < 1e-3 and abs(stretch - 4) < 1e-3
PYTHON
