"""Variants: functions from a base `RunConfig` to the `RunConfig` of one way to make the same Transformer.

A new variant is one function here (or in any module that imports `VARIANTS`). ``name:value`` passes the one number a
variant takes: ``oc3:1e-4`` is VAR-III of Zhang et al. (2021) at strength 1e-4.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wellposed.errors import ConfigError
from wellposed.presets import zhang2021
from wellposed.registry import Registry
from wellposed.training.config import ModelOptions, PenaltyOptions, RunConfig

Variant = Callable[..., RunConfig]
VARIANTS: Registry[Variant] = Registry("variant", entry_points="wellposed.variants")


def apply_variant(spec: str, base: RunConfig) -> RunConfig:
    """Return the configuration of variant ``spec`` (``name`` or ``name:value``) built on ``base``.

    Raises:
        ConfigError: an unknown variant (nearest three named), a value where the variant takes none, or no number.

    >>> apply_variant("pre_ln", RunConfig(task="listops")).model.norm
    'pre'
    >>> apply_variant("oc1:1e-4", RunConfig(task="listops")).penalty.affinity
    0.0001
    """
    name, colon, text = spec.partition(":")
    variant = VARIANTS.get(name)
    values = [_number(spec, name, text, variant)] if colon else []
    return replace(variant(base, *values), variant=spec)


def variant_folder(spec: str) -> str:
    """Return the folder name of a variant; ``oc3:1e-4`` becomes ``oc3-1e-4``."""
    return spec.replace(":", "-")


def summary(name: str) -> str:
    """Return the first line of the variant's description."""
    return (inspect.getdoc(VARIANTS.get(name)) or "").partition("\n")[0]


def _number(spec: str, name: str, text: str, variant: Variant) -> float:
    parameters = list(inspect.signature(variant).parameters)
    if len(parameters) < 2:
        raise ConfigError(f"variant {spec!r}: {name} takes no value; write {name!r}")
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"variant {spec!r}: {parameters[1]} must be a number, received {text!r}") from None


# Options that one kind of attention reads; a variant with another attention puts them back to their defaults.
L2_OPTIONS = ("query_width", "l2_init_scale")
READ_BY = {
    "l2": L2_OPTIONS,
    "l2_tied": L2_OPTIONS,
    "l2_contractive": (*L2_OPTIONS, "contractive", "lipschitz_norm"),
    "cosine": ("cosine_eps",),
}


def _with_model(base: RunConfig, **changes: Any) -> RunConfig:
    read = READ_BY.get(changes.get("attention", "dot_product"), ())
    unread = {name for names in READ_BY.values() for name in names if name not in read}
    plain: dict[str, Any] = {
        **{name: getattr(ModelOptions(), name) for name in sorted(unread)},
        "architecture": "wellposed",
        "attention": "dot_product",
        "norm": "post",
        "residual": "plain",
        "qk_norm": False,
        # TransJect alone has experts and a spectrum
        "num_experts": 1,
        "spectrum": "gram",
        "spectrum_norm": "max",
        # t_fixup belongs to the variant of that name: with norms it would be refused
        "init": "xavier" if base.model.init == "t_fixup" else base.model.init,
    }
    return replace(base, model=replace(base.model, **{**plain, **changes}))


@VARIANTS.register("post_ln")
def post_ln(base: RunConfig) -> RunConfig:
    """LayerNorm after each residual sum (Vaswani et al. 2017): the baseline."""
    return _with_model(base)


@VARIANTS.register("pre_ln")
def pre_ln(base: RunConfig) -> RunConfig:
    """LayerNorm before each sublayer and one at the end (Xiong et al. 2020)."""
    return _with_model(base, norm="pre")


@VARIANTS.register("rezero")
def rezero(base: RunConfig) -> RunConfig:
    """x + a f(x) with a learnt from zero and no LayerNorm (Bachlechner et al. 2021)."""
    return _with_model(base, norm="none", residual="rezero")


@VARIANTS.register("t_fixup")
def t_fixup(base: RunConfig) -> RunConfig:
    """x + f(x) with T-Fixup's initial weights, no LayerNorm and no warm-up (Huang et al. 2020).

    The schedule stays that of the base, without its warm-up. The two schedules that are a warm-up become the paper's
    own, inverse_sqrt, with its ``decay_steps``.
    """
    config = _with_model(base, norm="none", init="t_fixup")
    warm = config.train.schedule in ("inverse_sqrt_warmup", "kim2021")
    schedule = "inverse_sqrt" if warm else config.train.schedule
    return replace(config, train=replace(config.train, warmup_steps=0, schedule=schedule))


@VARIANTS.register("qk_norm")
def qk_norm(base: RunConfig) -> RunConfig:
    """Pre-LN with queries and keys normalised per head (Henry et al. 2020; Dehghani et al. 2023)."""
    return _with_model(base, norm="pre", qk_norm=True)


@VARIANTS.register("l2")
def l2(base: RunConfig) -> RunConfig:
    """post_ln with attention by L2 distance and free queries and keys (Kim et al. 2021): not Lipschitz."""
    return _with_model(base, attention="l2")


@VARIANTS.register("l2_tied")
def l2_tied(base: RunConfig) -> RunConfig:
    """post_ln with L2 attention whose queries are its keys (Kim et al. 2021): Lipschitz."""
    return _with_model(base, attention="l2_tied")


@VARIANTS.register("l2_contractive")
def l2_contractive(base: RunConfig) -> RunConfig:
    """post_ln with L2 attention divided by its certified bound (Kim et al. 2021): a contraction."""
    return _with_model(base, attention="l2_contractive")


@VARIANTS.register("cosine")
def cosine(base: RunConfig) -> RunConfig:
    """post_ln with scaled cosine attention, values normalised (Qi et al. 2023): Lipschitz under any mask."""
    return _with_model(base, attention="cosine")


@VARIANTS.register("lstm")
def lstm(base: RunConfig) -> RunConfig:
    """Long short-term memory of the same width and depth (Hochreiter & Schmidhuber 1997); language models only."""
    return _with_model(
        base, architecture="lstm", position="learned", activation="gelu", attention_dropout=0.0, init="xavier"
    )


def _orthogonality_constrained(base: RunConfig, level: str, strength: float) -> RunConfig:
    plain = post_ln(base)
    keywords: dict[str, Any] = dict(zhang2021(level, strength))  # type: ignore[arg-type]
    kept = {"estimator": base.penalty.estimator, "every": base.penalty.every}
    return replace(plain, penalty=PenaltyOptions(**{**kept, **keywords}))


@VARIANTS.register("oc1")
def oc1(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """post_ln + VAR-I of Zhang et al. (2021): orthogonal affinity matrices, |A^T A - I|_F^2."""
    return _orthogonality_constrained(base, "I", strength)


@VARIANTS.register("oc2")
def oc2(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """post_ln + VAR-II of Zhang et al. (2021): VAR-I and orthogonal attention weights."""
    return _orthogonality_constrained(base, "II", strength)


@VARIANTS.register("oc3")
def oc3(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """post_ln + VAR-III of Zhang et al. (2021): VAR-II and orthogonal feed-forward weights."""
    return _orthogonality_constrained(base, "III", strength)


from wellposed.recipes import (  # noqa: E402  (they register their variants)
    variants_seq2seq,  # noqa: F401
    variants_transject,  # noqa: F401
)
