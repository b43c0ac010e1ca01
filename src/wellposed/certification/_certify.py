"""`certify`: walk a module, bound every part by its rule, and multiply."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from wellposed.attack import activation_dtype, reads_pairs
from wellposed.call_checks import known_keywords
from wellposed.certification._as_called import without_compiler
from wellposed.certification._centres import Centres, check_around, record_centres
from wellposed.certification._certificate import (
    SEE,
    Certificate,
    CertifiedLayer,
    leaves,
    options_digest,
    weights_digest,
)
from wellposed.certification._cross_check import (
    TRIED_TOKENS,
    Claim,
    channels_of,
    try_out,
    undisturbed,
)
from wellposed.certification._walk import RuleContext
from wellposed.errors import ConfigError, ShapeError, unknown_name
from wellposed.linalg import MASK_KINDS, MaskKind, TokenNorm, check_token_norm
from wellposed.model_checks import require_finite_weights, require_module

USELESS = 1e3
"""From this total on, a margin of 1 covers moves of a thousandth of a token's norm at most."""
_KINDS = 3
_ABOVE_ONE = 1.05
"""Number of kinds of parts that are named, and the factor from which a part counts."""
_NO_PREFIX = (
    "without past_key_values: keys and values that a caller passes in need not lie in a ball (B13)"
)


