"""The affinity penalty equals ``|A^T A - I|_F^2`` of the attentions that a family's own eager code
returns, or that are formed by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from tests.support.penalized import Mixer, after_forward
from tests.support.zoo import ZOO, D, F, V
from torch import Tensor, nn

from wellposed.penalize import OrthogonalityPenalty

LENGTHS = (7, 4, 1)
LLAMA: dict[str, Any] = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": ZOO["bert"].build,
    "gpt2": ZOO["gpt2"].build,
    "llama, grouped queries": lambda: hf.LlamaModel(hf.LlamaConfig(**LLAMA)),
    "qwen2, grouped queries": lambda: hf.Qwen2Model(hf.Qwen2Config(**LLAMA)),
    "qwen3, normalised queries": lambda: hf.Qwen3Model(hf.Qwen3Config(**LLAMA, head_dim=4)),
    "t5": ZOO["t5"].build,
    "bart": ZOO["bart"].build,
    "vit": ZOO["vit"].build,
}


def inputs(model: Any) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
    """What the model reads, and how many tokens of each sequence are real (None: all)."""
    if isinstance(model, hf.ViTModel):
        return {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64)}, None
    ids = torch.randint(3, V, (len(LENGTHS), max(LENGTHS)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    given = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        given |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": mask}
    return given, LENGTHS


def self_attentions(output: Any) -> Iterator[Tensor]:
    """(batch, heads, tokens, tokens) of every layer; what a decoder reads of its encoder is no
    affinity."""
    for name in ("attentions", "encoder_attentions", "decoder_attentions"):
        yield from getattr(output, name, None) or ()


def slow(output: Any, lengths: tuple[int, ...] | None) -> float:
    total = 0.0
    for layer in self_attentions(output):
        for sequence, heads in enumerate(layer.double()):
            real = heads.shape[-1] if lengths is None else lengths[sequence]
            for affinity in heads[:, :real, :real]:
                total += float(((affinity.T @ affinity - torch.eye(real)) ** 2).sum()) / len(layer)
    return total


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_attentions_of_the_familys_own_code(
    family: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model: Any = FAMILIES[family]().double().eval()
    with torch.no_grad():  # far from uniform attention
        for name, parameter in model.named_parameters():
            reads = any(word in name for word in ("q", "k", "attn", "Attention"))
            if parameter.ndim == 2 and reads:
                parameter.normal_()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    model.set_attn_implementation(implementation)
    given, lengths = inputs(model)
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    value = after_forward(model, penalty, given)
    # Some families ask for a softmax in float32 whatever the model's dtype.
    softmax = nn.functional.softmax
    monkeypatch.setattr(
        nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x.double(), dim)
    )
    with torch.no_grad():
        shown = reference(**given, output_attentions=True)
    expected = slow(shown, lengths)
    layers = len(list(self_attentions(shown)))
    assert layers == len(penalty.terms()) == (4 if model.config.is_encoder_decoder else 2)
    assert expected > layers
    # T5 turns its logits to float32, and eager code its softmax.
    exact = implementation == "sdpa" and family != "t5"
    assert value.item() == pytest.approx(expected, rel=1e-10 if exact else 1e-5)


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
    alone = after_forward(model, penalty, {"input_ids": tokens})
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": padded, "attention_mask": mask, "position_ids": positions}
    found = after_forward(model, penalty, inputs)
    assert found.item() == pytest.approx(alone.item(), rel=1e-10)


@pytest.mark.parametrize("fused", [True, False])
def test_handwritten_softmax_is_seen(fused: bool) -> None:
    module, x = Mixer(fused=fused, dropout=0.5).double(), torch.randn(2, 5, 8).double()
    value = after_forward(module, OrthogonalityPenalty(module, affinity=1.0), {"x": x})
    q, k, _ = module.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    affinity = (q @ k.mT / 2).softmax(-1).detach()  # before dropout
    expected = (affinity.mT @ affinity - torch.eye(5)).square().sum().item() / len(x)
    assert value.item() == pytest.approx(expected, rel=1e-10)
