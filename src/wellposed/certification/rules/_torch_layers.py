"""Rules of linear maps, activations, norms, dropout and containers (theory note B9)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.certification._centres import smallest_deviation
from wellposed.certification._curves import slopes_near
from wellposed.certification._layer_bound import LayerBound, times
from wellposed.certification._rules_by_class import register_rule
from wellposed.certification._walk import RuleContext
from wellposed.certification.bounds import Matrix, Slopes
from wellposed.linalg import TokenNorm
from wellposed.nn import unit_gelu
from wellposed.torch_modes import in_float64

# Largest slopes above 1 (exact GELU: at sqrt 2; others at the zero of g''), rounded up.
GELU = 1.128905
GELU_TANH = 1.128994
SILU = 1.099840
MISH = 1.088499
HARDSWISH = 1.5
SELU = 1.7580993408473768
# Smallest and largest slopes. Those of GELU and SiLU at x and -x add up to 1, so 1 - the largest is
# the smallest; that of Mish is at the other zero of g'', rounded down.
GELU_SLOPES = (-0.128905, GELU)
GELU_TANH_SLOPES = (-0.128994, GELU_TANH)
SILU_SLOPES = (-0.099840, SILU)
MISH_SLOPES = (-0.112527, MISH)
HARDSWISH_SLOPES = (-0.5, HARDSWISH)
UNIT_GELU_SLOPES = (-0.114186, 1.0)

_FUNCTION_SLOPES: dict[Callable[..., Tensor], tuple[float, float]] = {
    F.relu: (0.0, 1.0), torch.relu: (0.0, 1.0), F.gelu: GELU_SLOPES, F.silu: SILU_SLOPES, F.mish: MISH_SLOPES,
    F.hardswish: HARDSWISH_SLOPES, F.selu: (0.0, SELU), F.elu: (0.0, 1.0), torch.tanh: (0.0, 1.0), F.tanh: (0.0, 1.0),
    torch.sigmoid: (0.0, 0.25), F.sigmoid: (0.0, 0.25), F.leaky_relu: (0.01, 1.0), F.relu6: (0.0, 1.0),
    unit_gelu: UNIT_GELU_SLOPES,
}  # fmt: skip
# |g(x)| <= slope |x| is true only if g(0) = 0.
_NOT_ZERO_AT_ZERO = (torch.sigmoid, F.sigmoid)


def function_bound(activation: Callable[..., Tensor], context: RuleContext) -> LayerBound:
    """Bound a scalar nonlinearity, given as a function, by its largest slope in any norm."""
    if isinstance(activation, nn.Module):
        return context.child(activation, "activation")
    slopes = _FUNCTION_SLOPES.get(activation)
    if slopes is None:
        name = getattr(activation, "__name__", repr(activation))
        return context.refuse(
            f"the largest slope of the activation {name} is unknown; use a torch.nn activation module",
            unproved=True,
        )
    return _by_slopes(slopes, context, zero_at_zero=activation not in _NOT_ZERO_AT_ZERO)


def _by_slopes(
    slopes: tuple[float, float], context: RuleContext, *, zero_at_zero: bool
) -> LayerBound:
    """Bound a nonlinearity of each entry by its smallest and its largest slope."""
    steepest = max(abs(slope) for slope in slopes)
    radius = times(steepest, context.radius) if zero_at_zero else math.inf
    return LayerBound(
        steepest, "largest slope", "exact", out_radius=radius, fresh=True, links=(Slopes(*slopes),)
    )


def layer_norm_bound(
    gain: float,
    eps: float,
    width: int,
    *,
    norm: TokenNorm = "tok",
    centred: bool = True,
) -> float:
    """Return the Lipschitz bound ``gain / sqrt(eps)`` of LayerNorm or RMSNorm over ``width``
    features.

    Status: certified, and attained at a constant input. Source: theory note B9. In norm "inf" it
    has the factor ``2 - 2/D + (1 + sqrt D)/2``, for RMSNorm ``1 + (1 + sqrt D)/2``.

    Args:
        gain: ``max |gamma|``.
        eps: Added to the variance; 0 gives an infinite bound.
        width: Number of features D.
        norm: ``"tok"``, ``2`` (the same) or ``"inf"``.
        centred: True for LayerNorm, False for RMSNorm.

    >>> round(layer_norm_bound(1.0, 1e-4, 64), 6)
    100.0
    """
    floor = math.sqrt(eps)
    if floor == 0.0:
        return 0.0 if gain == 0.0 else math.inf
    factor = 1.0
    if norm == "inf":
        factor = (2 - 2 / width if centred else 1.0) + (1 + math.sqrt(width)) / 2
    return factor * gain / floor


@register_rule(nn.Linear, sums=True)
def linear(module: nn.Linear, context: RuleContext) -> LayerBound:
    return affine_bound(module.weight, module.bias, context, lambda: module.weight)


def affine_bound(
    weight: Tensor, bias: Tensor | None, context: RuleContext, source: Callable[[], Tensor]
) -> LayerBound:
    """Bound ``x -> weight @ x + bias``; ``source`` reads the weight again, with its gradient."""
    shift = 0.0 if bias is None else float(bias.detach().double().norm())
    # Without a ball the radius is not needed; in norm inf it would cost a factorisation.
    spread = context.spectral_norm(weight) if math.isfinite(context.radius) else math.inf
    radius = times(spread, context.radius) + shift
    form = "largest absolute row sum" if context.norm == "inf" else "largest singular value"
    bound = context.operator_norm(weight)
    spectral = math.inf if context.norm == "inf" else bound
    links = (Matrix(weight.detach(), spectral, source=source),)
    made = LayerBound(bound, form, "exact", out_radius=radius, fresh=True, links=links)
    is_spectral = context.norm != "inf"
    return replace(made, slope=lambda: _norm_with_gradient(source(), is_spectral=is_spectral))


def _norm_with_gradient(weight: Tensor, *, is_spectral: bool) -> Tensor:
    """Return the norm of a weight by its top singular vectors, or by its largest row."""
    matrix = weight.to(torch.float64)
    if 0 in matrix.shape:
        return matrix.sum()
    if not is_spectral:
        return matrix.abs().sum(-1).max()
    with torch.no_grad():
        left, _, right = torch.linalg.svd(matrix.detach(), full_matrices=False)
    return left[:, 0] @ (matrix @ right[0])


@register_rule(nn.Flatten)
def _flatten(_module: nn.Flatten, context: RuleContext) -> LayerBound:
    return context.refuse(
        "flattening mixes tokens into one vector, for which the token norms are not defined"
    )


@register_rule(nn.Identity, sums=True)
def identity(_module: nn.Module, context: RuleContext) -> LayerBound:
    return LayerBound(1.0, "identity", "exact", out_radius=context.radius, skip=1.0, links=())


@register_rule(nn.Dropout, sums=True)
def _dropout(module: nn.Dropout, context: RuleContext) -> LayerBound:
    if not module.training or module.p == 0.0:
        form = "identity in eval mode"
        return LayerBound(1.0, form, "exact", out_radius=context.radius, skip=1.0, links=())
    scale = math.inf if module.p >= 1.0 else 1 / (1 - module.p)
    form = "1/(1 - p) for a fixed mask in train mode"
    links = (Slopes(0.0, scale),) if math.isfinite(scale) else None
    radius = times(scale, context.radius)
    return LayerBound(scale, form, out_radius=radius, fresh=True, links=links)


Ends = tuple[float, float]


def slope_rule(
    module_type: type[nn.Module],
    slopes: Ends | Callable[[nn.Module], Ends],
    *,
    zero_at_zero: bool = True,
) -> None:
    """Register the rule of a scalar nonlinearity by its smallest and its largest slope."""

    @register_rule(module_type, sums=True)
    def _activation(module: nn.Module, context: RuleContext) -> LayerBound:
        ends = slopes(module) if callable(slopes) else slopes
        return activation_bound(module, context, ends, zero_at_zero=zero_at_zero)


def activation_bound(
    module: nn.Module, context: RuleContext, ends: Ends, *, zero_at_zero: bool = True
) -> LayerBound:
    """Bound a scalar nonlinearity by its smallest and its largest slope, around the inputs if there
    are any."""
    bound = _by_slopes(ends, context, zero_at_zero=zero_at_zero)
    centre = context.centre_of(module)
    near = None if centre is None else slopes_near(module, centre, context.moved)
    if near is None:
        return bound
    low, high = (end.clamp(*ends) for end in near)
    steepest = float(torch.maximum(low.abs(), high.abs()).max())
    links = (Slopes(low, high),)
    form = "largest slope around the inputs (B22)"
    return replace(bound, lipschitz=steepest, form=form, label="certified", links=links)


def _with_one(module: nn.Module, attribute: str) -> Ends:
    """Return the slopes of a map of slope 1 above zero and of the attribute's below."""
    below = in_float64(getattr(module, attribute))
    return min(1.0, float(below.min())), max(1.0, float(below.max()))


