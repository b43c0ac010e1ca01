"""TransJect models that the tests share: sizes, settings, a batch, and layers that are not the
identity."""

from __future__ import annotations

from typing import Any, cast

import torch

from wellposed.models import TransJectConfig, TransJectModel
from wellposed.nn import TransJectBlock

SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "max_position_embeddings": 12,
    "hidden_size": 16,
    "num_hidden_layers": 3,
}
IDS, MASK = (
    torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]]),
    torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
)
SETTINGS = [
    {"num_experts": 3},
    {"num_experts": 2, "spectrum_norm": "trace", "gating": "normalized", "position": "learned"},
    {"num_experts": 2, "spectrum": "random", "residual": "sigmoid"},
    {"gating": "fixed", "tie_word_embeddings": True},
]
CONFIG = TransJectConfig(**SIZES, num_experts=2)


def blocks(model: Any) -> list[TransJectBlock]:
    body = model if isinstance(model, TransJectModel) else model.model
    return [cast(TransJectBlock, layer) for layer in body.stack.layers]


def awake(model: Any, weight: float = 1.5) -> Any:
    """Give every layer a residual weight, signs alternating, so that the model is far from the
    identity."""
    with torch.no_grad():
        for index, layer in enumerate(blocks(model)):
            layer.residual.weight.fill_(weight * (-1) ** index)
    return model.eval()
