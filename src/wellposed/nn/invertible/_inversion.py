"""The fixed point `x = y - f(x)`, and how far what was found is from it, rounding included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from wellposed.errors import ConvergenceError
from wellposed.linalg import Norm

# Measured: residuals stop shrinking at 0.3 units of rounding for attention of width 16 to 512, at
# 0.3 sqrt(width) for the hardest linear maps. One unit is enough; below the second limit a stalled
# residual is at its floor.
_UNITS_ENOUGH = 1.0
_UNITS_STALLED = (2.0, 0.5)
_WINDOW = 6
_PRODUCTS = {"cuda tf32": torch.float16, "cpu bf16": torch.bfloat16}
"""By device and precision of float32 products, the dtype of as many digits."""


@dataclass(frozen=True)
class Inversion:
    """How well `x + f(x) = y` was solved: `|x - x*| <= error_bound` in `norm`, for every sample of
    the batch.

    x* is the inverse in exact arithmetic, with these weights, of y as given. The bound is
    a-posteriori: the residual `y - f(x) - x` of the x that is returned is evaluated in float64,
    where it holds all that the working dtype rounded away, and divided by `1 - c`; the rounding of
    that evaluation is added, and that of logits, which are quadratic in the tokens.
    `with_error_bound` derives it and says what f may be. For a stack, errors of later blocks are
    carried through the earlier ones. If y itself is a computed `x_0 + f(x_0)`, its rounding, divided
    by the product of `1 - c`, is a further distance to x_0.
    """

    iterations: int
    """Evaluations of f, in a stack of all blocks together, the one for the error bound left out."""
    residual: float
    """Norm of `y - f(x) - x` at the x that is returned; in a stack the largest."""
    error_bound: float
    """Infinite where no bound is known: blocks of different norms, or of somebody else; in a backward pass,
    which asks none."""
    contraction: float
    """The c < 1 that was used; in a stack the largest."""
    norm: Norm
    converged: bool = True
    blocks: tuple[Inversion, ...] = ()
    """Of a stack: one for each block, in the order of the blocks."""
    measured_in: torch.dtype | None = None
    """In which f was evaluated for the error bound: float64 wherever f runs in it. Of a stack: see
    its blocks."""
    reason: str = ""
    """In words, why `error_bound` is infinite, where that was found out: logits that rounding
    leaves undetermined."""


def sample_norms(tokens: Tensor, norm: Norm) -> Tensor:
    """Norm of each sample, (batch,): tok = largest 2-norm of a token, inf = largest entry, 2 =
    Frobenius.

    >>> sample_norms(torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]), "tok")
    tensor([5.])
    """
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
    """Solve `x + f(x) = y`, see `InvertibleResidual.inverse`; return x and a report without error
    bound."""
    where, c = "InvertibleResidual.inverse", contraction
    bad = ~y.isfinite()
    if bool(bad.any()):
        raise ConvergenceError(
            f"{where}: y holds {int(bad.sum())} values that are NaN or infinite (of"
            f" {y.numel()}); expected finite numbers, of which each has exactly one inverse"
        )
    # Relative to y and x: a residual that is enough, and one that is once it no longer halves.
    if tol is not None:
        enough = stalled = tol * (1 - c)
    else:
        unit, width = torch.finfo(computed_in(y)).eps, y.shape[-1] if y.dim() else 1
        first, slope = _UNITS_STALLED
        # Fewer digits of products are a floor; f may have no product.
        fine = unit if torch.is_autocast_enabled(y.device.type) else torch.finfo(y.dtype).eps
        enough, stalled = _UNITS_ENOUGH * fine, (first + slope * math.sqrt(width)) * unit
    mixer = _Anderson(y, c)
    x, scale, residual = y, sample_norms(y, norm), math.inf
    best = torch.full_like(scale, math.inf)
    for iteration in range(1, max_iter + 1):
        image = y - f(x)
        difference = image - x
        sizes = sample_norms(difference, norm)
        # x may be larger than y, up to 1 / (1 - c) times; its rounding is what limits the
        # residual.
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
        f" {stalled / (1 - c):.3g} times the size of y; allow more iterations, or a"
        f" larger tol: rounding in {str(y.dtype).removeprefix('torch.')} sets a floor"
    )


def computed_in(y: Tensor) -> torch.dtype:
    """Return the coarsest of the dtypes of y, of autocast and of float32 products, in which f is
    computed."""
    device = y.device.type
    if y.dtype is not torch.float32:
        return y.dtype
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    return _PRODUCTS.get(f"{device} {backend.matmul.fp32_precision}", y.dtype)


class _Anderson:
    """Type-II Anderson mixing of each sample by itself (Walker and Ni, 2011, eq. 2.2), with Picard
    as safeguard.

    A mixed iterate whose residual is not below c times the one before is worse than what Picard's
    step guarantees; then the next step is Picard's, from the better of the two. So two evaluations
    always gain the factor c.
    """

    def __init__(self, y: Tensor, contraction: float) -> None:
        self.contraction = contraction
        self.batch = y.shape[0] if y.dim() > 1 else 1
        shape = (self.batch, _WINDOW, y.numel() // max(self.batch, 1))
        self.differences, self.images = y.new_zeros(shape), y.new_zeros(shape)
        self.count = 0
        self.last: tuple[Tensor, Tensor, Tensor] | None = None

    def next(self, image: Tensor, difference: Tensor, sizes: Tensor) -> Tensor:
        """Return the next iterate from `image = y - f(x)`, `difference = image - x` and its
        norms."""
        flat_image, flat = image.reshape(self.batch, -1), difference.reshape(self.batch, -1)
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
        """Least-squares weights of the stored differences, (batch, window); unused slots are
        zero."""
        stored = self.differences
        lengths = torch.linalg.vector_norm(stored, dim=-1, keepdim=True)
        lengths = lengths.clamp_min(torch.finfo(stored.dtype).tiny)
        unit = stored / lengths
        gram = (unit @ unit.mT).double()
        right = (unit @ difference.unsqueeze(-1)).double()
        # The floor keeps nearly parallel differences, whose Gram matrix is all rounding, from large
        # weights.
        gram.diagonal(dim1=-2, dim2=-1).add_(4 * torch.finfo(stored.dtype).eps)
        weights = torch.linalg.solve(gram, right).to(stored.dtype)
        return (weights / lengths).squeeze(-1)


# Logits that rounding may move by more than this leave the weights of a softmax undetermined: no
# first order holds.
_MOVED_AT_MOST = 1 / 8
# Beyond this a key's entry marks padding (`l2_attention`), and is no part of a logit.
_MARK = 1e29
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
# These hold a softmax that a function mode cannot look into.
_CLOSED = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)


class LogitRounding(TorchFunctionMode):
    r"""Watches the softmaxes of what runs inside; `amplification` times `c |x - mean x|` is what
    their rounding costs.

    A logit `l_ij = s q_i . k_j` of d terms is computed to `g s sum_c |q_ic| |k_jc|`,
    `g = (sqrt(d) + 8) eps / 2` (Higham 2002, sec. 3.1, sqrt(d) in place of d as in
    `with_error_bound`). Errors `e_ij` of the logits move row i of `P v` by
    `sum_j P_ij e_ij (v_j - m_i)`, m_i its mean, plus `O(e^2)`; so by Cauchy, Schwarz and Minkowski
    by at most

        g s (sum_c |q_ic| sqrt(sum_j P_ij k_jc^2)) sd_i(v),   sd_i(v)^2 = sum_j P_ij |v_j - m_i|^2 .

    The means under P are attentions with the squares as values, so nothing of N x N is made. For L2
    attention, q and k here are the augmented vectors, moved near the origin, whose last product is
    `|k_j|^2 / 2`: that is where one far token enters every logit quadratically. What comes after P
    v, and makes v of x, belongs to the Lipschitz bound c of
    the map, a product of norms of its parts: `|rest| max_j |v_j - mean v| <= c |x - mean x|`. Hence
    the cost is `c |x - mean x|` times the largest of `g s (..) sd_i(v) / max_j |v_j - mean v|` over
    the rows, the ratio taken coordinate by coordinate; in the Frobenius norm the rows add up in
    squares. Softmaxes one after another add.

    Two steps are not proved but measured, with a margin of 1,000 where logits are large: that a
    bound c which is given is such a product (one that counts on `rest` and value map to cancel is
    not), and the ratio by coordinates, which may fall short of that of lengths by a factor sqrt(d).

    The weights P are the computed ones, which is right to a factor exp(2 e). Where e may pass 1/8,
    `refusal` says so.
    """

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm: Norm = norm
        self.amplification = 0.0
        self.refusal = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; note what it does to logits."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._note_attention(result, *args, **kwargs)
        elif func in _SOFTMAX:
            self._note_softmax((*args, *kwargs.values())[0], result)
        elif func in _CLOSED:
            self.refusal = (
                f"{func.__name__} forms its logits out of sight, so their rounding is not known"
            )
        return result

    def _note_attention(
        self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *flags: Any, **rest: Any
    ) -> None:
        if not out.numel():
            return
        eps = torch.finfo(out.dtype).eps

        def mean(values: Tensor) -> Tensor:
            """`sum_j P_ij values_j`; a kernel may want the width of the keys."""
            wide = F.pad(values, (0, max(key.shape[-1] - values.shape[-1], 0)))
            means = F.scaled_dot_product_attention(query, key, wide, *flags, **rest)
            return means[..., : values.shape[-1]]

        scale = abs(rest.get("scale") or 1 / math.sqrt(query.shape[-1]))
        keys = key.masked_fill(key.abs() >= _MARK, 0.0)
        logits = scale * (query.abs() * mean(keys.square()).clamp_min(0).sqrt()).sum(-1)
        seconds = mean(value.square())
        # The difference of two squares is not known better than this.
        variance = (seconds - out.square()).clamp_min(0)
        deviation = variance.add(16 * eps * seconds.clamp_min(0)).sqrt()
        reach = (value - value.mean(-2, keepdim=True)).abs().amax(-2, keepdim=True)
        if reach.shape[-3:-2] != deviation.shape[-3:-2]:  # grouped heads
            reach = reach.repeat_interleave(deviation.shape[-3] // reach.shape[-3], -3)
        share = torch.where(deviation > 0, deviation / reach, 0.0).nan_to_num(1.0).amax(-1)
        self._add((math.sqrt(query.shape[-1]) + 8) * eps / 2 * logits, share.clamp_max(1.0))

    def _note_softmax(self, logits: Tensor, weights: Tensor) -> None:
        """Logits that came ready made are known to their own rounding, if nothing cancelled in
        them."""
        if weights.numel():
            seen = torch.where(weights > 0, logits.to(weights.dtype).abs(), 0.0).amax(-1)
            self._add(4 * torch.finfo(weights.dtype).eps * seen, weights.new_ones(()))

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
    r"""Return the report with `|x - x*| <= error_bound`, where `x* + f(x*) = y` in exact
    arithmetic.

    With the residual `r = y - f(x) - x` of the x that is returned, `x* - x = r + f(x) - f(x*)`, so
    `|x - x*| <= |r| / (1 - c)`. Here x is what was stored, so r holds all that was lost on the way:
    the rounding of `y - f(x)`, of f and of the result in the working dtype. What remains is how
    exactly r is known. It is evaluated in float64 (x, y and the weights fit exactly) as
    `(y - x) - f(x)`, which rounds by at most `eps (|y - x| + |r|)`; and f itself is allowed an
    error of `(sqrt(D) + 8) eps (c |x| + |f(x)|)` there, D the width. Every map of this library
    loses less than a tenth of that (measured up to D = 512), so long as it does not cancel numbers
    far larger than `c |x|` and `|f(x)|`; the worst case of Higham (2002, sec. 3.5), D in place of
    sqrt D for each product, is not met.
    Logits are larger than that, being quadratic in the tokens: a times `c |x - mean x|` is added
    for what their rounding does to softmaxes, with the a that `LogitRounding` derives and measures
    while f is evaluated. Last, c is often computed from weights in the working dtype, of unit
    `eps_w`, and is taken to be `c' = c (1 + 2 eps_w)`. Together
    `error_bound = (|r| + eps (|y - x| + |r|) + (sqrt(D) + 8) eps (c |x| + |f(x)|) + a c |x - mean
    x|) / (1 - c')`. It is infinite, and `reason` says why, where rounding leaves the weights of a
    softmax undetermined.

    Where f does not run in float64 (it holds tensors that are neither parameters nor buffers; the
    device has none) it is evaluated as it stands, and eps in the allowance for f is that of its
    dtype. The divisor of a contractive layer is that of its forward pass, computed in the weights'
    own dtype: as in `certify`, it is part of the map. Not
    covered: an f that cancels as above (or in logits that it forms by hand), or that rounds to a
    coarser dtype inside.

    Args:
        report: of the solver. f, options: the branch, and what it is called with besides x.
        x: what the solver returned, shape of y. y: what was inverted.

    Cost: one evaluation of f in float64, with three attentions in place of each.
    """
    image, measured_in, logits = evaluated(f, x, options, report.norm)
    wide = _widest(x)
    held, image = x.to(wide), image.to(wide)
    gap = y.to(wide) - held
    # Of a sample without a dimension of tokens, all there is to x is its mean.
    spread = held - held.mean(-2, keepdim=True) if x.dim() > 2 else held
    size, moved, branch, residual, apart = (
        sample_norms(part, report.norm) for part in (held, gap, image, gap - image, spread)
    )
    width = x.shape[-1] if x.dim() else 1
    c, allowed = report.contraction, (math.sqrt(width) + 8) * torch.finfo(measured_in).eps
    rounding = torch.finfo(wide).eps * (moved + residual) + logits.amplification * c * apart
    rounding = rounding + allowed * (c * size + branch)
    # The norms are rounded as well, by far less than this.
    error = math.inf if logits.refusal else (1 + 1e-9) * _largest(residual + rounding)
    bound, reason = error_in_x(error, c, f, y), logits.refusal
    if bound == math.inf and error < math.inf:
        reason = f"the slope {c} is 1 to rounding"
    worst = _largest(residual)
    return replace(
        report, residual=worst, error_bound=bound, measured_in=measured_in, reason=reason
    )


def error_in_x(error: float, contraction: float, block: nn.Module, y: Tensor) -> float:
    """Bound the error of x that an error of y, or a residual of the equation, causes: `error / (1 - c')`,
    c' the contraction constant rounded up; see `with_error_bound`."""
    dtypes = {part.dtype for part in (y, *block.parameters()) if part.is_floating_point()}
    slope = contraction * (1 + 2 * max(torch.finfo(dtype).eps for dtype in dtypes))
    if slope >= 1:
        return math.inf if error else 0.0
    return error / (1 - slope)


