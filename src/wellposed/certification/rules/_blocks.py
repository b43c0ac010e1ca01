"""Rules of residuals, blocks and stacks, ours and those of `torch.nn`, and of poolings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from wellposed.certification._as_called import (
    changes_input,
    class_called,
    first_deviation,
    overwritten,
    without_compiler,
)
from wellposed.certification._layer_bound import LayerBound, times
from wellposed.certification._rules_by_class import register_rule
from wellposed.certification._walk import RuleContext
from wellposed.certification.bounds import Slopes
from wellposed.certification.rules._torch_layers import GELU_SLOPES, function_bound
from wellposed.nn import (
    Block,
    DynamicTanh,
    InvertibleResidual,
    NoNorm,
    OrthogonalLinear,
    PlainResidual,
    PostNorm,
    PreNorm,
    RemovedNorm,
    ReversibleSequential,
    ReZeroResidual,
)


def residual_coefficients(residual: nn.Module, context: RuleContext) -> tuple[float, float] | None:
    """Return (a, b) of a residual ``a x + b f(x)``, by its ``coefficients()`` if it is of no known
    class; or None."""
    context.reads(residual, PlainResidual, ReZeroResidual)
    if type(residual) is PlainResidual:
        return 1.0, 1.0
    if type(residual) is ReZeroResidual:
        return 1.0, float(residual.scale.detach())
    both = {"coefficients", "forward"}
    owner = next(kind for kind in type(residual).__mro__ if both & vars(kind).keys())
    if not both <= vars(owner).keys():
        return None
    context.reads(residual)
    first, second = residual.coefficients()  # pyright: ignore[reportCallIssue]
    return float(first), float(second)


@register_rule(Block, sums=True)
def _block(module: Block, context: RuleContext) -> LayerBound:
    first = _sublayer(module, "attention", context)
    second = _sublayer(module, "feedforward", context.after(first))
    return context.product([first, second])


def _sublayer(module: Block, name: str, context: RuleContext) -> LayerBound:
    """Bound ``x -> P(x, f)``: the branch with its norm and dropout, inside the residual."""
    norm = getattr(module, f"{name}_norm")
    residual = getattr(module, f"{name}_residual")
    coefficients = residual_coefficients(residual, context)
    if coefficients is None:
        why = "whose class does not define coefficients() -> (a, b) beside its forward"
        why = getattr(residual, "no_bound", why)
        return context.refuse(f"{name}_residual is a {type(residual).__name__}, {why}")
    if not isinstance(norm, (PreNorm, PostNorm, NoNorm, DynamicTanh)):
        return context.refuse(
            f"{name}_norm is a {type(norm).__name__}; known placements: PreNorm, PostNorm, NoNorm,"
            " DynamicTanh or DynamicErf"
        )

    context.reads(norm, NoNorm)
    return context.sublayer(
        lambda inner: inner.chain([(name, getattr(module, name)), ("dropout", module.dropout)]),
        before=(f"{name}_norm", norm) if isinstance(norm, (PreNorm, DynamicTanh)) else None,
        after=(f"{name}_norm", norm) if isinstance(norm, PostNorm) else None,
        coefficients=coefficients,
    )


# torch's fused kernel of eval mode uses this flag of the layer, not its activation.
_FUSED_SLOPES = {1: (0.0, 1.0), 2: GELU_SLOPES}
# The kernel reads weights and calls no part; for these classes that makes no difference.
_FUSED_PARTS = {
    "self_attn": (nn.MultiheadAttention,), "linear": (nn.Linear, OrthogonalLinear),
    "norm": (nn.LayerNorm, PreNorm, PostNorm, RemovedNorm, nn.Identity), "dropout": (nn.Dropout, nn.Identity),
}  # fmt: skip


@register_rule(nn.TransformerEncoderLayer)
def _encoder_layer(module: nn.TransformerEncoderLayer, context: RuleContext) -> LayerBound:
    heads = module.self_attn
    fits = getattr(heads, "in_proj_bias", None) is not None and heads.num_heads % 2 == 0
    runs_fused = fits and module.activation_relu_or_gelu and not module.training
    for name, part in module.named_children():
        kinds = _FUSED_PARTS.get(name.rstrip("12"))
        if runs_fused and kinds and class_called(without_compiler(part)) not in kinds:
            return context.refuse(
                f"its {name} is a {type(part).__name__}, which torch's fused kernel of eval mode"
                " does not call; set activation_relu_or_gelu = 0 on the layer to switch it off"
            )

    return context.layer(
        module,
        ("norm1", lambda at: at.chain_of(module, "self_attn dropout1")),
        ("norm2", partial(_feedforward, module)),
        before=module.norm_first,
    )


def _feedforward(module: nn.TransformerEncoderLayer, context: RuleContext) -> LayerBound:
    up = context.child(module.linear1, "linear1")
    inner = function_bound(module.activation, context.after(up))
    inner = _either(inner, _FUSED_SLOPES.get(module.activation_relu_or_gelu), up.out_radius)
    rest = context.at_radius(inner.out_radius).chain_of(module, "dropout linear2 dropout2")
    return context.product([up, inner, rest])


def _either(inner: LayerBound, fused: tuple[float, float] | None, radius: float) -> LayerBound:
    """Bound the layer's activation and that of the fused kernel, of which one runs."""
    if fused is None:
        return inner
    steepest = max(inner.lipschitz, *map(abs, fused))
    ball = max(inner.out_radius, times(max(map(abs, fused)), radius))
    links = None
    match inner.links:
        case (Slopes(low=float(low), high=float(high)),):
            links = (Slopes(min(low, fused[0]), max(high, fused[1])),)
        case ():
            links = (Slopes(min(1.0, fused[0]), max(1.0, fused[1])),)
    return replace(inner, lipschitz=steepest, out_radius=ball, links=links)


