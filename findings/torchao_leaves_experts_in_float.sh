#!/usr/bin/env bash
# Guess: `quantize_(model, Int8WeightOnlyConfig())` makes the matrices of a Transformer 8-bit, embeddings aside.
# Fact: it takes `nn.Linear` alone. Experts of transformers 5 are one stack of three dimensions, and stay float32 in
# silence: nearly all weights of a Mixtral. Of `nn.TransformerEncoderLayer` the whole attention stays, `out_proj` too,
# which is a subclass of Linear. A parametrised layer (`spectral_norm`, `orthogonal`) raises a KeyError.
# Bites: whoever reports the size, speed or error of a quantised mixture of experts.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 torchao==0.18.0

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import importlib.metadata
import logging

logging.disable(logging.ERROR)
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import MixtralConfig, MixtralForCausalLM

print({name: importlib.metadata.version(name) for name in ("torch", "transformers", "torchao")})
torch.manual_seed(0)


def is_plain(parameter):
    return type(parameter) is nn.Parameter


config = MixtralConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=64, num_local_experts=4,
)
model = MixtralForCausalLM(config)
quantize_(model, Int8WeightOnlyConfig())
layer = dict(model.model.layers[0].named_parameters())
left = sum(p.numel() for p in layer.values() if is_plain(p))
total = sum(p.numel() for p in layer.values())
print("Mixtral, left in float:", [name for name, p in layer.items() if is_plain(p) and p.ndim > 1])
print(f"that is {left / total:.0%} of a layer's weights")
assert is_plain(layer["mlp.experts.gate_up_proj"]) and is_plain(layer["mlp.experts.down_proj"])
assert not is_plain(layer["self_attn.q_proj.weight"]) and left > 0.8 * total

encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
quantize_(encoder, Int8WeightOnlyConfig())
left = [name for name, p in encoder.named_parameters() if is_plain(p) and p.ndim > 1]
print("TransformerEncoderLayer, left in float:", left)
assert left == ["self_attn.in_proj_weight", "self_attn.out_proj.weight"]

for wrap in (parametrizations.spectral_norm, parametrizations.orthogonal):
    try:
        quantize_(nn.Sequential(wrap(nn.Linear(32, 32))), Int8WeightOnlyConfig())
    except KeyError as error:
        print(f"{wrap.__name__}: KeyError {error}")
    else:
        raise AssertionError(wrap.__name__)
PYTHON
