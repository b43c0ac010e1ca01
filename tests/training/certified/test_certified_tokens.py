"""Certified accuracy of next tokens: each prediction by itself, attacked by an ascent that knows
nothing of margins."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wellposed.certification import certify
from wellposed.models import WellposedConfig, WellposedForCausalLM, input_vectors
from wellposed.training.certified.accuracy import certified_accuracy

TOKENS, WORDS = 7, 6


def language_model(seed: int, heads: int) -> WellposedForCausalLM:
    torch.manual_seed(seed)
    config = WellposedConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=16,
        max_position_embeddings=TOKENS, attention="ball", feedforward="maxmin", residual="convex", norm="none",
        unit_embeddings=True, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return WellposedForCausalLM(config).double().eval()


def texts() -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (5, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def right_and_radii(
    model: WellposedForCausalLM, batch: dict[str, Tensor]
) -> tuple[list[bool], list[float]]:
    """One by one: whether the token after position i is predicted, and its certified radius."""
    certificate = certify(model, seq_len=TOKENS)
    right, radii = [], []
    with torch.no_grad():
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            logits = model(input_ids=ids[None], attention_mask=mask[None]).logits[0]
            for i in range(int(mask.sum()) - 1):
                right.append(int(logits[i].argmax()) == int(ids[i + 1]))
                radii.append(float(certificate.radius(logits[i], ids[i + 1])))
    return right, radii


@pytest.mark.parametrize("heads", [1, 2])
def test_shares_are_those_of_the_predictions_one_by_one(heads: int) -> None:
    model, batch = language_model(0, heads), texts()
    right, radii = right_and_radii(model, batch)
    sizes = [0.0, 1e-3, 0.02, 0.1, 1.0]
    curve = certified_accuracy(
        model, [batch], certify(model, seq_len=TOKENS), radii=sizes, attack_steps=4
    )
    assert curve.predictions == len(right) == 4 * (TOKENS - 1) + 3
    assert curve.examples == 5
    for size, sure, seen in zip(sizes, curve.certified, curve.attacked, strict=True):
        held = [ok and (r > size or size == 0) for ok, r in zip(right, radii, strict=True)]
        assert sure == pytest.approx(sum(held) / len(held))
        assert sure <= seen


def test_no_certified_prediction_falls_to_an_attack_on_it_alone() -> None:
    """Gradient ascent of one prediction at a time, from several starts, at its own radius."""
    largest = 0.0
    for seed in range(3):
        model, batch = language_model(seed, 2), texts()
        with torch.no_grad():
            model.model.embeddings.token.weight.mul_(
                10.0 ** (seed - 1)
            )  # unit embeddings divide it out
            model.lm_head.weight.mul_(10.0 ** (3 * (seed - 1)))
        certificate = certify(model, seq_len=TOKENS)
        vectors = input_vectors(model, batch["input_ids"][1:2]).detach()
        clean = model(inputs_embeds=vectors).logits[0].detach()
        for i in range(TOKENS - 1):
            label = int(clean[i].argmax())
            radius = float(certificate.radius(clean[i], torch.tensor(label)))
            others = [k for k in range(WORDS) if k != label]
            margin = min(float(clean[i, label] - clean[i, k]) for k in others)
            for start in range(4):
                generator = torch.Generator().manual_seed(start)
                delta = torch.randn(vectors.shape, generator=generator, dtype=torch.float64)
                for _ in range(25):
                    delta = radius * delta / delta.norm(dim=-1, keepdim=True).clamp_min(1e-300)
                    delta.requires_grad_()
                    logits = model(inputs_embeds=vectors + delta).logits[0, i]
                    left = (logits[label] - logits[others]).amin()
                    (slope,) = torch.autograd.grad(left, delta)
                    delta = delta.detach() - radius * slope / slope.norm(
                        dim=-1, keepdim=True
                    ).clamp_min(1e-300)
                largest = max(largest, 1.0 - float(left.detach()) / margin)
                assert float(left.detach()) > 0.0
                assert math.isfinite(radius)
    print(f"largest share of a margin used up at the certified radius: {largest:.3f}")
    assert largest <= 1.0
