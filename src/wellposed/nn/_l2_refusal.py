"""Which forms of L2 attention have no Lipschitz constant, and why."""

from __future__ import annotations


def l2_attention_refusal(
    *,
    tied: bool = True,
    plain_values: bool = False,
    rotary_without_values: bool = False,
    keeps_itself: bool = True,
    other_sequence_only: bool = False,
    drops_weights: bool = False,
) -> str | None:
    """Return why no `L` with `|F(X) - F(Y)| <= L |X - Y|` exists for this form of L2 attention; None where one does.

    Exact: for each form refused there are inputs along which the slope grows without end (theory note B4; the tests
    show each growth). Kim, Papamakarios, Mnih (2021), Theorem 3.2, proves the tied form with `W_V = W_Q R` only.

    Args:
        tied: query and key share one projection, bias included.
        plain_values: values are `x W_V` with a free `W_V` instead of `z R` with `z = x W_Q`.
        rotary_without_values: queries and keys are rotated by position, values are not (rotate the values as well, and
            the output back, and the bound is unchanged).
        keeps_itself: every query sees its own token.
        other_sequence_only: keys come from another sequence alone (with the own token among the keys, all through one
            projection, the bound holds).
        drops_weights: dropout acts on the attention weights now (dropping keys before the softmax, never the token
            itself, is covered).

    Returns:
        All reasons in one line, or None.

    >>> l2_attention_refusal() is None
    True
    >>> str(l2_attention_refusal(tied=False)).partition(":")[0]
    'queries and keys have different projections'
    """
    reasons = {
        "queries and keys have different projections: the distance of a token to itself grows with the token, and the "
        "slope of its weights with the square; tie them": not tied,
        "values are a free projection of x: two tokens with equal queries can have any values, so a small change of "
        "the query moves the output by any amount; use values z R with z = x W_Q": plain_values,
        "queries and keys are rotated and values are not: equal tokens at two positions have different queries; rotate "
        "the values and rotate the output back": rotary_without_values,
        "a query does not see its own token: no distance in its row is zero, and the row jumps between far keys; keep "
        "the diagonal": not keeps_itself,
        "keys come from another sequence only: far keys are compared with no near one; put the own token among the "
        "keys, or use CosineCrossAttention": other_sequence_only,
        "dropout removes attention weights, so rows no longer sum to one and the output moves with the origin; set "
        "dropout=0 (or call eval())": drops_weights,
    }
    found = [reason for reason, applies in reasons.items() if applies]
    return "; ".join(found) or None
