"""Rules for Transformer blocks and stacks, ours and those of `torch.nn`: residuals, norm placements,
feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from wellposed.certification._blocks import GELU, function_bound
from wellposed.certification._rules import (
    LayerBound,
    Site,
    product_of,
    register_rule,
    residual_of,
)
from wellposed.nn import (
    MLP,
    Block,
    NoNorm,
    PlainResidual,
    PostNorm,
    PreNorm,
    ReZeroResidual,
    TransformerStack,
)


@register_rule(MLP)
def _mlp(module: MLP, site: Site) -> LayerBound:
    up = site.child(module.up_proj, "up_proj")
    inner = function_bound(module.activation, site.at_radius(up.out_radius))
    down = site.child(module.down_proj, "down_proj", radius=inner.out_radius)
    return product_of([up, inner, down])


def residual_coefficients(residual: nn.Module, site: Site) -> tuple[float, float] | None:
    """Return (a, b) where the residual joins ``a x + b f(x)``, or None where it is of an unknown
    kind.

    A residual of another class takes part by a method ``coefficients() -> (a, b)`` beside its
    ``forward``.
    """
    site.reads(residual, PlainResidual, ReZeroResidual)
    if type(residual) is PlainResidual:
        return 1.0, 1.0
    if type(residual) is ReZeroResidual:
        return 1.0, float(residual.scale.detach())
    if not {"coefficients", "forward"} <= vars(type(residual)).keys():
        return None
    site.reads(residual)
    first, second = residual.coefficients()  # pyright: ignore[reportCallIssue]
    return float(first), float(second)


@register_rule(Block)
def _block(module: Block, site: Site) -> LayerBound:
    first = _sublayer(module, "attention", site)
    second = _sublayer(module, "feedforward", site.at_radius(first.out_radius))
    return product_of([first, second])


def _sublayer(module: Block, name: str, site: Site) -> LayerBound:
    """``x -> P(x, f)``: the branch with its norm and dropout, inside the residual."""
    norm, residual = getattr(module, f"{name}_norm"), getattr(module, f"{name}_residual")
    coefficients = residual_coefficients(residual, site)
    if coefficients is None:
        return site.refuse(
            f"{name}_residual is a {type(residual).__name__}, "
            "whose class does not define coefficients() -> (a, b) beside its forward"
        )
    if not isinstance(norm, (PreNorm, PostNorm, NoNorm)):
        return site.refuse(
            f"{name}_norm is a {type(norm).__name__}; known placements: PreNorm, PostNorm, NoNorm"
        )
    site.reads(norm, NoNorm)
    return sublayer(
        site,
        lambda inner: inner.chain([(name, getattr(module, name)), ("dropout", module.dropout)]),
        before=(f"{name}_norm", norm) if isinstance(norm, PreNorm) else None,
        after=(f"{name}_norm", norm) if isinstance(norm, PostNorm) else None,
        coefficients=coefficients,
    )


Named = tuple[str, nn.Module]
Branch = tuple[str, Callable[[Site], LayerBound]]


def sublayer(
    site: Site,
    branch: Callable[[Site], LayerBound],
    *,
    before: Named | None = None,
    after: Named | None = None,
    coefficients: tuple[float, float] = (1.0, 1.0),
) -> LayerBound:
    """Bound ``x -> N_after(a x + b f(N_before(x)))``; the branch stands where its norm, if any,
    leaves it."""
    inside = site.chain([before] if before else [])
    inner = product_of([inside, branch(site.at_radius(inside.out_radius))])
    joined = residual_of(*coefficients, inner, site.radius)
    if after is None:
        return joined
    return product_of([joined, site.child(after[1], after[0], radius=joined.out_radius)])


def named(owner: nn.Module, *paths: str) -> list[Named]:
    """Return parts with their paths, for `Site.chain`."""
    return [(path, owner.get_submodule(path)) for path in paths]


def normed(owner: nn.Module, site: Site, *branches: Branch, before: bool) -> LayerBound:
    """Bound sublayers with residuals, each with the path of its norm, which stands before it or
    after the residual."""
    bounds: list[LayerBound] = []
    for path, branch in branches:
        (norm,) = named(owner, path)
        placed = (
            sublayer(site, branch, before=norm) if before else sublayer(site, branch, after=norm)
        )
        bounds.append(placed)
        site = site.at_radius(bounds[-1].out_radius)
    return product_of(bounds)


@register_rule(TransformerStack)
def _stack(module: TransformerStack, site: Site) -> LayerBound:
    site = site.under_mask("causal" if module.is_causal else "full")
    layers = [(f"layers.{index}", layer) for index, layer in enumerate(module.layers)]
    return site.chain([*layers, ("final_norm", module.final_norm)])


# In eval mode torch may run a fused kernel, which goes by this flag of the layer and not by its
# activation.
_FUSED_SLOPES = {0: 0.0, 1: 1.0, 2: GELU}


@register_rule(nn.TransformerEncoderLayer)
def _encoder_layer(module: nn.TransformerEncoderLayer, site: Site) -> LayerBound:
    def mixed(at: Site) -> LayerBound:
        return at.chain(named(module, "self_attn", "dropout1"))

    branches = (("norm1", mixed), ("norm2", partial(_feedforward, module)))
    return normed(module, site, *branches, before=module.norm_first)


def _feedforward(module: nn.TransformerEncoderLayer, site: Site) -> LayerBound:
    up = site.child(module.linear1, "linear1")
    fused = _FUSED_SLOPES[module.activation_relu_or_gelu]
    inner = function_bound(module.activation, site.at_radius(up.out_radius))
    inner = replace(
        inner,
        lipschitz=max(inner.lipschitz, fused),
        out_radius=max(inner.out_radius, fused * up.out_radius if fused else 0.0),
    )
    rest = site.at_radius(inner.out_radius).chain(named(module, "dropout", "linear2", "dropout2"))
    return product_of([up, inner, rest])


@register_rule(nn.TransformerEncoder)
def _encoder(module: nn.TransformerEncoder, site: Site) -> LayerBound:
    norm = [] if module.norm is None else [("norm", module.norm)]
    return site.chain(
        [*((f"layers.{index}", layer) for index, layer in enumerate(module.layers)), *norm]
    )


def mean_pooling(site: Site) -> LayerBound:
    """Mean over the real tokens: ``1/sqrt(n)`` in norm 2 with n >= ``min_tokens``, 1 in tok and inf
    (B9)."""
    bound = site.min_tokens**-0.5 if site.norm == 2 else 1.0
    return LayerBound(bound, "mean over real tokens", "exact", out_radius=site.radius)


def one_token(site: Site) -> LayerBound:
    """One token of them all, whichever: 1 in every norm."""
    return LayerBound(1.0, "one token", "exact", out_radius=site.radius)


def of_one_vector(route: Callable[[Site], LayerBound], site: Site) -> LayerBound:
    """Bound a map to one vector: as ``|delta|_tok <= |delta|_2``, its tok bound is a bound in norm
    2 as well."""
    bound = route(site)
    if site.norm != 2:
        return bound
    other = site.in_norm("tok")
    by_token = route(other)
    return (
        site.adopt(other, by_token, "norm 2 by the tok route")
        if by_token.lipschitz < bound.lipschitz
        else bound
    )
