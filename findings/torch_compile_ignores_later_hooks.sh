#!/usr/bin/env bash
# Guess: a module hook acts on a compiled model as on a plain one, whenever it is registered; or else neither adding
# nor removing one after the first call has an effect.
# Fact: a hook that is there at the first call acts, and when it is removed the compiled model notices. A hook that is
# registered after the first call is left out, in silence, also one that changes the values; a parametrisation that is
# registered then is seen. The plain model and the compiled one disagree from there on.
# Bites: whoever watches, clips or steers activations by hooks of a model that has already run compiled.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch import nn
from torch.nn.utils import parametrizations

print("torch", torch.__version__)
torch.manual_seed(0)
x = torch.randn(2, 4)


def tenfold(_module, args):
    return (args[0] * 10,)


def compiled_model():
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4))
    return model, torch.compile(model, backend="eager")


def agree(model, compiled):
    return torch.allclose(model(x), compiled(x))


model, compiled = compiled_model()
compiled(x)
model[0].register_forward_pre_hook(tenfold)
added = agree(model, compiled)

model, compiled = compiled_model()
handle = model[0].register_forward_pre_hook(tenfold)
first = agree(model, compiled)
handle.remove()
removed = agree(model, compiled)

model, compiled = compiled_model()
compiled(x)
parametrizations.spectral_norm(model[0])
parametrised = agree(model, compiled)

print("compiled == plain: hook before the first call", first, "| removed later", removed)
print("compiled == plain: hook added later", added, "| parametrisation added later", parametrised)
assert first and removed and parametrised and not added
PYTHON
