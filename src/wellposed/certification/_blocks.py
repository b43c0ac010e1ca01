"""Rules for building blocks: linear maps, activations, norms, dropout, containers (theory note B9);
and the residuals, couplings, blocks and stacks made of them, ours and those of `torch.nn`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.certification._as_called import class_called, first_deviation, without_compiler
from wellposed.certification._rules import (
    LayerBound,
    Site,
    product_of,
    refuse_always,
    register_rule,
    residual_of,
    times,
)
from wellposed.linalg import TokenNorm
from wellposed.nn import (
    MLP,
    AdditiveCoupling,
    Block,
    DynamicTanh,
    InvertibleResidual,
    NoNorm,
    OrthogonalLinear,
    PlainResidual,
    PostNorm,
    PreNorm,
    ReversibleSequential,
    ReZeroResidual,
    TransformerStack,
    unit_gelu,
)
from wellposed.nn.block import RemovedNorm

# sup |g'| of the activations that exceed 1 (exact GELU: at sqrt 2; the others by the zero of g'',
# rounded up).
GELU, GELU_TANH, SILU, MISH, HARDSWISH = 1.128905, 1.128994, 1.099840, 1.088499, 1.5
SELU = 1.7580993408473768

NORM_FORM = "max|gamma| / sqrt(eps)"

_FUNCTION_SLOPES: dict[Callable[..., Tensor], float] = {
    F.relu: 1.0, torch.relu: 1.0, F.gelu: GELU, F.silu: SILU, F.mish: MISH, F.hardswish: HARDSWISH, F.selu: SELU,
    F.elu: 1.0, torch.tanh: 1.0, F.tanh: 1.0, torch.sigmoid: 0.25, F.sigmoid: 0.25,
    F.leaky_relu: 1.0, F.relu6: 1.0, unit_gelu: 1.0,
}  # fmt: skip
# |g(x)| <= slope |x| holds for those that are 0 at 0.
_NOT_ZERO_AT_ZERO = (torch.sigmoid, F.sigmoid)


def function_bound(
    activation: Callable[..., Tensor], site: Site, name: str = "activation"
) -> LayerBound:
    """Bound a scalar nonlinearity given as a function, in any of the three norms: the largest
    slope."""
    if isinstance(activation, nn.Module):
        return site.child(activation, name)
    slope = _FUNCTION_SLOPES.get(activation)
    if slope is None:
        name = getattr(activation, "__name__", repr(activation))
        return site.refuse(
            f"the largest slope of the activation {name} is not known; use a torch.nn activation"
            " module"
        )
    radius = math.inf if activation in _NOT_ZERO_AT_ZERO else slope * site.radius
    return LayerBound(slope, "largest slope", "exact", out_radius=radius)


def layer_norm_bound(
    gain: float,
    eps: float,
    width: int,
    *,
    norm: TokenNorm = "tok",
    min_std: float = 0.0,
    centred: bool = True,
) -> float:
    """Return the Lipschitz bound ``gain / sqrt(min_std^2 + eps)`` of LayerNorm or RMSNorm over
    ``width`` features.

    Certified, and attained at a constant input (B9): the Jacobian is ``diag(gamma)/s`` times two
    projections-like factors of norm at most 1, ``s^2 = var + eps``. In norm "inf" the factor ``2 -
    2/D + (1 + sqrt D)/2`` is added.

    Args:
        gain: ``max |gamma|``.
        eps: added to the variance; 0 gives an infinite bound unless ``min_std > 0``.
        width: number of features D.
        norm: ``"tok"``, ``2`` (the same) or ``"inf"``.
        min_std: the standard deviation (RMS for RMSNorm) is known to be at least this on the
            domain.
        centred: LayerNorm; False for RMSNorm, whose inf factor is ``1 + (1 + sqrt D)/2``.

    >>> round(layer_norm_bound(1.0, 1e-4, 64), 6)
    100.0
    """
    floor = math.sqrt(min_std**2 + eps)
    if floor == 0.0:
        return 0.0 if gain == 0.0 else math.inf
    factor = 1.0
    if norm == "inf":
        factor = (2 - 2 / width if centred else 1.0) + (1 + math.sqrt(width)) / 2
    return factor * gain / floor


def gated_feedforward_bound(
    up: Tensor,
    gate: Tensor,
    down: Tensor,
    site: Site,
    *,
    slope: float = SILU,
    up_bias: float = 0.0,
    gate_bias: float = 0.0,
) -> float:
    """Bound ``x -> W_d (g(W_g x) * W_u x)`` on the ball: ``|W_d| (l |W_g| max|u| + max|g| |W_u|)``;
    none globally (B9).

    ``g`` has largest slope ``slope`` and ``|g(t)| <= |t|`` (SiLU, GELU, ReLU). ``*_bias``: largest
    entry of each bias.
    """
    rows_up, rows_gate = (
        float(w.detach().double().square().sum(-1).amax().sqrt()) for w in (up, gate)
    )
    largest_up = times(rows_up, site.radius) + up_bias
    largest_gate = times(rows_gate, site.radius) + gate_bias
    inner = times(slope * site.operator_norm(gate), largest_up)
    inner += times(site.operator_norm(up), largest_gate)
    return times(site.operator_norm(down), inner) * (1 + 1e-12)


@register_rule(OrthogonalLinear, sums=True)
@register_rule(nn.Linear, sums=True)
def _linear(module: nn.Linear, site: Site) -> LayerBound:
    return linear_bound(module.weight, module.bias, site)


def linear_bound(weight: Tensor, bias: Tensor | None, site: Site) -> LayerBound:
    """Bound ``x -> weight @ x + bias`` for each token."""
    shift = 0.0 if bias is None else float(bias.detach().double().norm())
    # On the whole space the radius is not needed, and in the inf-norm it would cost a
    # factorisation.
    spread = site.spectral_norm(weight) if math.isfinite(site.radius) else math.inf
    radius = times(spread, site.radius) + shift
    form = "largest absolute row sum" if site.norm == "inf" else "largest singular value"
    return LayerBound(site.operator_norm(weight), form, "exact", out_radius=radius)


refuse_always(
    "flattening mixes tokens into one vector, for which the token norms are not defined", nn.Flatten
)


@register_rule(RemovedNorm, sums=True)
@register_rule(nn.Identity, sums=True)
def _identity(module: nn.Module, site: Site) -> LayerBound:
    del module
    return LayerBound(1.0, "identity", "exact", out_radius=site.radius, skip=1.0)


_IN_PLACE = "inplace=True also changes the tensor that a residual around it adds; build it with inplace=False"


@register_rule(nn.Dropout, sums=True)
def _dropout(module: nn.Dropout, site: Site) -> LayerBound:
    if not module.training or module.p == 0.0:
        form = "identity in eval mode"
        return LayerBound(1.0, form, "exact", out_radius=site.radius, skip=1.0)
    if module.inplace:
        return site.refuse(_IN_PLACE)
    scale = math.inf if module.p >= 1.0 else 1 / (1 - module.p)
    return LayerBound(
        scale, "1/(1 - p) for a fixed mask in train mode", out_radius=times(scale, site.radius)
    )


def slope_rule(
    module_type: type[nn.Module] | str,
    slope: float | Callable[[nn.Module], float],
    *,
    zero_at_zero: bool = True,
) -> None:
    """Register the rule of a scalar nonlinearity by its largest slope."""

    @register_rule(module_type, sums=True)
    def _activation(module: nn.Module, site: Site) -> LayerBound:
        largest = slope(module) if callable(slope) else slope
        if getattr(module, "inplace", False) and not (largest <= 1 and zero_at_zero):
            return site.refuse(_IN_PLACE)
        radius = times(largest, site.radius) if zero_at_zero else math.inf
        return LayerBound(largest, "largest slope", "exact", out_radius=radius)


def _at_least_one(module: nn.Module, attribute: str) -> float:
    return max(1.0, float(torch.as_tensor(getattr(module, attribute)).abs().max()))


for _type, _largest in (
    (nn.ReLU, 1.0), (nn.ReLU6, 1.0), (nn.Tanh, 1.0), (nn.Softsign, 1.0), (nn.Softshrink, 1.0), (nn.Tanhshrink, 1.0),
    (nn.SiLU, SILU), (nn.Mish, MISH), (nn.Hardswish, HARDSWISH), (nn.SELU, SELU),
):  # fmt: skip
    slope_rule(_type, _largest)
for _type, _largest in (
    (nn.Sigmoid, 0.25), (nn.LogSigmoid, 1.0), (nn.Hardsigmoid, 1 / 6), (nn.Hardtanh, 1.0),
):  # fmt: skip
    slope_rule(_type, _largest, zero_at_zero=False)
slope_rule(
    nn.GELU, lambda module: GELU_TANH if getattr(module, "approximate", "none") == "tanh" else GELU
)
slope_rule(nn.ELU, lambda module: _at_least_one(module, "alpha"))
slope_rule(nn.LeakyReLU, lambda module: _at_least_one(module, "negative_slope"))
slope_rule(nn.PReLU, lambda module: _at_least_one(module, "weight"))


@register_rule(nn.Softplus)
def _softplus(module: nn.Softplus, site: Site) -> LayerBound:
    """torch returns x itself where ``beta x > threshold``: a jump by ``log(1 + e^-threshold) /
    beta``."""
    threshold = float(module.threshold)
    if threshold <= 0 or math.log1p(math.exp(-threshold)) > threshold * torch.finfo(site.dtype).eps:
        return site.refuse(
            f"it jumps where beta x passes threshold={threshold:g}, by more than {site.dtype}"
            " rounds away, so it has no Lipschitz constant; build it with threshold=40, where the"
            " jump is below the rounding of every dtype"
        )
    return LayerBound(1.0, "largest slope")


@register_rule(PreNorm)
@register_rule(PostNorm)
@register_rule(nn.LayerNorm)
@register_rule(nn.RMSNorm)
def _norm(module: nn.LayerNorm | nn.RMSNorm, site: Site) -> LayerBound:
    if len(module.normalized_shape) != 1:
        return site.refuse(f"a norm over {len(module.normalized_shape)} dimensions mixes tokens")
    # RMSNorm of torch takes the rounding unit of the input's dtype where eps is not given, of
    # float32 for half precision.
    unit = torch.finfo(torch.promote_types(site.dtype, torch.float32)).eps
    eps, width = unit if module.eps is None else float(module.eps), module.normalized_shape[0]
    centred = isinstance(module, nn.LayerNorm)
    bias = module.bias if centred else None
    return norm_bound(module.weight, bias, site, eps=eps, width=width, centred=centred)


@register_rule(DynamicTanh, sums=True)
def _dynamic_tanh(module: DynamicTanh, site: Site) -> LayerBound:
    """Entry by entry, each with slope ``|gamma_i alpha|`` at 0 and never more, in every norm."""
    gamma, alpha, beta = (
        each.detach().double() for each in (module.weight, module.alpha, module.bias)
    )
    slope = float(gamma.abs().max() * alpha.abs())
    radius = min(times(slope, site.radius), float(gamma.norm())) + float(beta.norm())
    return LayerBound(slope, "max|gamma alpha|", "exact", out_radius=radius * (1 + 1e-6))


def norm_bound(
    weight: Tensor | None, bias: Tensor | None, site: Site, *, eps: float, width: int, centred: bool
) -> LayerBound:
    """Bound LayerNorm (``centred``) or RMSNorm of each token; out of the whole space comes a
    ball."""
    if not eps >= 0:
        return site.refuse(
            f"eps={eps:g} is negative or no number, so the norm has a pole; build it with eps > 0"
        )
    gain = 1.0 if weight is None else float(weight.detach().double().abs().max())
    shift = 0.0 if bias is None else float(bias.detach().double().norm())
    bound = layer_norm_bound(gain, eps, width, norm=site.norm, centred=centred)
    if math.isinf(bound):
        return site.refuse("with eps=0 it divides by 0 at a constant token; build it with eps > 0")
    # |x_hat| <= sqrt(D) always, so a ball comes out of the whole space.
    steepest = gain / math.sqrt(eps) if eps else math.inf
    radius = min(gain * math.sqrt(width), times(steepest, site.radius)) + shift
    return LayerBound(bound, NORM_FORM, out_radius=radius * (1 + 1e-6))


@register_rule(nn.Sequential, sums=True)
def _sequential(module: nn.Sequential, site: Site) -> LayerBound:
    # named_children() would leave out a module that stands here twice.
    return site.chain((name, child) for name, child in module._modules.items() if child is not None)


@register_rule(MLP, sums=True)
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
    both = {"coefficients", "forward"}
    owner = next(kind for kind in type(residual).__mro__ if both & vars(kind).keys())
    if not both <= vars(owner).keys():
        return None
    site.reads(residual)
    first, second = residual.coefficients()  # pyright: ignore[reportCallIssue]
    return float(first), float(second)


@register_rule(Block, sums=True)
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
    if not isinstance(norm, (PreNorm, PostNorm, NoNorm, DynamicTanh)):
        return site.refuse(
            f"{name}_norm is a {type(norm).__name__}; known placements: PreNorm, PostNorm, NoNorm,"
            " DynamicTanh"
        )
    site.reads(norm, NoNorm)
    return sublayer(
        site,
        lambda inner: inner.chain([(name, getattr(module, name)), ("dropout", module.dropout)]),
        before=(f"{name}_norm", norm) if isinstance(norm, (PreNorm, DynamicTanh)) else None,
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
        first, last = (norm, None) if before else (None, norm)
        bounds.append(sublayer(site, branch, before=first, after=last))
        site = site.at_radius(bounds[-1].out_radius)
    return product_of(bounds)


@register_rule(TransformerStack, sums=True)
def _stack(module: TransformerStack, site: Site) -> LayerBound:
    site = site.under_mask("causal" if module.is_causal else "full")
    layers = [(f"layers.{index}", layer) for index, layer in enumerate(module.layers)]
    return site.chain([*layers, ("final_norm", module.final_norm)])


# In eval mode torch may run a fused kernel, which goes by this flag of the layer and not by its
# activation.
_FUSED_SLOPES = {0: 0.0, 1: 1.0, 2: GELU}
# It reads the weights of parts, or leaves parts out, and calls none; with these that is the same.
_FUSED_PARTS = {
    "self_attn": (nn.MultiheadAttention,), "linear": (nn.Linear, OrthogonalLinear),
    "norm": (nn.LayerNorm, PreNorm, PostNorm, RemovedNorm, nn.Identity), "dropout": (nn.Dropout, nn.Identity),
}  # fmt: skip


@register_rule(nn.TransformerEncoderLayer)
def _encoder_layer(module: nn.TransformerEncoderLayer, site: Site) -> LayerBound:
    heads = module.self_attn
    fits = getattr(heads, "in_proj_bias", None) is not None and heads.num_heads % 2 == 0
    runs_fused = fits and module.activation_relu_or_gelu and not module.training
    for name, part in module.named_children():
        kinds = _FUSED_PARTS.get(name.rstrip("12"))
        if runs_fused and kinds and class_called(without_compiler(part)) not in kinds:
            return site.refuse(
                f"its {name} is a {type(part).__name__}, which torch's fused kernel of eval mode"
                " does not call; set activation_relu_or_gelu = 0 on the layer, so that no such"
                " kernel is taken"
            )

    def mixed(at: Site) -> LayerBound:
        return at.chain(named(module, "self_attn", "dropout1"))

    branches = (("norm1", mixed), ("norm2", partial(_feedforward, module)))
    return normed(module, site, *branches, before=module.norm_first)


def _feedforward(module: nn.TransformerEncoderLayer, site: Site) -> LayerBound:
    up = site.child(module.linear1, "linear1")
    fused = _FUSED_SLOPES[module.activation_relu_or_gelu]
    inner = function_bound(module.activation, site.at_radius(up.out_radius))
    ball = max(inner.out_radius, times(fused, up.out_radius))
    inner = replace(inner, lipschitz=max(inner.lipschitz, fused), out_radius=ball)
    rest = site.at_radius(inner.out_radius).chain(named(module, "dropout", "linear2", "dropout2"))
    return product_of([up, inner, rest])


@register_rule(nn.TransformerEncoder)
def _encoder(module: nn.TransformerEncoder, site: Site) -> LayerBound:
    layers = [(f"layers.{index}", layer) for index, layer in enumerate(module.layers)]
    return site.chain(layers if module.norm is None else [*layers, ("norm", module.norm)])


@register_rule(InvertibleResidual)
def _invertible_residual(module: InvertibleResidual, site: Site) -> LayerBound:
    branch = site.child(module.f, "f")
    given = module.lipschitz
    # What was vouched for is the module without the hooks and adapters that it was given since.
    holds = module.norm == site.norm and first_deviation(module.f) is None
    if given is not None and holds and given < branch.lipschitz:
        branch = LayerBound(
            given, "vouched for by lipschitz=", "empirical", out_radius=branch.out_radius
        )
    return residual_of(1.0, 1.0, branch, site.radius)


@register_rule(ReversibleSequential)
def _reversible_sequential(module: ReversibleSequential, site: Site) -> LayerBound:
    return site.chain((f"blocks.{index}", block) for index, block in enumerate(module.blocks))


@register_rule(AdditiveCoupling)
def _additive_coupling(module: AdditiveCoupling, site: Site) -> LayerBound:
    """Two shears ``(a, b) -> (a + f(b), b)``: norm ``(L + sqrt(L^2 + 4))/2`` in norm 2, ``1 + L``
    in tok and inf.

    In tok, f may carry the change of one token's second half to the first half of another, hence no
    root.
    """
    first = site.child(module.f, "f")
    middle = site.radius + first.out_radius
    second = site.child(module.g, "g", radius=middle)
    out_radius = math.hypot(middle, site.radius + second.out_radius)
    shears = [
        LayerBound(_shear(part.lipschitz, site), "shear", part.label, part.reason, out_radius)
        for part in (first, second)
    ]
    return product_of(shears)


def _shear(lipschitz: float, site: Site) -> float:
    if site.norm == 2 and math.isfinite(lipschitz):
        return (lipschitz + math.hypot(lipschitz, 2.0)) / 2 * (1 + 1e-12)
    return 1 + lipschitz


def mean_pooling(site: Site) -> LayerBound:
    """Mean over the real tokens, n >= ``min_tokens`` of them: ``1/n`` in norm sum, ``1/sqrt(n)`` in
    norm 2, 1 in tok and inf (B9)."""
    power = {2: -0.5, "sum": -1.0}.get(site.norm, 0.0)
    bound = site.min_tokens**power
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
    if by_token.lipschitz < bound.lipschitz:
        return site.adopt(other, by_token, "norm 2 by the tok route")
    return bound
