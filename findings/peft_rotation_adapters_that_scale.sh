#!/usr/bin/env bash
# Guess: PEFT's adapters named after rotations (PSOFT: principal subspace orthogonal fine-tuning; RoAd: 2-D rotary
# adaptation) keep the singular values of the weight that they adapt.
# Fact: PSOFT trains two vectors of magnitudes by default, RoAd a factor a pair in every variant. On an orthogonal
# weight 20 steps leave singular values of 0.14 to 1.0 (PSOFT) and 0.01 to 0.4 (RoAd). PSOFT with `psoft_mag_a=False,
# psoft_mag_b=False` keeps them to rounding; RoAd has no such option.
# Bites: whoever chooses an adapter so that pretrained spectra, or a Lipschitz bound, survive the fine-tuning.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import peft
import torch
from peft import PsoftConfig, RoadConfig, get_peft_model
from torch import nn

print("torch", torch.__version__, "peft", peft.__version__)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return self.layer(x)


def values_after(config):
    torch.manual_seed(0)
    model = Model()
    nn.init.orthogonal_(model.layer.weight)
    model = get_peft_model(model, config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.005)
    for _ in range(20):
        optimizer.zero_grad()
        (model(torch.randn(8, 32)) - torch.randn(8, 32)).square().sum().backward()
        optimizer.step()
    values = torch.linalg.svdvals(model(torch.eye(32)).detach().double())
    return float(values[-1]), float(values[0])


rows = {
    "PSOFT": PsoftConfig(r=8, target_modules=["layer"]),
    "PSOFT without magnitudes": PsoftConfig(
        r=8, psoft_mag_a=False, psoft_mag_b=False, target_modules=["layer"]
    ),
    **{
        f"RoAd {variant}": RoadConfig(variant=variant, group_size=32, target_modules=["layer"])
        for variant in ("road_1", "road_2", "road_4")
    },
}
for name, config in rows.items():
    smallest, largest = values_after(config)
    print(f"{name}: singular values {smallest:.4f} to {largest:.4f}")
    assert (largest - smallest < 1e-5) == (name == "PSOFT without magnitudes"), name
    assert largest - smallest < 1e-5 or smallest < 0.5, name
PYTHON
