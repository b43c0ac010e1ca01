"""Reports of inverses and determinants; the fixed point `x = y - f(x)`, and a bound of its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from wellposed.errors import ConvergenceError, is_about_resources
from wellposed.interrupts import undoing
from wellposed.linalg import Norm

# Measured: residuals stop shrinking at 0.3 units of rounding for attention of width 16 to 512, at
# 0.3 sqrt(width) for the hardest linear maps. Stop at one unit, or if a residual below the second
# limit stalls.
_UNITS_ENOUGH = 1.0
_UNITS_STALLED = (2.0, 0.5)
_WINDOW = 6
_PRODUCTS = {"cuda tf32": torch.float16, "cpu bf16": torch.bfloat16}
"""By device and precision of float32 products, the dtype of as many digits."""


@dataclass(frozen=True)
class Inversion:
    """How well `x + f(x) = y` was solved: `|x - x*| <= error_bound` in `norm`, for every sample.

    x* is the inverse in exact arithmetic of y, with these weights. The bound is a-posteriori: the
    residual `y - f(x) - x` of the returned x is evaluated in float64, so that it includes all
    rounding in the working dtype. The rounding of that evaluation is added, and the sum divided by
    `1 - c` (theory note B16). A stack carries errors of later blocks through the earlier ones. If y
    itself is a computed `x_0 + f(x_0)`, its rounding, divided by the product of `1 - c`, adds to
    the distance from x_0.
    """

    iterations: int
    """Evaluations of f (in a stack: of all blocks), without the one for the error bound."""
    residual: float
    """Norm of `y - f(x) - x` at the returned x; in a stack the largest."""
    error_bound: float
    """Infinite if unknown: blocks of different norms, foreign blocks, or a backward pass."""
    contraction: float
    """The c < 1 that was used; in a stack the largest."""
    norm: Norm
    converged: bool = True
    blocks: tuple[Inversion, ...] = ()
    """In a stack: one report for each block, in the order of the blocks."""
    measured_in: torch.dtype | None = None
    """Dtype of the evaluation for the error bound, float64 if f runs in it."""
    reason: str = ""
    """Why `error_bound` is infinite, if known; for instance, rounding of large logits."""


class LogDeterminant(NamedTuple):
    """`log |det J|` of each example, and how far off it may be, rounding aside (theory note B17)."""

    value: Tensor
    """(batch,), in float64 if the device has it; differentiable in x and the weights."""
    truncation_bound: float
    """Largest error from the terms left out; 0 if exact."""
    standard_error: Tensor
    """(batch,), of the mean over the probes: 0 without probes, infinite for a single one."""


def sample_norms(tokens: Tensor, norm: Norm) -> Tensor:
    """Norm of each sample, (batch,): tok = largest 2-norm of a token, inf = entry, 2 = all."""
    if norm == "tok":
        sizes = torch.linalg.vector_norm(tokens, dim=-1)
        return sizes if sizes.dim() <= 1 else sizes.flatten(1).amax(-1)
    flat = tokens.flatten(1) if tokens.dim() > 1 else tokens[None]
    return torch.linalg.vector_norm(flat, math.inf if norm == "inf" else 2, dim=-1)


def solve(
    f: Callable[[Tensor], Tensor],
    y: Tensor,
    contraction: float,
    norm: Norm,
    *,
    tol: float | None,
    max_iter: int,
) -> tuple[Tensor, Inversion]:
    """Solve `x + f(x) = y` as `InvertibleResidual.inverse`, without the error bound."""
    where = "InvertibleResidual.inverse"
    c = contraction
    bad = ~y.isfinite()
    if bool(bad.any()):
        raise ConvergenceError(
            f"{where}: {int(bad.sum())} of {y.numel()} values of y are NaN or infinite; expected finite"
            " numbers"
        )

    # Relative to y and x: stop below `enough`, or below `stalled` if the residual no longer halves.
    if tol is not None:
        enough = stalled = tol * (1 - c)
    else:
        unit = torch.finfo(computed_in(y)).eps
        width = y.shape[-1] if y.dim() else 1
        first, slope = _UNITS_STALLED
        # Products of fewer digits only raise the floor: f may have no product.
        fine = unit if torch.is_autocast_enabled(y.device.type) else torch.finfo(y.dtype).eps
        enough = _UNITS_ENOUGH * fine
        stalled = (first + slope * math.sqrt(width)) * unit

    mixer = _Anderson(y, c)
    x = y
    scale = sample_norms(y, norm)
    residual = math.inf
    best = torch.full_like(scale, math.inf)
    for iteration in range(1, max_iter + 1):
        image = y - f(x)
        difference = image - x
        sizes = sample_norms(difference, norm)
        # The rounding of x, which may be 1 / (1 - c) times as large as y, limits the residual.
        scale = torch.maximum(scale, sample_norms(image, norm))
        residual = float(sizes.max()) if sizes.numel() else 0.0
        if not math.isfinite(residual):
            raise ConvergenceError(
                f"{where}: f returned NaN or infinity in evaluation {iteration}; check f"
            )
        at_floor = (sizes <= stalled * scale) & (2 * sizes > best)
        if bool(((sizes <= enough * scale) | at_floor).all()):
            return image, Inversion(iteration, residual, math.inf, c, norm)
        best = torch.minimum(best, sizes)
        x = mixer.next(image, difference, sizes)

    raise ConvergenceError(
        f"{where}: after max_iter={max_iter} evaluations of f the error may be"
        f" {c / (1 - c) * residual:.3g} (norm {norm!r}, c = {c:.4g}); expected at most"
        f" {stalled / (1 - c):.3g} times the size of y; use a larger max_iter or"
        f" tol: rounding in {str(y.dtype).removeprefix('torch.')} sets a floor"
    )


def computed_in(y: Tensor) -> torch.dtype:
    """Return the coarsest dtype in which f computes: of y, autocast or float32 products."""
    device = y.device.type
    if y.dtype is not torch.float32:
        return y.dtype
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    return _PRODUCTS.get(f"{device} {backend.matmul.fp32_precision}", y.dtype)


class _Anderson:
    """Type-II Anderson mixing per sample (Walker and Ni, 2011, eq. 2.2), with Picard as safeguard.

    If a mixed iterate's residual is above c times the last one, Picard's step from the better of
    the two follows. So two evaluations always gain the factor c.
    """

    def __init__(self, y: Tensor, contraction: float) -> None:
        self.contraction = contraction
        self.batch = y.shape[0] if y.dim() > 1 else 1
        shape = (self.batch, _WINDOW, y.numel() // max(self.batch, 1))
        self.differences = y.new_zeros(shape)
        self.images = y.new_zeros(shape)
        self.count = 0
        self.last: tuple[Tensor, Tensor, Tensor] | None = None

    def next(self, image: Tensor, difference: Tensor, sizes: Tensor) -> Tensor:
        """Return the next iterate from `image = y - f(x)`, `difference = image - x`, its norms."""
        # (batch, ...) -> (batch, entries)
        flat_image = image.reshape(self.batch, -1)
        flat = difference.reshape(self.batch, -1)
        if self.last is None:
            self.last = (flat_image, flat, sizes)
            return image

        previous_image, previous, previous_sizes = self.last
        slot = self.count % _WINDOW
        self.differences[:, slot] = flat - previous
        self.images[:, slot] = flat_image - previous_image
        self.count += 1
        mixed = flat_image - self._weights(flat).unsqueeze(1).matmul(self.images).squeeze(1)
        failed = (sizes > self.contraction * previous_sizes)[:, None]
        better = torch.where((sizes <= previous_sizes)[:, None], flat_image, previous_image)
        chosen = torch.where(failed | ~mixed.isfinite().all(-1, keepdim=True), better, mixed)
        self.last = (flat_image, flat, sizes)

        return chosen.reshape(image.shape)

    def _weights(self, difference: Tensor) -> Tensor:
        """Least-squares weights of the stored differences, (batch, window); 0 in unused slots."""
        stored = self.differences
        lengths = torch.linalg.vector_norm(stored, dim=-1, keepdim=True)
        lengths = lengths.clamp_min(torch.finfo(stored.dtype).tiny)
        unit = stored / lengths
        gram = (unit @ unit.mT).double()
        right = (unit @ difference.unsqueeze(-1)).double()
        # Without this floor nearly parallel differences, whose Gram matrix is only rounding, would
        # get large weights.
        gram.diagonal(dim1=-2, dim2=-1).add_(4 * torch.finfo(stored.dtype).eps)
        weights = torch.linalg.solve(gram, right).to(stored.dtype)
        return (weights / lengths).squeeze(-1)


# If rounding may move logits by more than this, the first order does not bound a softmax's change.
_MOVED_AT_MOST = 1 / 8
# Larger entries of a key mark padding (`l2_attention`) and are not part of a logit.
_MARK = 1e29
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
# A function mode cannot see the softmax inside these.
_CLOSED = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)


class LogitRounding(TorchFunctionMode):
    """Measure the rounding of the logits of all softmaxes inside; see the theory note B16.

    Its cost is `amplification` times `c |x - mean x|`. Two steps are measured, not proved, with a
    margin of 1,000 for large logits. One is that a given c is a product of norms of parts. The
    other is the ratio by coordinates, which may be too small by a factor sqrt(d). `refusal` is set
    if a logit may move by more than 1/8.
    """

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm: Norm = norm
        self.amplification = 0.0
        self.refusal = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function and record what it does to logits."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._note_attention(result, *args, **kwargs)
        elif func in _SOFTMAX:
            self._note_softmax((*args, *kwargs.values())[0], result)
        elif func in _CLOSED:
            self.refusal = f"{func.__name__} hides its logits, so their rounding is not known"
        return result

    def _note_attention(
        self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *flags: Any, **rest: Any
    ) -> None:
        if not out.numel():
            return
        eps = torch.finfo(out.dtype).eps

        def mean(values: Tensor) -> Tensor:
            """Return `sum_j P_ij values_j`; a kernel may want the width of the keys."""
            wide = F.pad(values, (0, max(key.shape[-1] - values.shape[-1], 0)))
            means = F.scaled_dot_product_attention(query, key, wide, *flags, **rest)
            return means[..., : values.shape[-1]]

        scale = abs(rest.get("scale") or 1 / math.sqrt(query.shape[-1]))
        keys = key.masked_fill(key.abs() >= _MARK, 0.0)
        logits = scale * (query.abs() * mean(keys.square()).clamp_min(0).sqrt()).sum(-1)
        seconds = mean(value.square())
        # Rounding of the difference of two squares.
        variance = (seconds - out.square()).clamp_min(0)
        deviation = variance.add(16 * eps * seconds.clamp_min(0)).sqrt()
        reach = (value - value.mean(-2, keepdim=True)).abs().amax(-2, keepdim=True)
        if reach.shape[-3:-2] != deviation.shape[-3:-2]:  # grouped heads
            reach = reach.repeat_interleave(deviation.shape[-3] // reach.shape[-3], -3)
        share = torch.where(deviation > 0, deviation / reach, 0.0).nan_to_num(1.0).amax(-1)
        self._add((math.sqrt(query.shape[-1]) + 8) * eps / 2 * logits, share.clamp_max(1.0))

    def _note_softmax(self, logits: Tensor, weights: Tensor) -> None:
        """Count only the logits' own rounding, which assumes that nothing cancelled in them."""
        if weights.numel():
            largest = torch.where(weights > 0, logits.to(weights.dtype).abs(), 0.0).amax(-1)
            self._add(4 * torch.finfo(weights.dtype).eps * largest, weights.new_ones(()))

    def _add(self, moved: Tensor, share: Tensor) -> None:
        worst = float(moved.max())
        if not worst <= _MOVED_AT_MOST:
            self.refusal = (
                f"rounding may move a logit by {worst:.2g} in"
                f" {str(moved.dtype).removeprefix('torch.')}, and more than {_MOVED_AT_MOST:g}"
                " leaves the attention weights undetermined; tokens or projections are too large"
            )
            return
        rows = moved * share
        size = torch.linalg.vector_norm(rows) if self.norm == 2 else rows.max()
        self.amplification += float(size)


