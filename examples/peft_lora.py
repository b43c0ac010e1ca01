"""Penalise the weight that LoRA factors make, not the frozen one beneath them."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import wellposed as wp

torch.manual_seed(0)
shape = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
bert = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=2, **shape))
model = get_peft_model(bert, LoraConfig(r=4, target_modules=["query", "key"], task_type="SEQ_CLS"))
tokens, labels = torch.randint(0, 100, (8, 12)), torch.arange(8) % 2
optimizer = torch.optim.AdamW(
    (weight for weight in model.parameters() if weight.requires_grad), lr=1e-2
)

# Of W + scale B A: the adapters learn, the weights below them are frozen.
penalty = wp.OrthogonalityPenalty(model, key=1e-2, query=1e-2, form="paper")
first = penalty().item()
for _ in range(20):
    optimizer.zero_grad()
    (model(input_ids=tokens, labels=labels).loss + penalty()).backward()
    optimizer.step()
print(f"penalty of the merged weights: {first:.4f} -> {penalty().item():.4f}")
