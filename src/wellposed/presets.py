"""Settings of papers as keywords of penalties and models; imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError
from wellposed.options import Positive

_ZHANG2021: dict[str, tuple[str, ...]] = {
    "I": ("affinity",),
    "II": ("affinity", "attention"),
    "III": ("affinity", "attention", "feedforward"),
}


@checked_arguments
def zhang2021(
    variant: Literal["I", "II", "III", "VAR-I", "VAR-II", "VAR-III"],
    strength: Positive = 1e-8,
    *,
    as_printed: bool = False,
) -> dict[str, Any]:
    """Return the keywords of VAR-I, II or III of Zhang et al. (2021, sec. 3).

    I penalises affinities, II also query, key, value and output stacked together, III also both
    feed-forward weights. The paper prints the feed-forward loss unsquared and the others squared;
    here all are squared unless ``as_printed``. It tunes the strength among 1e-6, 1e-8 and 1e-10.

    Args:
        variant: ``"I"``, ``"II"`` or ``"III"``, or the paper's ``"VAR-I"`` and so on.
        strength: lambda of the paper, the same for each term.
        as_printed: True leaves the feed-forward norm unsquared, as in the paper.

    Raises:
        ConfigError: unknown variant, or a strength that is not positive.

    >>> zhang2021("II", 1e-6)
    {'affinity': 1e-06, 'attention': 1e-06, 'attention_mode': 'joint', 'form': 'gram_squared'}
    """
    form: str | dict[str, str] = {"feedforward": "gram"} if as_printed else "gram_squared"
    return {
        **dict.fromkeys(_ZHANG2021[variant.removeprefix("VAR-")], strength),
        "attention_mode": "joint",
        "form": form,
    }


@checked_arguments
def mcgrath2024(
    *, key: bool = True, query: bool = False, strength: Positive = 1e-4
) -> dict[str, Any]:
    """Return the keywords of McGrath (2024, eq. 2 and Table 1): ``|A A^T - I|_F``.

    Args:
        key: penalise key weights, which he finds to drift towards orthogonality by themselves.
        query: penalise query weights.
        strength: lambda; his sweep takes 1e-2, 1e-4 and 1e-6.

    Raises:
        ConfigError: neither key nor query, or a strength that is not positive.

    >>> mcgrath2024(key=True, query=True, strength=1e-2)
    {'key': 0.01, 'query': 0.01, 'form': 'gram'}
    """
    chosen = [name for name, wanted in (("key", key), ("query", query)) if wanted]
    if not chosen:
        raise ConfigError(
            "mcgrath2024: key and query are both False, so nothing is penalised; set at least one"
        )
    return {**dict.fromkeys(chosen, strength), "form": "gram"}


@checked_arguments
def ngpt(alpha: Positive = 0.05) -> dict[str, Any]:
    """Return the keywords of `wellposed.models.WellposedConfig` for nGPT (Loshchilov et al. 2025).

    States and embeddings have norm 1, and the scales are learnt. To keep the weights at norm 1 as
    well, attach ``constrain_(model, optimizer, where=("layers", "token_embedding"),
    to="hypersphere")``, and leave weight decay and warm-up out. The paper does not tie the output
    layer; give ``tie_word_embeddings=False`` and constrain ``"lm_head"`` to ``"rows"`` for that.

    Args:
        alpha: first value of the eigen learning rates; paper: 0.05, about one over the layers.

    Raises:
        ConfigError: alpha is not positive.

    >>> ngpt()["residual"], ngpt(0.1)["ngpt_alpha"]
    ('ngpt', 0.1)
    """
    parts = dict.fromkeys(("attention", "feedforward", "residual"), "ngpt")
    states = {"norm": "none", "position": "none", "unit_embeddings": True, "logit_gain": True}
    return {**parts, **states, "ngpt_alpha": alpha}