def with_error_bound(
    report: Inversion, f: nn.Module, x: Tensor, y: Tensor, options: dict[str, Any]
) -> Inversion:
    """Return the report with `|x - x*| <= error_bound`, where `x* + f(x*) = y` in exact arithmetic.

    The theory note B16 derives the bound. It does not cover an f that cancels numbers far larger
    than `c |x|` and `|f(x)|`, or that rounds to a coarser dtype inside. If f does not run in
    float64 it is evaluated in its own dtype, with that dtype's rounding. Cost: one evaluation of f
    in float64, with three attentions in place of each.
    """
    image, measured_in, logits = evaluated(f, x, options, report.norm)
    wide = widest(x)
    solution = x.to(wide)
    image = image.to(wide)
    gap = y.to(wide) - solution
    # Without a dimension of tokens, nothing is subtracted.
    spread = solution - solution.mean(-2, keepdim=True) if x.dim() > 2 else solution
    size, moved, branch, residual, apart = (
        sample_norms(part, report.norm) for part in (solution, gap, image, gap - image, spread)
    )
    width = x.shape[-1] if x.dim() else 1
    c = report.contraction
    allowed = (math.sqrt(width) + 8) * torch.finfo(measured_in).eps
    rounding = torch.finfo(wide).eps * (moved + residual) + logits.amplification * c * apart
    rounding = rounding + allowed * (c * size + branch)
    # The margin covers the rounding of the norms.
    error = math.inf if logits.refusal else (1 + 1e-9) * _largest(residual + rounding)
    bound = error_in_x(error, c, f, y)
    reason = logits.refusal
    if bound == math.inf and error < math.inf:
        reason = f"the slope {c} is 1 to rounding"

    worst = _largest(residual)
    return replace(
        report, residual=worst, error_bound=bound, measured_in=measured_in, reason=reason
    )


