"""What is captured equals the attention weights a model returns itself, family by family: an
independent route."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.zoo import ZOO
from torch import Tensor, nn
from transformers import PreTrainedModel

from wellposed.penalize import OrthogonalityPenalty

FAMILIES = [
    name
    for name, entry in ZOO.items()
    if isinstance(entry.build(), PreTrainedModel) and "ours" not in name
]
LENGTHS = (7, 4, 1)


def inputs(model: PreTrainedModel, padded: bool) -> dict[str, Tensor]:
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64)}
    made = {"input_ids": torch.randint(3, 30, (3, 7))}
    if padded:
        made["attention_mask"] = (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long()
    if model.config.is_encoder_decoder:
        made |= {"decoder_input_ids": torch.randint(3, 30, (3, 5))}
    return made


def distance(affinities: Tensor, lengths: tuple[int, ...]) -> float:
    """Mean over the batch of the sum over heads of |A^T A - I|_F^2 on real tokens."""
    total = 0.0
    for heads, length in zip(affinities, lengths, strict=True):
        for affinity in heads:
            real = affinity[:length, :length]
            total += (real.T @ real - torch.eye(length)).square().sum().item()
    return total / len(lengths)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_affinities_are_the_attention_weights_the_model_returns(
    name: str, padded: bool
) -> None:
    model: Any = ZOO[name].build().double().eval()
    given = inputs(model, padded)
    lengths = LENGTHS if padded and "input_ids" in given else (10**6,) * 3
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    output = model(**given)
    value = penalty()
    penalty.remove()
    model.set_attn_implementation("eager")
    returned = model(**given, output_attentions=True)
    attentions = {
        key: returned[key]
        for key in ("attentions", "encoder_attentions", "decoder_attentions")
        if key in returned
    }
    expected = 0.0
    for key, layers in attentions.items():
        for affinity in layers:
            tokens = affinity.shape[-1]
            sizes = (
                (tokens,) * 3
                if key == "decoder_attentions"
                else tuple(min(tokens, size) for size in lengths)
            )
            expected += distance(affinity, sizes)
    # Llama and kin take their eager softmax in float32 whatever the model's dtype: 2^-24 per entry.
    assert value.item() == pytest.approx(expected, rel=1e-7)
    assert output is not None


def test_learned_position_bias_of_t5_receives_gradient_from_the_penalty() -> None:
    model = ZOO["t5"].build()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    output = ZOO["t5"].run(model)
    penalty().backward()
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert table.grad is not None
    assert table.grad.abs().sum() > 0
    assert output is not None


def test_left_padding_of_a_decoder() -> None:
    model = ZOO["llama"].build().double().eval()
    tokens = torch.randint(3, 30, (1, 5))
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    output = model(input_ids=tokens)
    alone = penalty()
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=padded, attention_mask=mask, position_ids=positions)
    assert penalty().item() == pytest.approx(alone.item(), rel=1e-10)
    assert output is not None


@pytest.mark.parametrize("fused", [True, False])
def test_handwritten_softmax_is_seen(fused: bool) -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 2
            self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            if fused:
                mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            else:
                mixed = nn.functional.dropout((q @ k.mT / 2).softmax(dim=-1), 0.5) @ v
            return self.proj(mixed.transpose(1, 2).flatten(2))

    module, x = Mixer().double(), torch.randn(2, 5, 8).double()
    penalty = OrthogonalityPenalty(module, affinity=1.0)
    output = module(x)
    q, k, _ = module.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    expected = distance((q @ k.mT / 2).softmax(-1).detach(), (5, 5))  # before dropout
    assert penalty().item() == pytest.approx(expected, rel=1e-10)
    assert output.requires_grad