@known_keywords
@torch.no_grad()
def certify(
    module: nn.Module,
    *,
    seq_len: int | None = None,
    norm: TokenNorm = "tok",
    radius: float | None = None,
    mask: MaskKind | None = None,
    min_tokens: int = 1,
    cross_check: bool = True,
    around: Tensor | None = None,
) -> Certificate:
    """Return ``L`` with ``|f(X) - f(Y)| <= L |X - Y|`` for all X, Y of at most ``seq_len`` tokens.

    Status: certified. Each layer takes the smallest of its proved bounds, with spectral norms from
    above (never power iteration), and they are composed in one norm. The proofs are in the theory
    notes; L2 attention follows Kim, Papamakarios, Mnih (2021). Rounding of the forward pass is not
    covered.
    The module is certified as it is called, in its own dtype. With hooks, a replaced ``forward``,
    adapters, unusual weights, or a subclass without a rule there is no bound: the total is
    infinite, and the table names module and reason. A total too large to use has a
    `Certificate.reason`.

    Args:
        module: Any module, in its current mode; call ``module.eval()``, as dropout on attention
            weights has no bound. Whole models are certified from the embedded input on, models of
            pairs from the tokens of both texts on, which move together.
        seq_len: Largest number of tokens N; of a pair, in each of its texts. Not needed if no part
            mixes tokens, as in stacks of linear maps and activations.
        norm: One of ``"tok"`` (largest 2-norm of a token: the tightest for whole models, and its
            radius is also one in norm 2), ``2`` (Frobenius), ``"inf"`` (largest entry), ``"sum"``
            (of the 2-norms of real tokens, for replaced words: variant lipschitz only, B14).
        radius: Largest 2-norm of an input token, before and after the perturbation; needed if there
            is no global constant (dot-product attention). Default: the whole space.
        mask: Attention pattern if the module fixes none: ``"full"``, ``"causal"`` or ``"any"``
            (default; any mask that keeps the diagonal). Sharpens norms 2 and sum. In torch.nn and
            Hugging Face padded queries see real tokens, so there a pattern claims no padding.
        min_tokens: Fewest real tokens; sharpens mean pooling in norms 2 and sum.
        cross_check: Test the bounds by a few forward passes of a few tokens in the module's dtype.
        around: Inputs (batch, tokens, width) of one length, without padding. The bound is then of
            inputs each of whose tokens is within ``radius`` of that of one of them (note B22): norm
            tok only. It is finite with LayerNorm if no token may become constant.

    Raises:
        ShapeError: ``seq_len`` or ``min_tokens`` is out of range.
        ConfigError: ``seq_len`` is missing and a part needs it; unknown norm or mask, a mask that
            the module does not run, ``radius <= 0``; ``around`` without a radius, in another norm,
            or not of vectors.
        NotLipschitzError: NaN or infinity in a parameter (all are named) or in the cross-check.
        UnsoundBoundError: the cross-check exceeds a bound, so the named module's rule is wrong.

    Cost: a few float64 factorisations per weight, about 0.1 s for a layer of width 512 on one core;
    the cross-check adds about 10 % from width 512 on, some milliseconds below. The module is unchanged.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> certificate = certify(net)
    >>> x, y = torch.randn(2, 16, 4)
    >>> bool((net(x) - net(y)).norm(dim=-1).max() <= certificate.total * (x - y).norm(dim=-1).max())
    True
    """
    module, context = checked_context(
        module, seq_len=seq_len, norm=norm, radius=radius, mask=mask, min_tokens=min_tokens
    )
    dtype = context.dtype
    builder = context.builder
    inputs = None
    centres: Centres | None = None
    if around is not None:
        inputs = _inputs_around(module, around, seq_len, norm=norm, radius=radius)
        seq_len = inputs.shape[1]
        min_tokens = min(min_tokens, seq_len)
        with undisturbed(module):
            centres = record_centres(module, inputs, is_causal=mask == "causal")
        builder.centres = centres.by_module
        ball = context.radius + float(inputs.norm(dim=-1).max()) * (1 + 1e-9)
        context = replace(
            context, tokens=seq_len, min_tokens=min_tokens, radius=ball, moved=context.radius
        )

    with undisturbed(module):
        bound = builder.visit(module, context)
        visits = [visit for visit in builder.visits if visit is not None]
        rows = tuple(v.row for v in visits if not v.row.form.startswith("identity"))
        has_bound = math.isfinite(bound.lipschitz)
        tried = "not run: cross_check=False" if has_bound else "not run: no bound to test"
        slopes: dict[str, float] = {}
        if cross_check and has_bound:
            parts = [
                (visit.row.path, visit.module, visit.row.lipschitz)
                for visit in visits
                if visit.module is not None and visit.norm == norm
            ]
            # Innermost first: the first offender is named.
            parts.sort(key=lambda part: _outwards(part[0]))
            visited = [
                (visit.row.path, visit.module, bool(visit.overwrites))
                for visit in sorted(visits, key=lambda visit: _outwards(visit.row.path))
                if visit.module is not None
            ]
            most = TRIED_TOKENS if seq_len is None else min(seq_len, TRIED_TOKENS)
            # A convolution reads channels in place of tokens.
            few = channels_of(module) or max(min_tokens, most) * (2 if reads_pairs(module) else 1)
            causal = builder.masks == {"causal"}
            layers = {
                owner: made[1]
                for (owner, kind), made in builder.memory.items()
                if kind == "bound_layers"
            }
            tried, slopes = try_out(
                Claim(
                    module,
                    bound.lipschitz,
                    parts,
                    norm,
                    radius,
                    few,
                    causal,
                    dtype,
                    layers,
                    visited,
                    inputs,
                )
            )

    return Certificate(
        total=bound.lipschitz,
        layers=_without_root(rows),
        label=bound.label if has_bound else "uncertified",
        norm=norm,
        tokens=seq_len,
        min_tokens=min_tokens,
        mask="/".join(sorted(builder.masks)) or "none used",
        domain=_domain(radius, inputs),
        dtype="/".join(_dtypes(module)) or "no parameters",
        ball=math.inf if radius is None or inputs is not None else float(radius),
        around=0 if centres is None else centres.count,
        reach=math.inf if centres is None or radius is None else float(radius),
        outputs=None if centres is None else centres.outputs,
        notes=(*builder.notes, *_notes(module)),
        head=builder.head,
        skip=builder.skip,
        cross_check=tried,
        reason=_explain(bound.lipschitz, rows),
        form=bound.form,
        attained=slopes,
        weights=weights_digest(module) if has_bound else "",
        options=options_digest(module) if has_bound else "",
        module=weakref.ref(module),
    )


def _inputs_around(
    module: nn.Module, around: object, seq_len: int | None, *, norm: TokenNorm, radius: float | None
) -> Tensor:
    """Return the inputs of ``around=`` in float64, or raise what is wrong with the request."""
    if norm != "tok":
        raise ConfigError(
            f"certify: around= has bounds in norm 'tok' only, received norm={norm!r}; a radius in tok is"
            " also one in norm 2, so leave norm out"
        )
    if radius is None or math.isinf(radius):
        raise ConfigError(
            "certify: around= needs radius=, the finite 2-norm by which each token may move from its"
            f" place in around; received {radius!r}"
        )
    return check_around(module, around, seq_len)