def _largest(sizes: Tensor) -> float:
    largest = float(sizes.max()) if sizes.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def _widest(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def evaluated(
    f: nn.Module, x: Tensor, options: dict[str, Any], norm: Norm
) -> tuple[Tensor, torch.dtype, LogitRounding]:
    """Return f(x) in the widest dtype in which f runs, that dtype, and what was seen of the
    logits."""
    wide = _widest(x)

    def widened(value: Any) -> Any:
        return value.to(wide) if isinstance(value, Tensor) and value.is_floating_point() else value

    try:
        with (
            _weights_in(wide, f, x.dtype),
            torch.autocast(x.device.type, enabled=False),
            LogitRounding(norm) as seen,
        ):
            image = f(widened(x), **pytree.tree_map(widened, options))
        return image, image.dtype, seen
    except (RuntimeError, TypeError):
        # Dtypes that do not meet, or a kernel that float64 lacks. f ran in its own dtype a moment
        # ago.
        with LogitRounding(norm) as seen:
            image = f(x, **options)
        return image, computed_in(image), seen


@contextmanager
def _weights_in(dtype: torch.dtype, module: nn.Module, held_in: torch.dtype) -> Iterator[None]:
    """Exchange every floating weight and buffer for a cast copy inside, and put the very tensors
    back.

    An RMSNorm without an eps takes that of the dtype it runs in: it keeps the one of ``held_in``.
    `torch.func.functional_call` would leave the copies in a part that is registered under two names
    (torch 2.13).
    """
    held = [
        (table, name, tensor)
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for name, tensor in table.items()
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype
    ]
    cast = {id(tensor): _cast(tensor, dtype) for _, _, tensor in held}
    norms = [part for part in module.modules() if isinstance(part, nn.RMSNorm) and part.eps is None]
    try:
        for norm in norms:
            norm.eps = torch.finfo(torch.promote_types(held_in, torch.float32)).eps
        for table, name, tensor in held:
            table[name] = cast[id(tensor)]  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for norm in norms:
            norm.eps = None
        for table, name, tensor in held:
            table[name] = tensor  # pyright: ignore[reportArgumentType]


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    moved = tensor.to(dtype)
    is_weight = isinstance(tensor, nn.Parameter)
    return nn.Parameter(moved, tensor.requires_grad) if is_weight else moved
