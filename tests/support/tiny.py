"""Models of this package that are small enough to test, and a batch for them."""

import torch

from wellposed.models import WellposedConfig

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])


def tiny(kind, **changes):
    torch.manual_seed(0)
    return kind(WellposedConfig(**{**SIZES, **changes}))


SIZES = dict(vocab_size=13, max_position_embeddings=10, hidden_size=12, num_attention_heads=3)