def _domain(radius: float | None, inputs: Tensor | None) -> str:
    if inputs is not None:
        return f"tokens within {radius:g} of those of {len(inputs)} inputs"
    return "all inputs" if radius is None else f"tokens with |x_i| <= {radius:g}"


def checked_context(
    module: nn.Module,
    *,
    seq_len: int | None,
    norm: TokenNorm,
    radius: float | None,
    mask: MaskKind | None,
    min_tokens: int,
) -> tuple[nn.Module, RuleContext]:
    """Return the module that is certified and the context of its rule, or raise what `certify`
    does for wrong arguments."""
    require_module("certify", module)
    check_token_norm(norm)
    if mask is not None and mask not in MASK_KINDS:
        raise unknown_name("mask", str(mask), MASK_KINDS)

    for name, count in (("seq_len", seq_len), ("min_tokens", min_tokens)):
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ShapeError(
                f"certify: {name} must be a whole number of tokens >= 1, received {count!r}"
            )

    if seq_len is not None and min_tokens > seq_len:
        raise ShapeError(f"certify: min_tokens={min_tokens} exceeds seq_len={seq_len}")
    is_number = isinstance(radius, (int, float)) and not isinstance(radius, bool)
    if radius is not None and not (is_number and radius > 0):
        raise ConfigError(
            "certify: radius is the largest 2-norm of an input token, or with around= of a move, so it"
            f" must be a Python number > 0; received {radius!r}"
        )

    module = without_compiler(module)
    require_finite_weights("certify", module)
    dtype = activation_dtype(module)
    ball = math.inf if radius is None else float(radius)
    return module, RuleContext("", ball, norm, seq_len, min_tokens, mask, dtype)


def _outwards(path: str) -> int:
    """Return a key by which inner modules come first."""
    return -(bool(path) + path.count("."))


def _without_root(rows: tuple[CertifiedLayer, ...]) -> tuple[CertifiedLayer, ...]:
    """Drop the module's own row: it repeats the total, unless it says why there is none."""
    inner = tuple(row for row in rows if row.path)
    if not inner:
        return rows
    says_why = rows[0].label == "uncertified" and not rows[0].reason.startswith(SEE)
    return rows if says_why else inner


def _dtypes(module: nn.Module) -> list[str]:
    floating = {weight.dtype for weight in module.parameters() if weight.is_floating_point()}
    return sorted(str(dtype).removeprefix("torch.") for dtype in floating)


def _notes(module: nn.Module) -> list[str]:
    notes = []
    half = [name for name in _dtypes(module) if name in ("float16", "bfloat16")]
    if half:
        notes.append(
            f"weights are {'/'.join(half)}: the bound is for exact arithmetic with these weights;"
            " rounding of the half-precision forward pass is not covered"
        )
    if "past_key_values" in inspect.signature(module.forward).parameters:
        notes.append(_NO_PREFIX)
    return notes


def _explain(total: float, rows: Sequence[CertifiedLayer]) -> str:
    """Return one line on a total above `USELESS`: the kinds of parts with the largest products."""
    if not USELESS < total < math.inf:
        return ""
    groups: dict[str, list[float]] = {}
    for row in leaves(rows):
        if row.lipschitz > _ABOVE_ONE:
            groups.setdefault(row.module, []).append(row.lipschitz)

    culprits: list[str] = []
    for kind in sorted(groups, key=lambda kind: -math.prod(groups[kind]))[:_KINDS]:
        low = min(groups[kind])
        high = max(groups[kind])
        count = len(groups[kind])
        factors = f"{high:.3g}" if high < 1.05 * low else f"{low:.3g} to {high:.3g}"
        culprits.append(f"{count} {kind} of {factors}")
    why = ", ".join(culprits) or "no kind of layer alone is responsible, each adds to it"

    return f"vacuous ({total:.3g}): {why}; use smaller weights, or parts of the variant lipschitz"
