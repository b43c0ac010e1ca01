"""Which forms of L2 attention have no Lipschitz constant, and why; what `L2SelfAttention`
refuses."""

from __future__ import annotations

from typing import Literal, get_args

from wellposed.errors import (
    ConfigError,
    NotContractiveError,
    NotLipschitzError,
    ShapeError,
    listed,
    unknown_name,
)
from wellposed.linalg import Norm
from wellposed.nn.attention.masks import AttentionMask

Values = Literal["paper", "free", "plain"]
DivisionBound = Literal["sharp", "kim2021"]
_VALUES: tuple[Values, ...] = ("paper", "free", "plain")


def l2_attention_refusal(
    *,
    tied: bool = True,
    plain_values: bool = False,
    rotary_without_values: bool = False,
    keeps_itself: bool = True,
    other_sequence_only: bool = False,
    drops_weights: bool = False,
) -> str | None:
    """Return why no `L` with `|F(X) - F(Y)| <= L |X - Y|` exists for this form of L2 attention;
    None where one does.

    Exact: for each form refused there are inputs along which the slope grows without end (theory
    note B4; the tests show each growth). Kim, Papamakarios, Mnih (2021), Theorem 3.2, proves the
    tied form with `W_V = W_Q R` only.

    Args:
        tied: query and key share one projection, bias included.
        plain_values: values are `x W_V` with a free `W_V` instead of `z R` with `z = x W_Q`.
        rotary_without_values: queries and keys are rotated by position, values are not (rotate the
            values as well, and the output back, and the bound is unchanged).
        keeps_itself: every query sees its own token.
        other_sequence_only: keys come from another sequence alone (with the own token among the
            keys, all through one projection, the bound holds).
        drops_weights: dropout acts on the attention weights now (dropping keys before the softmax,
            never the token itself, is covered).

    Returns:
        All reasons in one line, or None.

    >>> l2_attention_refusal() is None
    True
    >>> str(l2_attention_refusal(tied=False)).partition(":")[0]
    'queries and keys have different projections'
    """
    reasons = {
        "queries and keys have different projections: the distance of a token to itself grows "
        "with the token, and the slope of its weights with the square; tie them": (not tied),
        "values are a free projection of x: two tokens with equal queries can have any values, "
        "so a small change of the query moves the output by any amount; use values z R with z "
        "= x W_Q": (plain_values),
        "queries and keys are rotated and values are not: equal tokens at two positions have "
        "different queries; rotate the values and rotate the output back": (rotary_without_values),
        "a query does not see its own token: no distance in its row is zero, and the row jumps "
        "between far keys; keep the diagonal": (not keeps_itself),
        "keys come from another sequence only: far keys are compared with no near one; put the "
        "own token among the keys, or use CosineCrossAttention": (other_sequence_only),
        "dropout removes attention weights, so rows no longer sum to one and the output moves "
        "with the origin; set dropout=0 (or call eval())": (drops_weights),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    return "; ".join(found) or None


def refuse_unbounded(reason: str | None, advice: str = "") -> None:
    """Raise `NotLipschitzError` where there is a reason."""
    if reason is not None:
        raise NotLipschitzError(f"L2SelfAttention has no Lipschitz constant: {reason}{advice}")


def check_options(
    *,
    tied: bool,
    contractive: float | None,
    bound: DivisionBound,
    norm: Norm,
    values: Values,
    query_width: int,
    max_tokens: int | None,
    dropout: float,
    init_scale: float | None,
) -> None:
    """Raise where an option is out of range or two do not go together."""
    problems: list[str] = []
    if values not in _VALUES:
        raise unknown_name("values", str(values), _VALUES)
    if bound not in get_args(DivisionBound):
        raise unknown_name("bound", str(bound), get_args(DivisionBound))
    if bound == "kim2021" and (
        contractive is None or norm == "tok" or values != "paper" or query_width != 1
    ):
        problems.append(
            f"bound='kim2021' with contractive={contractive}, norm={norm!r}, values={values!r} and"
            f" query_width={query_width}: the paper divides a contractive layer, in norm 'inf' or"
            " 2, with values='paper' and query_width=1; take these, or bound='sharp'"
        )
    if not tied and values != "plain":
        problems.append(
            f"values={values!r} with tied=False: values are made from z, which only tied has"
        )
    if query_width not in (1, 2):
        problems.append(f"query_width={query_width}: expected 1 or 2")
    if not 0 <= dropout < 1:
        problems.append(f"dropout={dropout}: expected a probability in [0, 1)")
    if max_tokens is not None and max_tokens < 1:
        problems.append(f"max_tokens={max_tokens}: expected at least 1")
    if init_scale is not None and not init_scale >= 0:
        problems.append(f"init_scale={init_scale}: expected a number >= 0")
    if problems:
        raise ConfigError("L2SelfAttention:\n" + listed(problems))
    if contractive is None:
        return
    if not 0 < contractive < 1:
        raise NotContractiveError(
            f"L2SelfAttention: contractive is {contractive}; expected a constant inside (0, 1): at"
            " 1 and above the residual x + f(x) need not be invertible"
        )
    refuse_unbounded(
        l2_attention_refusal(tied=tied, plain_values=values == "plain", drops_weights=dropout > 0)
    )


def check_cache(contractive: float | None, max_tokens: int | None) -> None:
    """Raise `ConfigError` where the division of a contractive layer would change with every token
    of a cache."""
    if contractive is not None and max_tokens is None:
        raise ConfigError(
            "L2SelfAttention: a cache in a contractive layer without max_tokens: the output of"
            " earlier tokens would change with every new one; build the layer with max_tokens, the"
            " longest sequence"
        )


def check_covered(num_tokens: int, max_tokens: int | None) -> None:
    """Raise `ShapeError` where there are more tokens than the certificate covers."""
    if max_tokens is not None and num_tokens > max_tokens:
        raise ShapeError(
            f"L2SelfAttention: {num_tokens} tokens; the certificate covers at most"
            f" max_tokens={max_tokens}; cut the sequence or build the layer with a larger"
            " max_tokens"
        )


def check_diagonal(mask: AttentionMask, queries: int, keys: int) -> None:
    """Raise `NotLipschitzError` where a query, one of the last of the keys, does not see itself."""
    if mask.mask is not None and not bool(mask.mask.diagonal(keys - queries, -2, -1).all()):
        refuse_unbounded(
            l2_attention_refusal(keeps_itself=False),
            "; received a mask with False on its diagonal; make masks with"
            " wellposed.nn.attention_mask",
        )
