"""Penalise every attention weight of a GPT-2 in a loop of one's own around Accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import wellposed as wp

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
tokens = torch.randint(0, 100, (8, 12))

# One line makes the penalty, one adds it to the loss.
penalty = wp.OrthogonalityPenalty(
    accelerator.unwrap_model(model), attention=1e-3, attention_mode="separate"
)
for step in range(20):
    optimizer.zero_grad()
    term = penalty()
    accelerator.backward(model(tokens, labels=tokens).loss + term)
    optimizer.step()
    if step in (0, 19):
        print(f"step {step:>2}: penalty {term.item():.4f}")