@register_rule(nn.TransformerEncoder)
def _encoder(module: nn.TransformerEncoder, context: RuleContext) -> LayerBound:
    return context.chain_of(module, "layers.*" if module.norm is None else "layers.* norm")


@register_rule(InvertibleResidual)
def _invertible_residual(module: InvertibleResidual, context: RuleContext) -> LayerBound:
    branch = context.child(module.f, "f")
    vouched = module.lipschitz
    if branch.overwrites or vouched is None or vouched >= branch.lipschitz:
        return context.residual(branch)

    if branch.label == "uncertified":
        # Without a rule nothing says which tensor a part in place changes.
        parts = module.f.named_modules(prefix="f")
        in_place = (
            f"{path} ({type(part).__name__})" for path, part in parts if changes_input(part)
        )
        changed = next(in_place, None)
        if changed is not None:
            return context.refuse(overwritten(changed))

    # The claim covers the module without later hooks and adapters, and supplies a missing proof
    # alone: other reasons say that the map is not the claimed one.
    applies = module.norm == context.norm and first_deviation(module.f) is None
    if applies and (branch.label != "uncertified" or branch.unproved):
        branch = LayerBound(
            vouched, "vouched for by lipschitz=", "empirical", out_radius=branch.out_radius
        )
    return context.residual(branch)


@register_rule(ReversibleSequential)
def _reversible_sequential(module: ReversibleSequential, context: RuleContext) -> LayerBound:
    return context.chain_of(module, "blocks.*")


def mean_pooling(context: RuleContext) -> LayerBound:
    """Bound the mean of n >= ``min_tokens``: ``1/n`` in sum, ``1/sqrt(n)`` in 2, else 1 (B9)."""
    power = {2: -0.5, "sum": -1.0}.get(context.norm, 0.0)
    bound = context.min_tokens**power
    return LayerBound(bound, "mean over real tokens", "exact", out_radius=context.radius)


def one_token(context: RuleContext) -> LayerBound:
    """Bound the choice of one token: 1 in every norm."""
    return LayerBound(1.0, "one token", "exact", out_radius=context.radius)


def of_one_vector(route: Callable[[RuleContext], LayerBound], context: RuleContext) -> LayerBound:
    """Bound a map to one vector, in norm 2 by tok too, as ``|delta|_tok <= |delta|_2``."""
    bound = route(context)
    if context.norm != 2:
        return bound

    other = context.in_norm("tok")
    by_token = route(other)
    if by_token.lipschitz < bound.lipschitz:
        # Rows that are still open (None) belong to enclosing modules and stay.
        mine = context.builder
        theirs = other.builder
        mine.visits[len(mine.visits) - mine.visits[::-1].index(None) :] = theirs.visits
        mine.head = theirs.head
        mine.skip = theirs.skip
        mine.notes.append("layer bounds are in norm tok")
        return replace(by_token, form="norm 2 by the tok route")

    return bound
