"""Bounds of a character model in the norm of Newhouse et al. (2025): the one that their paper
prints, and a sound one.

Both say by how much the last states of a text move, in the largest root mean square of a token,
when its embedded tokens do, with tokens of root mean square 1. The last linear map is taken at norm
1: its scale, like the temperature, changes no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

GELU_SLOPE = 1.1289
ROOM = 1 + 1e-4
"""By which a ball is larger than what it is to hold, so that rounding in float32 leaves nothing
outside."""


@dataclass(frozen=True)
class NextCharacters:
    """What one model says of a text, and how sure that is."""

    accuracy: float
    sound: float
    """Certified."""
    printed: float | None
    """By the formula of the paper, for a model that has its parts; it is no bound with more than
    one head."""
    certified: tuple[float, ...]
    """Share of characters that stay right when every embedded token moves by up to a share of the
    largest token."""


def attention_slope(query: float, key: float, value: float, output: float, radius: float) -> float:
    """Return the slope of attention as printed: `|W_o| |W_v| (1 + 2 |W_q| |W_k| a^2) / 3`, whatever
    the heads.

    >>> attention_slope(1.0, 1.0, 1.0, 1.0, radius=1.0)
    1.0
    """
    return output * value * (1 + 2 * query * key * radius**2) / 3


def printed_bound(body: Any) -> float:
    """Return `|E| prod_blocks (1 - a + a L_attention) (1 - a + a L_feedforward)` as the paper has
    it, a = 1/(2 blocks).

    Newhouse et al. (2025), appendix on the bound of a Transformer: `attention_slope` at the largest
    root mean square that a token can have there, and `|W_2| |W_1| / 1.1289` for the feed-forward,
    whose nonlinearity has already been divided by that. No bound: the heads are taken for one.

    Args:
        body: a `WellposedModel` of attention inverse_d, residual mean and activation unit_gelu.
    """
    share = 1 / (2 * len(body.layers))
    size = largest = _largest_token(body)
    for layer in body.layers:
        attention, feedforward = layer.attention, layer.feedforward
        parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        query, key, value, output = (_norm(part.weight) for part in parts)
        inner = _norm(feedforward.up_proj.weight) * _norm(feedforward.down_proj.weight) / GELU_SLOPE
        size *= (1 - share) + share * attention_slope(query, key, value, output, largest)
        size *= (1 - share) + share * inner
        largest *= ((1 - share) + share * output * value / 3) * ((1 - share) + share * inner)
    return size


def sound_bound(model: Any, seq_len: int) -> float:
    """Return the certified constant of the same map, on the ball that holds every text."""
    from wellposed.certification import certify
    from wellposed.models import embedding_radius

    radius = embedding_radius(model)
    return (
        radius
        * certify(model.model, seq_len=seq_len, radius=radius).total
        / model.model.embeddings.scale
    )


def next_characters(
    model: Any, batches: Sequence[Tensor], shares: Sequence[float], *, printed: bool
) -> NextCharacters:
    """Return accuracy, bounds and certified accuracy of a causal model.

    Certified: at each share the certificate is made for the ball that holds the texts and what
    moves them so far.

    Args:
        model: a `WellposedForCausalLM` in eval mode.
        batches: token ids (texts, tokens), all of one length.
        shares: radii in units of the largest embedded token, increasing.
        printed: whether the model has the parts that the printed bound is about.
    """
    import torch

    from wellposed.certification import certify
    from wellposed.models import embedding_radius

    seq_len, radius = batches[0].shape[-1], embedding_radius(model)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=ids).logits[:, :-1].double() for ids in batches])
    targets = torch.cat([ids[:, 1:] for ids in batches])
    held = []
    for share in shares:
        certificate = certify(model, seq_len=seq_len, radius=(1 + share) * radius * ROOM)
        reach = certificate.radius(logits, targets, largest_token=radius)
        held.append(float((reach > share * radius).double().mean()))
    return NextCharacters(
        accuracy=float((logits.argmax(-1) == targets).double().mean()),
        sound=sound_bound(model, seq_len),
        printed=printed_bound(model.model) if printed else None,
        certified=tuple(held),
    )


def _largest_token(body: Any) -> float:
    """Return the largest root mean square of an embedded token."""
    rows = body.embeddings.token.weight.detach().double()
    return float(rows.norm(dim=-1).max()) * body.embeddings.scale / math.sqrt(rows.shape[-1])


def _norm(weight: Tensor | nn.Parameter) -> float:
    """Return the spectral norm; factors sqrt(in / out) of the norm by root mean squares cancel in a
    product."""
    import torch

    return float(torch.linalg.matrix_norm(weight.detach().double(), 2))
