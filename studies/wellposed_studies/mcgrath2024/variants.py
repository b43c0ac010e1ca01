"""Penalties of McGrath (2024) that the library lacks: on key and query together, and the QR loss."""

from __future__ import annotations

from dataclasses import replace

from wellposed_lab.compare.variants import VARIANTS, key
from wellposed_lab.training.config import RunConfig


@VARIANTS.register("key_query")
def key_query(base: RunConfig, strength: float = 1e-4) -> RunConfig:
    """post_ln (with --from: plain) + |K K^T - I|_F and |Q Q^T - I|_F on keys and queries (McGrath
    2024)."""
    config = key(base, strength)
    return replace(config, penalty=replace(config.penalty, query=strength))


@VARIANTS.register("householder")
def householder(base: RunConfig, strength: float = 1e-4) -> RunConfig:
    """post_ln (with --from: plain) + the QR loss on keys and queries, by Householder reflections
    (McGrath 2024)."""
    config = key_query(base, strength)
    return replace(config, penalty=replace(config.penalty, form="qr"))


@VARIANTS.register("householder_embedding")
def householder_embedding(base: RunConfig, strength: float = 1e-4) -> RunConfig:
    """post_ln (with --from: plain) + the QR loss on token embeddings, which he may have meant
    (McGrath 2024)."""
    config = householder(base, strength)
    return replace(config, penalty=replace(config.penalty, key=0.0, query=0.0, embedding=strength))


@VARIANTS.register("gram_schmidt")
def gram_schmidt(base: RunConfig, strength: float = 1e-4) -> RunConfig:
    """post_ln (with --from: plain) + the QR loss on keys and queries, by Gram-Schmidt (McGrath
    2024)."""
    config = householder(base, strength)
    return replace(config, penalty=replace(config.penalty, qr_method="gram_schmidt"))
