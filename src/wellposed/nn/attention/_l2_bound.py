"""The Lipschitz bound of L2 attention: forms that have none, and the division by the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.errors import NotLipschitzError, ShapeError
from wellposed.linalg import (
    L2Layer,
    MaskKind,
    Norm,
    SpectralMethod,
    full_precision,
    kim2021_bound,
    l2_constants,
    power_of_two,
)

DivisionBound = Literal["sharp", "kim2021"]


def l2_attention_refusal(
    *,
    tied: bool = True,
    plain_values: bool = False,
    rotary_without_values: bool = False,
    keeps_itself: bool = True,
    other_sequence_only: bool = False,
    drops_weights: bool = False,
) -> str | None:
    """Return why this form of L2 attention has no Lipschitz constant, in one line; None if it has.

    Exact: each refused form has inputs along which the slope grows without bound (theory note B4;
    the tests show the growth). Kim, Papamakarios, Mnih (2021), Theorem 3.2, proves only the tied
    form with `W_V = W_Q R`.

    Args:
        tied: Query and key share one projection, bias included.
        plain_values: Values are `x W_V` with a free `W_V` instead of `z R` with `z = x W_Q`.
        rotary_without_values: Queries and keys are rotated by position, values are not. Rotating
            values, and the output back, keeps the bound.
        keeps_itself: Every query sees its own token.
        other_sequence_only: Keys come from another sequence alone. The bound holds if the own token
            is among the keys, all through one projection.
        drops_weights: Dropout acts on the attention weights now. Dropping keys before the softmax,
            never the token itself, is covered.

    >>> str(l2_attention_refusal(tied=False)).partition(":")[0]
    'queries and keys have different projections'
    """
    reasons = {
        "queries and keys have different projections: the distance of a token to itself grows "
        "with the token, and the slope of its weights with the square; tie them": (not tied),
        "values are a free projection of x: tokens with equal queries can have any values, so a "
        "small change of the query can move the output by any amount; use values z R, z = x W_Q": (
            plain_values
        ),
        "queries and keys are rotated and values are not: equal tokens at two positions have "
        "different queries; rotate the values and rotate the output back": (rotary_without_values),
        "a query does not see its own token: no distance in its row is zero, and the row jumps "
        "between far keys; keep the diagonal": (not keeps_itself),
        "keys come from another sequence only: far keys are compared with no near one; put the "
        "own token among the keys, or use CosineCrossAttention": (other_sequence_only),
        "dropout removes attention weights, so rows no longer sum to one and the output moves "
        "with the origin; set dropout=0 (or call eval())": (drops_weights),
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies) or None


def refuse_unbounded(reason: str | None, advice: str = "") -> None:
    """Raise `NotLipschitzError` if there is a reason."""
    if reason is not None:
        raise NotLipschitzError(f"L2SelfAttention has no Lipschitz constant: {reason}{advice}")


def check_covered(num_tokens: int, max_tokens: int | None) -> None:
    """Raise `ShapeError` if a sequence is longer than the certificate covers."""
    if max_tokens and num_tokens > max_tokens:
        raise ShapeError(
            f"L2SelfAttention: {num_tokens} tokens; the certificate covers at most"
            f" max_tokens={max_tokens}; cut the sequence or build the layer with a larger max_tokens"
        )


# Tokens up to this norm must not overflow. In float16 only tokens of norm up to 1 fit, with keys up
# to the second number.
_LARGEST_TOKEN = 1000.0
_LARGEST_FLOAT16_KEY = 5790.0


def one_width(mixing: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Pad `R_h` (H, w, d) and `W_O,h` (H, d, D) with zeros to (H, w, w) and (H, w, D)."""
    missing = mixing.shape[1] - mixing.shape[2]
    return F.pad(mixing, (0, missing)), F.pad(output, (0, 0, 0, missing))


