#!/usr/bin/env bash
# Guess: `mlp.experts.gate_up_proj` of transformers 5 has one layout in all families, so that one function can take a
# matrix of one expert out of it.
# Fact: Mixtral has (experts, 2 x width, hidden), gate first; Llama 4 and Aria have its transpose; gpt-oss the transpose
# with gate and up interleaved column by column. If hidden = 2 x width the shape does not tell them apart. The script
# reads each layout off the gradient of one output unit.
# Bites: whoever measures, constrains, merges or adapts single experts by name and shape.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import logging

logging.disable(logging.ERROR)
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__)
SIZES = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}
FAMILIES = {
    "mixtral": {"num_local_experts": 2},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 16},
    "aria_text": {"moe_num_experts": 2},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2},
}


def lines_of_one_unit(family):
    """Return the axis and the lines of gate_up_proj that reach unit 0 of an expert."""
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    experts = next(module for name, module in model.named_modules() if name.endswith("experts"))
    with torch.no_grad():
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.3)
        down = experts.down_proj
        # Only unit 0 of each expert reaches the output: (experts, hidden, width) or its transpose.
        kept = torch.zeros_like(down)
        if down.shape[1] == 32:
            kept[:, :, 0] = 1
        else:
            kept[:, 0, :] = 1
        down.mul_(kept)
    model(torch.arange(12)[None]).logits.square().sum().backward()
    gradient = experts.gate_up_proj.grad.abs().sum(0)
    by_row = (gradient.sum(1) > 0).nonzero().flatten().tolist()
    by_column = (gradient.sum(0) > 0).nonzero().flatten().tolist()
    shape = tuple(experts.gate_up_proj.shape)
    return (shape, "rows", by_row) if len(by_row) == 2 else (shape, "columns", by_column)


seen = {family: lines_of_one_unit(family) for family in FAMILIES}
for family, (shape, axis, lines) in seen.items():
    print(f"{family}: gate_up_proj {shape}, unit 0 is {axis} {lines}")
assert {shape for shape, *_ in seen.values()} == {(2, 32, 32)}
assert {family: row[1:] for family, row in seen.items()} == {
    "mixtral": ("rows", [0, 16]),
    "llama4_text": ("columns", [0, 16]),
    "aria_text": ("columns", [0, 16]),
    "gpt_oss": ("columns", [0, 1]),
}
PYTHON
