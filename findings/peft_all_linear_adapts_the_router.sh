#!/usr/bin/env bash
# Guess: LoRA with `target_modules="all-linear"` takes the `nn.Linear` layers of a Mixtral: its attention. Experts and
# router of transformers 5 are plain parameters, not Linear layers, and need `target_parameters`.
# Fact: it adapts the experts and the *router* as well, through a wrapper of parameters; an expert stack gets one
# adapter for all its experts, of rank r an expert. Training then moves which expert a token goes to.
# Bites: whoever keeps the router fixed in fine-tuning, or counts the parameters that an adapter trains.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import logging

logging.disable(logging.ERROR)
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
config = MixtralConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=64, num_local_experts=4,
)
torch.manual_seed(0)
model = MixtralForCausalLM(config)
mlp = model.model.layers[0].mlp
linear = [name for name, module in mlp.named_modules() if isinstance(module, nn.Linear)]
print("Linear layers in the mixture:", linear)
assert linear == []

adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
trained = {
    name.split("layers.0.")[-1]: tuple(parameter.shape)
    for name, parameter in adapted.named_parameters()
    if parameter.requires_grad
}
for name, shape in trained.items():
    print(name, shape)
assert "mlp.gate.lora_A.default.weight" in trained
assert any(name.startswith("mlp.experts") for name in trained)
PYTHON
