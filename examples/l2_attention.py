"""Put L2 attention into a BERT, train it, save it and load it again."""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification

import wellposed as wp

# A small model and random texts, so that nothing is downloaded; any model whose attention has a
# name goes here.
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
tokens, labels = torch.randint(0, 100, (8, 16)), torch.randint(0, 2, (8,))

# The two lines: a model, and another attention in it.
model = BertForSequenceClassification(config)
wp.integrations.set_attention_(model, "wellposed_l2")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(10):
    model(tokens, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model.eval()
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    # config.json names the attention.
    again = BertForSequenceClassification.from_pretrained(folder).eval()
    print("loads as it was saved:", torch.equal(again(tokens).logits, model(tokens).logits))