def _elu_slopes(module: nn.Module) -> Ends:
    alpha = float(getattr(module, "alpha"))  # noqa: B009
    return min(0.0, alpha), max(1.0, alpha)


for _type, _ends in (
    (nn.ReLU, (0.0, 1.0)), (nn.ReLU6, (0.0, 1.0)), (nn.Tanh, (0.0, 1.0)), (nn.Softsign, (0.0, 1.0)),
    (nn.Softshrink, (0.0, 1.0)), (nn.Tanhshrink, (0.0, 1.0)), (nn.SiLU, SILU_SLOPES), (nn.Mish, MISH_SLOPES),
    (nn.Hardswish, HARDSWISH_SLOPES), (nn.SELU, (0.0, SELU)),
):  # fmt: skip
    slope_rule(_type, _ends)
for _type, _ends in (
    (nn.Sigmoid, (0.0, 0.25)), (nn.LogSigmoid, (0.0, 1.0)), (nn.Hardsigmoid, (0.0, 1 / 6)),
    (nn.Hardtanh, (0.0, 1.0)),
):  # fmt: skip
    slope_rule(_type, _ends, zero_at_zero=False)
slope_rule(
    nn.GELU,
    lambda module: (
        GELU_TANH_SLOPES if getattr(module, "approximate", "none") == "tanh" else GELU_SLOPES
    ),
)
slope_rule(nn.ELU, _elu_slopes)
slope_rule(nn.LeakyReLU, lambda module: _with_one(module, "negative_slope"))
slope_rule(nn.PReLU, lambda module: _with_one(module, "weight"))


