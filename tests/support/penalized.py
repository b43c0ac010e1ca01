"""A small BERT, one step of training it, and an attention without softmax."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel

ALL = {"affinity": 1e-2, "attention": 1e-2, "feedforward": 1e-2}


def bert(**options):
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return BertModel(config).train()


def batch(rows=3):
    mask = torch.ones(rows, 9, dtype=torch.long)
    mask[1, 6:] = 0
    mask[3:, 3:] = 0
    return {"input_ids": torch.randint(1, 30, (rows, 9)), "attention_mask": mask}


def after_forward(model, penalty, inputs):
    """The penalty, read while the outputs keep what it watched alive."""
    output = model(**inputs)
    value = penalty()
    del output
    return value


def step(model, penalty, inputs):
    model.zero_grad()
    loss = model(**inputs)[0].square().mean() + penalty()
    loss.backward()
    grown = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: gradient.clone() for name, gradient in grown.items()}


class Hidden(nn.Module):
    """An attention that uses no softmax, with names we know."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        scores = (self.q_proj(x) @ self.k_proj(x).mT).exp()
        return self.o_proj(scores / scores.sum(-1, keepdim=True) @ self.v_proj(x))


class Mixer(nn.Module):
    """An attention of one's own, with torch's kernel or a softmax in the open."""

    def __init__(self, *, fused=True, dropout=0.0):
        super().__init__()
        self.num_heads = 2
        self.fused = fused
        self.dropout = dropout
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        else:
            mixed = F.dropout((q @ k.mT / 2).softmax(dim=-1), self.dropout) @ v
        return self.proj(mixed.transpose(1, 2).flatten(2))
