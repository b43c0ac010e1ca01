"""A small BERT, one step of training it, and an attention without softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from wellposed.penalize import OrthogonalityPenalty

ALL = {"affinity": 1e-2, "attention": 1e-2, "feedforward": 1e-2}


def bert(**options: Any) -> BertModel:
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return BertModel(config).train()


def batch() -> dict[str, Tensor]:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(1, 30, (3, 9)), "attention_mask": mask}


def step(
    model: nn.Module, penalty: OrthogonalityPenalty, inputs: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs)[0].square().mean() + penalty()
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


class Hidden(nn.Module):
    """An attention that uses no softmax, with names we know."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q_proj(x) @ self.k_proj(x).mT).exp()
        return self.o_proj(scores / scores.sum(-1, keepdim=True) @ self.v_proj(x))
