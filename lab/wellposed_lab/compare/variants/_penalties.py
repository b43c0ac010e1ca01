"""Variants with a penalty on orthogonality."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wellposed.errors import ConfigError
from wellposed.presets import zhang2021
from wellposed_lab.compare.variants._architectures import t_fixup
from wellposed_lab.compare.variants._parts import baseline
from wellposed_lab.compare.variants._registry import VARIANTS, Variant
from wellposed_lab.training.config import RunConfig


def _penalized(base: RunConfig, keywords: dict[str, Any]) -> RunConfig:
    """Add a penalty to the base's own penalties, which keep their strengths and forms."""
    if base.penalty.active and base.penalty.form == "paper":
        keywords = {
            **keywords,
            "form": "paper",
        }  # the same form as the preset for its strengths
    return replace(baseline(base), penalty=replace(base.penalty, **keywords))


@VARIANTS.register("oc1")
def oc1(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """post_ln (with --from: plain) + VAR-I of Zhang et al. (2021): affinities, |A^T A - I|_F^2."""
    return _penalized(base, zhang2021("I", strength))


@VARIANTS.register("oc2")
def oc2(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """post_ln (with --from: plain) + VAR-II of Zhang et al. (2021): VAR-I and orthogonal attention weights."""
    return _penalized(base, zhang2021("II", strength))


@VARIANTS.register("oc3")
def oc3(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """post_ln (with --from: plain) + VAR-III of Zhang et al. (2021): VAR-II and orthogonal
    feed-forward weights."""
    return _penalized(base, zhang2021("III", strength))


@VARIANTS.register("oc3_printed")
def oc3_printed(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """oc3 with the feed-forward norms unsquared, as Zhang et al. (2021) print them."""
    config = oc3(base, strength)
    return replace(config, penalty=replace(config.penalty, feedforward_form="gram"))


def _of_role(role: str, form: str, strength: float, penalty: str) -> Variant:
    """Register and return the variant of a penalty on the weights of one role."""

    def variant(base: RunConfig, strength: float = strength) -> RunConfig:
        if not strength > 0:
            raise ConfigError(f"{role}:{strength:g}: expected a number above 0; write {role}:1e-2")
        return _penalized(base, {role: strength, "form": form})

    variant.__doc__ = f"post_ln (with --from: plain) + {penalty}."
    return VARIANTS.register(role)(variant)


key = _of_role("key", "gram", 1e-4, "|K K^T - I|_F on key weights K (McGrath 2024)")
_of_role("query", "gram", 1e-4, "|Q Q^T - I|_F on query weights Q (McGrath 2024)")
_of_role("value", "gram", 1e-4, "|V V^T - I|_F on value weights V (form of McGrath 2024)")
_of_role("embedding", "gram", 1e-4, "|E E^T - I|_F on token embeddings E (form of McGrath 2024)")
_ZHANG = "|W^T W - I|_F^2 on {} weights W: one term of oc3 alone"
_of_role("attention", "gram_squared", 1e-6, _ZHANG.format("attention"))
_of_role("feedforward", "gram_squared", 1e-6, _ZHANG.format("feed-forward"))


@VARIANTS.register("t_fixup_oc3")
def t_fixup_oc3(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """t_fixup + VAR-III of Zhang et al. (2021): no LayerNorm, no warm-up, orthogonality constraints."""
    return replace(t_fixup(base), penalty=oc3(base, strength).penalty)
