#!/usr/bin/env bash
# Guess: activation_checkpointing_enable() and then activation_checkpointing_disable() leave a model as it was.
# Fact: for every model of tokens, adapters or not, enabling registers a forward hook on the input embedding that makes
# its output require a gradient; disabling removes it only beside an adapter. Each further call adds one more, and
# disable_input_require_grads() removes the newest alone. A model of frozen weights builds a graph from then on.
# Bites: whoever checkpoints for a while (a training phase, then scores by the frozen model): activations stay in memory
# outside no_grad, and .numpy() on an output fails; and tools that judge a model by its hooks, such as exporters.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)).requires_grad_(False).eval()
ids = torch.tensor([[3, 4, 5]])


def state():
    """Return the number of hooks on the embedding, and whether an output of the frozen model has a graph."""
    return len(model.get_input_embeddings()._forward_hooks), model(input_ids=ids).logits.requires_grad


seen = {"at first": state()}
model.activation_checkpointing_enable()
model.activation_checkpointing_disable()
seen["enabled and disabled"] = state()
for _ in range(3):
    model.activation_checkpointing_enable()
    model.activation_checkpointing_disable()
seen["four times"] = state()
model.disable_input_require_grads()
seen["disable_input_require_grads()"] = state()
for name, (hooks, has_graph) in seen.items():
    print(f"{name}: {hooks} hooks on the embedding, output of frozen weights requires grad: {has_graph}")
assert [*seen.values()] == [(0, False), (1, True), (4, True), (3, True)], seen
PYTHON
