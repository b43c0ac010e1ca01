"""Variants by architecture, first weights and warm-up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from wellposed import presets
from wellposed.errors import ConfigError
from wellposed_lab.compare.variants._parts import constrained, with_model, without_warmup
from wellposed_lab.compare.variants._registry import VARIANTS
from wellposed_lab.training.config import RunConfig

PAPER_WARMUP_STEPS = 4000
WARMUP_SHARE = 10


@VARIANTS.register("plain")
def plain(base: RunConfig) -> RunConfig:
    """The options as given: the baseline for a model of --from."""
    return base


@VARIANTS.register("windows")
def windows(base: RunConfig, words: str = "1") -> RunConfig:
    """The options as given, reading windows of 1 word (or value) that vote: certified in words."""
    count = int(words) if words.isdecimal() else words
    return replace(base, task_options={**base.task_options, "certified_windows": count})


@VARIANTS.register("post_ln")
def post_ln(base: RunConfig) -> RunConfig:
    """LayerNorm after each residual sum (Vaswani et al. 2017): the baseline."""
    return with_model(base)


@VARIANTS.register("pre_ln")
def pre_ln(base: RunConfig) -> RunConfig:
    """LayerNorm before each sublayer and one at the end (Xiong et al. 2020)."""
    return with_model(base, norm="pre")


@VARIANTS.register("rezero")
def rezero(base: RunConfig) -> RunConfig:
    """x + a f(x) with a learnt from zero and no LayerNorm (Bachlechner et al. 2021)."""
    return with_model(base, norm="none", residual="rezero")


@VARIANTS.register("dyt")
def dyt(base: RunConfig, alpha: float = 0.5) -> RunConfig:
    """pre_ln with gamma tanh(alpha x) + beta in place of LayerNorm; alpha starts at 0.5 or value
    (Zhu et al. 2025)."""
    return with_model(base, norm="dyt", dyt_alpha=alpha)


@VARIANTS.register("derf")
def derf(base: RunConfig, alpha: float = 0.5) -> RunConfig:
    """pre_ln with gamma erf(alpha x + s) + beta in place of LayerNorm; alpha starts at 0.5 or value
    (Chen et al. 2025)."""
    return with_model(base, norm="derf", derf_alpha=alpha)


@VARIANTS.register("ngpt")
def ngpt(base: RunConfig, alpha: float = 0.05) -> RunConfig:
    """States, embeddings and weights of norm 1, with learnt scales; eigen learning rates start at
    0.05 or value; no LayerNorm and no warm-up (Loshchilov et al. 2025).

    A feed-forward of three matrices is two thirds as wide, unless the base names its width: it has
    about as many parameters. A head that is not tied to the embedding is free.
    """
    parts = presets.ngpt(alpha)
    width = base.model.intermediate_size or max(1, round(8 * base.model.hidden_size / 3))
    config = with_model(base, **parts, intermediate_size=width)
    return constrained(without_warmup(config), ("layers", "token_embedding"), to="hypersphere")


@VARIANTS.register("t_fixup")
def t_fixup(base: RunConfig) -> RunConfig:
    """x + f(x) with T-Fixup's initial weights, no LayerNorm and no warm-up (Huang et al. 2020).

    The base's warm-up is dropped; a schedule that is a warm-up becomes the paper's inverse_sqrt,
    with its ``decay_steps``. A model of --from needs ``--from-scratch``.
    """
    if base.start.model:
        scratch = base.start.from_scratch or Path(base.start.model).is_file()
        config = replace(base, start=replace(base.start, init="t_fixup", from_scratch=scratch))
    else:
        config = with_model(base, norm="none", init="t_fixup")
    return without_warmup(config)


@VARIANTS.register("mimetic")
def mimetic(base: RunConfig) -> RunConfig:
    """pre_ln with products of attention weights near multiples of the identity (Trockman and Kolter
    2023)."""
    return with_model(base, norm="pre", init="mimetic")


@VARIANTS.register("dt_fixup")
def dt_fixup(base: RunConfig, batches: float = 20) -> RunConfig:
    """x + f(x) with DT-Fixup's weights from 20 (or value) batches of train, no LayerNorm and no
    warm-up (Xu et al. 2021).

    Warm-up and schedule are those of t_fixup. A model of --from keeps its embeddings; its layers
    and its head are drawn anew.
    """
    if batches < 1 or batches != int(batches):
        raise ConfigError(f"dt_fixup:{batches:g}: expected a whole number; write dt_fixup:20")
    config = base if base.start.model else with_model(base, norm="none")
    return without_warmup(replace(config, start=replace(config.start, dt_fixup=int(batches))))


@VARIANTS.register("qk_norm")
def qk_norm(base: RunConfig) -> RunConfig:
    """Pre-LN with queries and keys normalised per head (Henry et al. 2020; Dehghani et al. 2023)."""
    return with_model(base, norm="pre", qk_norm=True)


@VARIANTS.register("l2")
def l2(base: RunConfig) -> RunConfig:
    """post_ln (with --from: plain) and L2 attention, free queries and keys (Kim et al. 2021): not Lipschitz."""
    return _with_attention(base, "l2")


@VARIANTS.register("l2_tied")
def l2_tied(base: RunConfig) -> RunConfig:
    """post_ln with L2 attention whose queries are its keys (Kim et al. 2021): Lipschitz."""
    return with_model(base, attention="l2_tied")


@VARIANTS.register("l2_contractive")
def l2_contractive(base: RunConfig) -> RunConfig:
    """post_ln with L2 attention divided by its certified bound (Kim et al. 2021): a contraction."""
    return with_model(base, attention="l2_contractive")


@VARIANTS.register("cosine")
def cosine(base: RunConfig) -> RunConfig:
    """post_ln (with --from: plain) and scaled cosine attention (Qi et al. 2023): Lipschitz under any mask."""
    return _with_attention(base, "cosine")


def _with_attention(base: RunConfig, name: Literal["l2", "cosine"]) -> RunConfig:
    if base.start.model:
        return replace(base, start=replace(base.start, attention=name))
    return with_model(base, attention=name)


@VARIANTS.register("post_ln_warmup")
def post_ln_warmup(base: RunConfig, warmup_steps: float = 0) -> RunConfig:
    """post_ln with linear warm-up: of the base, else a tenth of the steps and at most 4,000
    (Vaswani et al. 2017).

    The value is the number of steps. inverse_sqrt, without warm-up, becomes inverse_sqrt_warmup.
    """
    config = post_ln(base)
    steps = config.train.steps
    if warmup_steps != int(warmup_steps) or warmup_steps < 0:
        problem = f"warmup_steps = {warmup_steps}, expected a whole number of steps, 1 or more"
        raise ConfigError(f"post_ln_warmup: {problem}")
    automatic = config.train.warmup_steps or min(PAPER_WARMUP_STEPS, max(1, steps // WARMUP_SHARE))
    schedule = config.train.schedule
    schedule = "inverse_sqrt_warmup" if schedule == "inverse_sqrt" else schedule
    train = replace(config.train, warmup_steps=int(warmup_steps) or automatic, schedule=schedule)
    return replace(config, train=train)