class UnitWeights:
    """The maps `W_h R_h = 2^exponents projection mixing` of all heads, `W_h = read projection`.

    Exact: only powers of two are factored out. Scaling the weights does not change an output that
    is divided by its bound. So a head is `P z / read`, times `mixing`, times `factor`, none of
    which overflows or vanishes unless their product does. Shapes: projection (H, D, w), mixing
    `R_h` (H, w, d) in the weights' dtype, output `W_O,h` (H, d, D), read (H, 1, 1), exponents (H,).
    """

    def __init__(
        self,
        query: Tensor,
        output: Tensor,
        value: Tensor,
        *,
        num_heads: int,
        by_call: L2Layer | None = None,
    ) -> None:
        # (heads d, in) -> (heads, in, d); the output (out, heads d) -> (heads, d, out)
        self.projection, self.read = _unit(query.unflatten(0, (num_heads, -1)).mT)
        self.output = output.mT.unflatten(0, (num_heads, -1))
        values, unit = _unit(value.unflatten(0, (num_heads, -1)).mT)
        with full_precision(query.device.type):
            mixing = self.projection.mT @ values / math.sqrt(self.output.shape[1])
        # W_h R_h = W_h W_h^T W_V,h / sqrt(d): the query's unit counts twice.
        self.mixing = mixing.to(query.dtype)
        self.exponents = 2 * _exponent(self.read) + _exponent(unit)
        self._by_call = by_call

    def factor(self, by: Tensor, contractive: float) -> Tensor:
        """Return `c / bound` of each head, (H, 1, 1); 0 for a head whose output is 0."""
        share = contractive / torch.where(by > 0, by, 1.0)
        return share * self.by_call.shares[:, None, None]

    @cached_property
    def by_call(self) -> L2Layer:
        """The bounded layer that each call divides by."""
        return self._by_call or self.layer("gram")

    def layer(self, method: SpectralMethod) -> L2Layer:
        """Return the layer that bounds these weights, zero-padded to one width."""
        padded = one_width(self.mixing, self.output)
        return L2Layer(self.projection, *padded, method=method, exponents=self.exponents)

    def range_refusal(self, factor: Tensor, bias: Tensor | None) -> str | None:
        """Return why tokens of norm 1 would overflow or underflow the weights' dtype, or None.

        ``factor`` (H, 1, 1) is that of the division, ``bias`` (H w,) that of `q_proj`.
        """
        dtype = self.mixing.dtype
        factor = factor.flatten()
        info = torch.finfo(dtype)
        heard = factor > 0
        unit = self.read.flatten()
        read = self.projection.double().square().sum((-2, -1)).sqrt() * unit.double()
        biases = self.read.new_zeros(len(read), 1) if bias is None else bias
        shift = biases.double().view(len(read), -1).norm(dim=-1)
        strength = factor.double() * self.output.double().abs().amax((-2, -1))
        strongest = float(factor[strength.argmax()])
        strictest = float(factor.max())
        largest = math.sqrt(info.max) / _LARGEST_TOKEN
        largest = _LARGEST_FLOAT16_KEY if dtype is torch.float16 else largest
        smallest = info.smallest_normal
        leaves = not (smallest <= strongest and strictest <= info.max)
        reasons = {
            f"its query weights, down to {float(unit.min()):.3g}, are denormal numbers in"
            f" {dtype}": (unit < smallest)[heard].any(),
            f"squares of distances overflow {dtype} under its query weights, of norm"
            f" {float(read.max()):.3g}": (read > largest).any(),
            f"its query biases, of norm {float(shift.max()):.3g}, drown tokens of norm 1 in"
            f" rounding to {dtype}, since its query weights have norms down to"
            f" {float(read.min()):.3g}": (shift * info.eps > read)[heard].any(),
            f"its division by the bound leaves {dtype}: factors up to {strictest:.3g}, and {strongest:.3g}"
            " for its strongest head, with output weights up to"
            f" {float(self.output.abs().max()):.3g}": leaves and heard.any(),
        }
        refusal = "; ".join(reason for reason, applies in reasons.items() if applies)

        return f"{refusal}; rescale the weights, or use a wider dtype" if refusal else None


def divisor(
    layer: L2Layer,
    weights: Sequence[Tensor],
    num_tokens: int,
    *,
    norm: Norm,
    bound: DivisionBound,
    mask: MaskKind,
) -> Tensor:
    """Return the divisor of a call, in the units of ``layer.unit_bound`` and never below it.

    ``weights`` are those of `q_proj`, `o_proj` and `v_proj`. Only ``bound="kim2021"`` reads them
    (Kim et al. 2021, Theorem 3.2).
    """
    constants = l2_constants(num_tokens, mask=mask).without_joint_keys()
    sharp = layer.unit_bound(constants, norm=norm).value
    if bound == "sharp":
        return sharp

    parts = [_unit(weight) for weight in weights]
    (query, query_unit), (output, output_unit), (value, value_unit) = parts
    heads = len(layer.projection)
    in_norm = "inf" if norm == "inf" else 2
    reads, values = (part.unflatten(0, (heads, -1)).mT for part in (query, value))
    keywords: dict[str, Any] = {"seq_len": num_tokens, "norm": in_norm, "method": "gram"}
    paper = kim2021_bound(reads, values, output.mT, **keywords)
    exponent = 2 * _exponent(query_unit) + _exponent(value_unit) + _exponent(output_unit)
    paper = paper * torch.exp2((exponent - layer.exponent).double()).squeeze()

    return torch.maximum(sharp, paper.to(sharp.dtype))


def _unit(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    unit = power_of_two(weight.abs().amax((-2, -1), keepdim=True))
    return weight / unit, unit


def _exponent(power: Tensor) -> Tensor:
    return torch.frexp(power).exponent.flatten() - 1
