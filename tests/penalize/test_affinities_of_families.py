"""The affinity penalty of real families equals ``|A^T A - I|_F^2`` of the attentions their own
eager code returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
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
            if parameter.ndim == 2 and any(
                word in name for word in ("q", "k", "attn", "Attention")
            ):
                parameter.normal_()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    model.set_attn_implementation(implementation)
    given, lengths = inputs(model)
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    output = model(**given)
    value = penalty()
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
    del output
