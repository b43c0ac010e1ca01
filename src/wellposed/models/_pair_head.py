"""Head of two pooled vectors, and how far it moves when both move."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wellposed.certification import LayerBound, Site, register_rule
from wellposed.errors import ConfigError
from wellposed.nn import BallProjection, MaxMin

UNIT_DIVISOR = math.sqrt(10.0)


class PairHead(nn.Module):
    """`logits = W_2 s(W_1 [a, b, a*b, a-b] / c + b_1) + b_2` of two pooled vectors a, b.

    Exact: s is ReLU and c = 1, the head of document retrieval in the Long Range Arena (Tay et al.
    2021) with one hidden layer. With `unit_lipschitz` a and b are projected onto the unit ball, s
    is MaxMin and c = sqrt(10), so that `|change of the hidden layer| <= |W_1|_2 max(|da|, |db|)`:
    certified, both texts moving at once (theory note B12). The head is not symmetric in its
    arguments. Without `unit_lipschitz` it has a bound where |a| and |b| have one.

    Args:
        width: entries of a and of b.
        hidden: entries of the hidden layer; even with `unit_lipschitz`.
        num_labels: number of logits.
        dropout: on the features, in [0, 1).
        unit_lipschitz: see above.

    Raises:
        ConfigError: an odd hidden layer with `unit_lipschitz`.

    Cost: 4 width x hidden multiplications a pair.

    >>> PairHead(8, 16, 2)(torch.zeros(3, 8), torch.zeros(3, 8)).shape
    torch.Size([3, 2])
    """

    reads_two_vectors = True

    def __init__(
        self,
        width: int,
        hidden: int,
        num_labels: int,
        *,
        dropout: float = 0.0,
        unit_lipschitz: bool = False,
    ) -> None:
        super().__init__()
        if unit_lipschitz and hidden % 2:
            raise ConfigError(
                f"PairHead: hidden={hidden}: expected an even number, as MaxMin sorts pairs"
            )
        self.in_features = width
        self.divisor = UNIT_DIVISOR if unit_lipschitz else 1.0
        self.projection = BallProjection(width) if unit_lipschitz else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(4 * width, hidden)
        self.activation = MaxMin() if unit_lipschitz else nn.ReLU()
        self.output = nn.Linear(hidden, num_labels)

    def features(self, first: Tensor, second: Tensor) -> Tensor:
        """Map two batches of vectors (batch, width) to (batch, 4 width)."""
        first, second = self.projection(first), self.projection(second)
        return torch.cat((first, second, first * second, first - second), dim=-1) / self.divisor

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Map two batches of vectors (batch, width) to logits (batch, num_labels)."""
        return self.output(self.activation(self.hidden(self.dropout(self.features(first, second)))))


def before_output(head: PairHead, site: Site) -> LayerBound:
    """Bound what the last linear map of a head reads, where both vectors move and are within the
    site's radius."""
    ball = site.child(head.projection, "projection")
    if not math.isfinite(ball.out_radius):
        return site.refuse_without_ball(
            "two inputs meet in a product a*b, which has no global bound"
        )
    radius = ball.out_radius
    dropout = site.child(head.dropout, "dropout", radius=radius)
    reach = (
        site.spectral_norm(head.hidden.weight)
        * radius
        * math.sqrt(6.0 + radius * radius)
        / head.divisor
    )
    bias = 0.0 if head.hidden.bias is None else float(head.hidden.bias.detach().double().norm())
    joint = LayerBound(
        _slope(head, site, radius) / head.divisor,
        "both vectors move (B12)",
        out_radius=reach + bias,
    )
    hidden = site.record(head.hidden, "hidden", joint)
    active = site.child(head.activation, "activation", radius=hidden.out_radius)
    return site.product([ball, dropout, hidden, active])


@torch.no_grad()
def _slope(head: PairHead, site: Site, radius: float) -> float:
    """Bound ``(a, b) -> W_1 [a, b, a*b, a-b]`` on a ball by the least of the forms of B12."""
    weight = head.hidden.weight.detach()
    first, second, product, difference = weight.double().chunk(4, dim=1)
    linear = torch.cat((first + difference, second - difference), dim=1)
    margin = 1.0 + 1e-9
    if site.norm == "inf":
        return margin * float((linear.abs().sum(1) + 2.0 * radius * product.norm(dim=1)).max())
    longest = float(product.norm(dim=0).max())
    if site.norm == 2:
        apart = site.spectral_norm(linear) + math.sqrt(2.0) * radius * longest
        return margin * min(
            apart, site.spectral_norm(weight) * math.sqrt(3.0 + 2.0 * radius * radius)
        )
    halves = min(
        math.sqrt(2.0) * site.spectral_norm(linear),
        sum(map(site.spectral_norm, linear.chunk(2, dim=1))),
    )
    whole = site.spectral_norm(weight) * math.sqrt(6.0 + 4.0 * radius * radius)
    return margin * min(halves + 2.0 * radius * longest, whole)


@register_rule(PairHead)
def _pair_head(module: PairHead, site: Site) -> LayerBound:
    before = before_output(module, site)
    return site.product([before, site.child(module.output, "output", radius=before.out_radius)])
