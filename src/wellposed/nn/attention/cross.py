"""Which cross-attention stands beside a self-attention."""

from __future__ import annotations

from wellposed.errors import NotLipschitzError
from wellposed.nn._registry import CROSS_ATTENTIONS
from wellposed.nn.attention.l2_refusal import l2_attention_refusal


def cross_attention_name(attention: str, given: str | None = None) -> str:
    """Return the registered cross-attention that stands beside a self-attention.

    ``given`` where there is one; else the self-attention's own name where a cross-attention has it;
    cosine beside the L2 attentions, which have no Lipschitz cross form; else dot_product.

    Raises:
        NotLipschitzError: ``given`` is an L2 attention.
        ConfigError: ``given`` is not registered.

    >>> cross_attention_name("dot_product"), cross_attention_name("l2_tied")
    ('dot_product', 'cosine')
    """
    if given is not None and given.startswith("l2"):
        raise NotLipschitzError(
            f"cross_attention: received {given!r}: L2 attention to another sequence has no"
            f" Lipschitz constant: {l2_attention_refusal(other_sequence_only=True)}; give"
            " cross_attention='cosine', or leave it out: with an L2 attention, self-attentions are"
            " L2 and cross-attentions cosine"
        )
    if given is not None:
        CROSS_ATTENTIONS.get(given)
        return given
    if attention in CROSS_ATTENTIONS:
        return attention
    return "cosine" if attention.startswith("l2") else "dot_product"
