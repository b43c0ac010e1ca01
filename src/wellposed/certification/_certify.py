"""`certify`: walk a module, bound every part by its rule, and multiply."""

from __future__ import annotations

import inspect
import math
import weakref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from wellposed.attack import activation_dtype, patch_grid, reads_pairs
from wellposed.certification._as_called import without_compiler
from wellposed.certification._certificate import Certificate, CertifiedLayer, weights_digest
from wellposed.certification._cross_check import TRIED_TOKENS, Claim, try_out, undisturbed
from wellposed.certification._explain import explain
from wellposed.certification._rules import Shared, Site, bound_of
from wellposed.errors import ConfigError, NotLipschitzError, ShapeError, listed, unknown_name
from wellposed.linalg import MASK_KINDS, MaskKind, Norm, check_norm

_NO_PREFIX = (
    "without past_key_values: keys and values that a caller puts in need not lie in any ball (B13)"
)


@torch.no_grad()
def certify(
    module: nn.Module,
    *,
    seq_len: int,
    norm: Norm = "tok",
    radius: float | None = None,
    mask: MaskKind | None = None,
    min_tokens: int = 1,
    cross_check: bool = True,
) -> Certificate:
    """Return ``L`` with ``|f(X) - f(Y)| <= L |X - Y|`` for every X, Y of at most ``seq_len``
    tokens, layer by layer.

    Certified: each layer takes the least of its proved bounds, with spectral norms from above
    (never power iteration); the whole is their composition in one norm. Deterministic. A module
    without a bound makes the total infinite and the label ``uncertified``; the module and the
    reason are in the table; a total of no use has a `Certificate.reason`.
    What is covered is the module as it is called, in its own dtype: a module with hooks, a replaced
    ``forward``, adapters, weights of an unusual kind, or of a subclass without a rule of its own
    has no bound. Kim, Papamakarios, Mnih (2021) for L2 attention; every bound with its proof is in
    the theory note of the documentation.

    Args:
        module: any module; it is read in the mode it is in (dropout on attention weights in
            training has no bound, so call ``module.eval()``). Whole models, also of Hugging Face,
            are certified from the embedded input on; models of pixels from patches of pixels on
            (`wellposed.attack.PatchGrid`); models of pairs from the tokens of both texts on,
            which move together.
        seq_len: largest number of tokens N; of a pair, in each of its texts.
        norm: ``"tok"`` (largest 2-norm of a token: the tightest for whole models, and its radius is
            also one in norm 2), ``2`` (Frobenius) or ``"inf"`` (largest entry).
        radius: for maps without a global constant (dot-product attention): every input token has
            2-norm at most this, before and after the perturbation. The whole space where not given.
        mask: attention pattern, where the module does not fix it: ``"full"``, ``"causal"``, or
            ``"any"`` (the default) for any mask that keeps the diagonal. Sharpens norm 2 only.
            Padded queries attend to themselves alone; those of torch.nn and Hugging Face attend to
            real tokens, so for these a pattern says that nothing is padded.
        min_tokens: fewest real tokens of an input; sharpens mean pooling in norm 2 by
        ``1/sqrt(min_tokens)``.
        cross_check: try the bounds out by a few forward passes of a few tokens in the module's own
        dtype.

    Raises:
        ShapeError: ``seq_len`` or ``min_tokens`` out of range.
        ConfigError: unknown norm or mask, a mask that is not the one the module runs, or ``radius
        <= 0``.
        NotLipschitzError: a parameter holds NaN or infinity (all are named), or the cross-check's
        forward pass does.
        UnsoundBoundError: the cross-check found a slope above a bound, so a rule is wrong; the
        module is named.

    Cost: a few factorisations per weight matrix in float64, about 0.1 s for a layer of width 512 on
    one core. The cross-check adds about 10 % from width 512 on, some milliseconds below, and to
    contractive layers one more bound. Rounding of the forward pass is not covered. Buffers, weights
    and random state are left as they were.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> certificate = certify(net, seq_len=16)
    >>> x, y = torch.randn(2, 16, 4)
    >>> bool((net(x) - net(y)).norm(dim=-1).max() <= certificate.total * (x - y).norm(dim=-1).max())
    True
    """
    check_norm(norm)
    if mask is not None and mask not in MASK_KINDS:
        raise unknown_name("mask", str(mask), MASK_KINDS)
    for name, count in (("seq_len", seq_len), ("min_tokens", min_tokens)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ShapeError(
                f"certify: {name} must be a whole number of tokens >= 1, received {count!r}"
            )
    if min_tokens > seq_len:
        raise ShapeError(f"certify: min_tokens={min_tokens} exceeds seq_len={seq_len}")
    if radius is not None and not radius > 0:
        raise ConfigError(
            "certify: radius is a 2-norm that no input token exceeds, so it must be > 0; received"
            f" {radius}"
        )
    module = without_compiler(module)
    _refuse_non_finite(module)
    shared = Shared(norm, seq_len, min_tokens, dtype=activation_dtype(module))
    with undisturbed(module):
        start = Site("", math.inf if radius is None else float(radius), shared, mask)
        bound = bound_of(module, start)

        def without(kinds: frozenset[str]) -> float:
            return bound_of(module, start.in_norm(norm, calm=kinds)).lipschitz

        rows = tuple(
            row for row in shared.rows if row is not None and not row.form.startswith("identity")
        )
        reason = explain(bound.lipschitz, rows, without)
        tried = (
            "not run: no bound to try out"
            if math.isinf(bound.lipschitz)
            else "not run: cross_check=False"
        )
        if cross_check and math.isfinite(bound.lipschitz):
            causal = shared.masks == {"causal"}
            grid = patch_grid(module)
            few = max(min_tokens, min(seq_len, TRIED_TOKENS)) * (2 if reads_pairs(module) else 1)
            count = few if grid is None else grid.tokens
            tried = try_out(
                Claim(
                    module,
                    bound.lipschitz,
                    shared.passed,
                    norm,
                    radius,
                    count,
                    causal,
                    activation_dtype(module),
                )
            )
    dtype, notes = _dtype_of(module)
    if "past_key_values" in inspect.signature(module.forward).parameters:
        notes = (*notes, _NO_PREFIX)
    return Certificate(
        total=bound.lipschitz,
        layers=_without_root(rows),
        label="uncertified" if math.isinf(bound.lipschitz) else bound.label,
        norm=norm,
        tokens=seq_len,
        min_tokens=min_tokens,
        mask="/".join(sorted(shared.masks)) or "none used",
        domain="all inputs" if radius is None else f"tokens with |x_i| <= {radius:g}",
        dtype=dtype,
        ball=math.inf if radius is None else float(radius),
        notes=(*shared.notes, *notes),
        head=shared.head,
        cross_check=tried,
        reason=reason,
        weights=weights_digest(module) if math.isfinite(bound.lipschitz) else "",
        module=weakref.ref(module),
    )


def _without_root(rows: tuple[CertifiedLayer, ...]) -> tuple[CertifiedLayer, ...]:
    """The module's own row repeats the total, unless it alone says why there is none."""
    inner = tuple(row for row in rows if row.path)
    if not inner or (
        rows[0].label == "uncertified" and all(row.label != "uncertified" for row in inner)
    ):
        return rows
    return inner


def _refuse_non_finite(module: nn.Module) -> None:
    bad = [
        f"{name} {tuple(parameter.shape)}: {int((~torch.isfinite(parameter)).sum())} of"
        f" {parameter.numel()} entries"
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
        and not is_lazy(parameter)
        and not (bool(torch.isfinite(parameter.sum())) or bool(torch.isfinite(parameter).all()))
    ]
    if bad:
        raise NotLipschitzError(
            "certify: parameters hold NaN or infinity, so there is nothing to certify:\n"
            + listed(bad)
            + "\nload an earlier checkpoint, or look for the step at which training diverged"
        )


def _dtype_of(module: nn.Module) -> tuple[str, tuple[str, ...]]:
    dtypes = sorted(
        {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.is_floating_point()}
    )
    half = [name for name in dtypes if name in ("float16", "bfloat16")]
    note = (
        f"weights are {'/'.join(half)}: the bound is for exact arithmetic with these weights; "
        "rounding of the half-precision forward pass is not covered"
    )
    return "/".join(dtypes) or "no parameters", (note,) if half else ()
