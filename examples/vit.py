"""Attach, train, measure and detach on a Vision Transformer."""

from __future__ import annotations

import torch
from transformers import ViTConfig, ViTForImageClassification

import wellposed as wp

# A small model and random images, so that nothing is downloaded; any ViT and any images go here.
model = ViTForImageClassification(
    ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images, labels = torch.randn(8, 3, 16, 16), torch.randint(0, 2, (8,))
print(wp.measure(model).table())

# The five lines.
penalty = wp.OrthogonalityPenalty(model, attention=1e-2, feedforward=1e-2)
for _ in range(10):
    (model(images, labels=labels).loss + penalty()).backward()
    optimizer.step()
    optimizer.zero_grad()
penalty.remove()

print(wp.measure(model).table())
