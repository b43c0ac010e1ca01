"""Keep feed-forward weights of a GPT-2 exactly orthogonal while it learns, and penalise its keys
and affinities."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import wellposed as wp

# A small model and random text, so that nothing is downloaded; any GPT-2 and any tokens go here.
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=100,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 100, (4, 16))

# The five lines: keys lie in one fused weight with queries and values here, and are found in it.
penalty = wp.OrthogonalityPenalty(model, affinity=1e-4, key=1e-2, form="paper")
handle = wp.constrain_(model, optimizer, where="*.mlp.c_proj")
for _ in range(10):
    (model(tokens, labels=tokens).loss + penalty()).backward()
    optimizer.step()
    optimizer.zero_grad()

print("error of the constrained weights:", handle.error())
print(wp.measure(model, tokens).table())