@register_rule(nn.Softplus)
def _softplus(module: nn.Softplus, context: RuleContext) -> LayerBound:
    """torch returns x if ``beta x > threshold``: a jump by ``log(1 + e^-threshold) / beta``."""
    threshold = float(module.threshold)
    if (
        threshold <= 0
        or math.log1p(math.exp(-threshold)) > threshold * torch.finfo(context.dtype).eps
    ):
        return context.refuse(
            f"it jumps as beta x passes threshold={threshold:g}, by more than {context.dtype} rounding,"
            " so it has no Lipschitz constant; build it with threshold=40, which makes the jump"
            " smaller than the rounding of every dtype"
        )
    return LayerBound(1.0, "largest slope", fresh=True, links=(Slopes(0.0, 1.0),))


@register_rule(nn.LayerNorm)
@register_rule(nn.RMSNorm)
def norm(module: nn.LayerNorm | nn.RMSNorm, context: RuleContext) -> LayerBound:
    if len(module.normalized_shape) != 1:
        return context.refuse(f"a norm over {len(module.normalized_shape)} dimensions mixes tokens")
    # Without eps, torch's RMSNorm uses the rounding unit of the input's dtype, float32's for half.
    unit = torch.finfo(torch.promote_types(context.dtype, torch.float32)).eps
    eps = unit if module.eps is None else float(module.eps)
    width = module.normalized_shape[0]
    centred = isinstance(module, nn.LayerNorm)
    bias = module.bias if centred else None
    return norm_bound(
        module, context, weight=module.weight, bias=bias, eps=eps, width=width, centred=centred
    )


def norm_bound(
    module: nn.Module,
    context: RuleContext,
    *,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    width: int,
    centred: bool,
) -> LayerBound:
    """Bound LayerNorm, or RMSNorm if it is not ``centred``, around its recorded tokens if known."""
    if not eps >= 0:
        return context.refuse(
            f"eps={eps:g} is negative or NaN, so the norm has a pole; build it with eps > 0"
        )

    gain = 1.0 if weight is None else float(weight.detach().double().abs().max())
    shift = 0.0 if bias is None else float(bias.detach().double().norm())
    bound = layer_norm_bound(gain, eps, width, norm=context.norm, centred=centred)
    if math.isinf(bound):
        return context.refuse(
            "with eps=0 it divides by 0 at a constant token; build it with eps > 0"
        )

    form = "max|gamma| / sqrt(eps)"
    centre = context.centre_of(module)
    if centre is not None:
        lowest = smallest_deviation(centre, context.moved, centred=centred)
        if lowest > 0:
            bound = min(bound, gain / math.sqrt(lowest * lowest + eps) * (1 + 1e-9))
            form = f"max|gamma| / sqrt(s^2 + eps), s >= {lowest:.3g} around the inputs (B22)"
        else:
            form += ": a token may become constant within the radius"

    # |x_hat| <= sqrt(D) for all inputs, so outputs lie in a ball.
    steepest = gain / math.sqrt(eps) if eps else math.inf
    radius = min(gain * math.sqrt(width), times(steepest, context.radius)) + shift
    return LayerBound(bound, form, out_radius=radius * (1 + 1e-6), fresh=True)


@register_rule(nn.Sequential, sums=True)
def _sequential(module: nn.Sequential, context: RuleContext) -> LayerBound:
    # named_children() would skip a module that appears twice.
    return context.chain(
        (name, child) for name, child in module._modules.items() if child is not None
    )