def error_in_x(error: float, contraction: float, block: nn.Module, y: Tensor) -> float:
    """Return `error / (1 - c')`, a bound of x's error; c' is the contraction rounded up."""
    dtypes = {part.dtype for part in (y, *block.parameters()) if part.is_floating_point()}
    slope = contraction * (1 + 2 * max(torch.finfo(dtype).eps for dtype in dtypes))
    if slope >= 1:
        return math.inf if error else 0.0
    return error / (1 - slope)


def _largest(sizes: Tensor) -> float:
    largest = float(sizes.max()) if sizes.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def widest(x: Tensor) -> torch.dtype:
    """Return float64, or float32 on a device without it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def evaluated(
    f: nn.Module, x: Tensor, options: dict[str, Any], norm: Norm
) -> tuple[Tensor, torch.dtype, LogitRounding]:
    """Return f(x) in the widest dtype in which f runs, that dtype, and the logits' rounding."""
    wide = widest(x)

    def widened(value: Any) -> Any:
        return value.to(wide) if isinstance(value, Tensor) and value.is_floating_point() else value

    try:
        with (
            _weights_in(wide, f, x.dtype),
            torch.autocast(x.device.type, enabled=False),
            LogitRounding(norm) as logits,
        ):
            image = f(widened(x), **pytree.tree_map(widened, options))
        return image, image.dtype, logits
    except (RuntimeError, TypeError) as error:
        if is_about_resources(error):
            raise
        # Mixed dtypes, or no kernel in float64. In its own dtype f has already run.
        with LogitRounding(norm) as logits:
            image = f(x, **options)
        return image, computed_in(image), logits


@contextmanager
def _weights_in(dtype: torch.dtype, module: nn.Module, stored_in: torch.dtype) -> Iterator[None]:
    """Replace every floating weight and buffer by a cast copy inside, and restore the same tensors.

    An RMSNorm without an eps keeps that of ``stored_in``. `torch.func.functional_call` would leave
    copies in a part registered under two names (torch 2.13).
    """
    replaced = [
        (table, name, tensor)
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for name, tensor in table.items()
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype
    ]
    cast = {id(tensor): _cast(tensor, dtype) for _, _, tensor in replaced}
    norms = [part for part in module.modules() if isinstance(part, nn.RMSNorm) and part.eps is None]
    with undoing() as undo:
        for norm in norms:
            undo.set(norm, "eps", torch.finfo(torch.promote_types(stored_in, torch.float32)).eps)
        for table, name, tensor in replaced:
            undo.later(table.__setitem__, name, tensor)
            table[name] = cast[id(tensor)]  # pyright: ignore[reportArgumentType]
        yield


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    moved = tensor.to(dtype)
    is_weight = isinstance(tensor, nn.Parameter)
    return nn.Parameter(moved, tensor.requires_grad) if is_weight else moved
