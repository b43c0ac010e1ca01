"""Variants whose weights stay in a set."""

from __future__ import annotations

from dataclasses import replace

from wellposed_lab.compare.variants._parts import baseline, constrained
from wellposed_lab.compare.variants._registry import VARIANTS
from wellposed_lab.training.config import RunConfig

TRANSFORMER_WEIGHTS = ("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj", "*.up_proj", "*.down_proj")


@VARIANTS.register("orthogonal")
def orthogonal(base: RunConfig) -> RunConfig:
    """post_ln, all layer matrices orthogonal (Sengupta et al. 2023); with --from: queries and keys.

    This moves pretrained weights far, so they need more training than a fine-tuning.
    """
    return constrained(
        baseline(base), ("query", "key") if base.start.model else TRANSFORMER_WEIGHTS
    )


@VARIANTS.register("spectral")
def spectral(base: RunConfig, radius: float = 1.0) -> RunConfig:
    """post_ln (with --from: plain) with |W|_2 at most 1 (or value) x sqrt(fan_out / fan_in) for all
    layer matrices."""
    where = ("query", "key", "value", "output", "feedforward_in", "feedforward_out")
    return constrained(baseline(base), where, to="spectral", bound=f"rms:{radius:g}")


@VARIANTS.register("sigma_reparam")
def sigma_reparam(base: RunConfig) -> RunConfig:
    """post_ln (with --from: plain) with every layer matrix trained as g W / sigma(W), g learnt
    (Zhai et al. 2023)."""
    config = baseline(base)
    return replace(config, start=replace(config.start, sigma_reparam=True))


@VARIANTS.register("qk_clip")
def qk_clip(base: RunConfig, largest: float = 100.0) -> RunConfig:
    """post_ln (with --from: plain) with attention logits clipped at 100 (or value): QK-clip (Kimi K2, 2025)."""
    return constrained(baseline(base), ("query",), to="logits", bound=largest)
