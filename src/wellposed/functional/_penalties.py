"""How far weights are from orthogonal, as numbers that carry gradient.

Shapes: W is (m, n) = (out_features, in_features); a stack shares n, and m counts its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import (
    compute_dtype,
    cut_of,
    gathered,
    in_stacks,
    is_sharded,
    mean_over_ranks,
    mesh_of,
)
from wellposed.second_derivatives import with_graph
from wellposed.torch_modes import is_transformed

Side = Literal["columns", "rows"]
# Most entries of weights and Gram matrices in one batch; on a CPU, as many as fit its caches.
_ENTRIES = 1 << 24
_ENTRIES_CPU = 1 << 20


def gram_penalty(
    weight: Tensor | Sequence[Tensor],
    *,
    squared: bool = True,
    side: Side = "columns",
    gram_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``|W^T W - I|_F^2`` (``side="columns"``) or ``|W W^T - I|_F^2`` (``"rows"``), a
    scalar.

    Status: a penalty, exact to rounding; zero if and only if the columns (rows) are orthonormal. A
    wide (tall) weight cannot reach that: its minimum is the difference of the two sizes.
    Source: squared columns Zhang et al. (2021, sec. 2.1); unsquared rows McGrath (2024, eq. 2).

    Args:
        weight: shape (m, n), floating point; or several of equal n, read as one stack along outputs
            (zhang2021's P) without a copy. The result is at least float32.
        squared: False: the norm itself, with gradient zero at an orthogonal weight.
        side: Gram matrix that is compared with the identity.
        gram_dtype: dtype of the matrix products; default the weight's, at least float32. In
            bfloat16 the gradient is wrong by 0.5 % far from, and 8 % near, an orthogonal weight.
            For bfloat16 weights on a GPU it is bfloat16, with Gram matrices in float32: the error of
            the gradient is that of its own rounding.

    Raises:
        ShapeError: not a matrix, or weights of different widths or devices.
        ConfigError: integer (quantised) weights, or float16 on a CPU.

    Cost: 4 m n min(m, n) FLOPs with its gradient, on the smaller Gram matrix; memory min(m, n)^2.
    On shards (DTensor) the ranks share the FLOPs, with one all-reduce, and an exchange first if
    rows of a wide or columns of a tall weight are sharded. A slice of a fused weight across shards
    is gathered. As in FSDP2, the gradient is that of the mean loss of all ranks. When not to use:
    for exact orthogonality use `wellposed.constrain_`.

    >>> gram_penalty(2 * torch.eye(3)).item()  # three times (4 - 1)^2
    27.0
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    check_weights(weights)
    if side not in ("columns", "rows"):
        raise ConfigError(f"gram_penalty: side = {side!r}, expected 'columns' or 'rows'")
    ((_, values),) = gram_penalties([weights], squared=squared, side=side, gram_dtype=gram_dtype)
    return mean_over_ranks(values.squeeze(0), mesh_of(weights))


def gram_penalties(
    stacks: Sequence[Sequence[Tensor]], *, squared: bool, side: Side, gram_dtype: torch.dtype | None
) -> list[tuple[list[int], Tensor]]:
    """Return `gram_penalty` of checked stacks: per kind of stack, their indices and a tensor of
    values.

    A kind has one shape, dtype, device and sharding. The gradient on shards is that of this rank's
    loss: see `wellposed.linalg.mean_over_ranks`.

    Cost: as many launches a kind as for one stack. A batch is one stack, or at most 2^24 entries
    (2^20 on one CPU) of weights, or a rank's shards of them, and Gram matrices. On shards one
    all-reduce a batch, and two exchanges if they must be cut the other way.

    >>> stacks = [[torch.eye(3)], [torch.eye(2)], [2 * torch.eye(3)]]
    >>> pairs = gram_penalties(stacks, squared=True, side="columns", gram_dtype=None)
    >>> [(places, values.tolist()) for places, values in pairs]
    [([0, 2], [0.0, 27.0]), ([1], [0.0])]
    """
    results = []
    for places, plan, weights in _batches(stacks, gram_dtype):
        values = squared_distances(plan, weights)
        values = values + plan.missing * ((side == "columns") - plan.by_columns)
        results.append((places, values if squared else root(values)))
    return results


def qr_penalty(
    weight: Tensor, method: Literal["householder", "gram_schmidt"] = "householder"
) -> Tensor:
    """Return ``|Q - W|_F`` for ``W = Q R``, Q with orthonormal columns, R upper triangular.

    Status: a penalty, exact to rounding; differentiated through the factors (of W^T for a wide W).
    Source: McGrath (2024, eq. 1). ``householder`` is LAPACK's: the diagonal of R may be negative,
    so Q may be far from W. ``gram_schmidt`` is the Q of Gram-Schmidt, with a positive diagonal.

    Args:
        weight: shape (m, n), floating point, of full rank; the result is at least float32.
        method: how Q is computed; the two differ by the signs of columns.

    Raises:
        ShapeError: not a matrix. ConfigError: quantised weight, float16 on a CPU, unknown method.
        ConvergenceError: the weight is rank deficient, so Q is not defined.

    Cost: about 4 m n^2 FLOPs. When not to use: McGrath reports that both forms halve accuracy;
    `gram_penalty` is cheaper and trains.

    >>> round(qr_penalty(torch.diag(torch.tensor([1.0, 3.0])), "gram_schmidt").item(), 4)  # Q = I
    2.0
    """
    if method not in ("householder", "gram_schmidt"):
        raise ConfigError(
            f"qr_penalty: method = {method!r}, expected 'householder' or 'gram_schmidt'"
        )

    check_weights([weight])
    original = weight
    weight = gathered(weight)
    matrix = weight if weight.shape[0] >= weight.shape[1] else weight.t()
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    with torch.autocast(matrix.device.type, enabled=False):
        q, r = torch.linalg.qr(matrix)
        if method == "gram_schmidt":
            q = q * r.detach().diagonal().sign()
        diagonal = r.detach().diagonal().abs()
        if not bool(diagonal.min() > torch.finfo(r.dtype).eps * diagonal.max()):
            raise ConvergenceError(
                f"qr_penalty: a weight of shape {tuple(weight.shape)} is rank deficient, so its"
                " factor Q is not defined; use form='gram_squared', or initialise the weight"
            )
        return mean_over_ranks(root((q - matrix).square().sum()), mesh_of([original]))


def check_weights(weights: Sequence[Tensor]) -> None:
    """Raise an error if no orthogonality penalty can be computed on the weights."""
    if not weights:
        raise ShapeError("a penalty needs at least one weight, received none")
    for weight in weights:
        if weight.ndim != 2:
            raise ShapeError(
                "orthogonality is a property of matrices; received a tensor of shape"
                f" {tuple(weight.shape)}"
            )
        if not weight.is_floating_point():
            raise ConfigError(
                f"a {weight.dtype} weight of shape {tuple(weight.shape)} is quantised: it has no"
                " gradient to penalise; penalise the model before it is quantised"
            )
        if weight.dtype == torch.float16 and weight.device.type == "cpu":
            raise ConfigError(
                f"a float16 weight of shape {tuple(weight.shape)} on a CPU: Gram matrices overflow"
                " at 65504 there; use bfloat16 or float32"
            )
    if len({(weight.shape[1], weight.device) for weight in weights}) > 1:
        shapes = ", ".join(f"{tuple(weight.shape)} on {weight.device}" for weight in weights)
        raise ShapeError(
            f"weights to be stacked along outputs need one width and one device; received {shapes}"
        )


def gram_product_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of products that form a weight's Gram matrix, unless another is asked for."""
    is_low_on_gpu = weight.dtype == torch.bfloat16 and weight.is_cuda
    return weight.dtype if is_low_on_gpu else compute_dtype(weight)


def check_gram_dtype(dtype: torch.dtype) -> None:
    """Raise a `ConfigError` if a Gram matrix cannot be formed in a dtype."""
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"gram_dtype = {dtype}, which has no products with a gradient; expected"
            " torch.bfloat16, float16, float32 or float64"
        )


class GramPlan(Protocol):
    """How the Gram matrices of some tensors, and the gradients of their distances, are computed."""

    @property
    def groups(self) -> tuple[Any, ...]:
        """Process groups that sum the Gram matrices of shards."""
        ...

    def grams(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the Gram matrices minus identity, (matrices, k, k), in float32 at least."""
        ...

    def slopes(self, tensors: Sequence[Tensor], scaled: Tensor) -> Iterable[Tensor]:
        """Return ``W G`` or ``G W`` of each tensor, for Gram matrices times a number each."""
        ...

    def widened(self) -> GramPlan:
        """Return the plan with products in float32 at least."""
        ...


@dataclass(frozen=True)
class _Plan:
    """How stacks of one shape are computed in one batch."""

    count: int
    missing: int  # columns - rows of a stack
    by_columns: bool  # W^T W, not W W^T
    transposed: bool  # weights are stored as W^T
    dtype: torch.dtype  # of the products
    groups: tuple[Any, ...]  # process groups that sum the Gram matrices of shards

    @classmethod
    def for_stacks(
        cls, count: int, weights: Sequence[Tensor], dtype: torch.dtype | None
    ) -> tuple[_Plan, Sequence[Tensor]]:
        """Return the plan of ``count`` stacks and their weights, or the local blocks of shards."""
        first = weights[0]
        dtype = dtype or gram_product_dtype(first)
        check_gram_dtype(dtype)
        missing = first.shape[1] - sum(map(len, weights)) // count
        groups = ()
        by_columns = missing <= 0
        if any(is_sharded(weight) for weight in weights):
            weights, groups, by_columns = _local_blocks(count, weights, by_columns, not missing)
        transposed = all(weight.stride(0) == 1 < weight.stride(1) for weight in weights)
        return cls(count, missing, by_columns, transposed, dtype, groups), weights

    def stacked(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the stacks as stored, (count, m, n) or (count, n, m); a view if possible."""
        stored = [weight.mT for weight in weights] if self.transposed else weights
        axis = int(self.transposed)
        joined = stored[0] if len(stored) == 1 else torch.cat(list(stored), axis)
        shape = (self.count, joined.shape[axis] // self.count)
        return joined.to(self.dtype).unflatten(axis, shape).movedim(axis, 0)

    def grams(self, tensors: Sequence[Tensor]) -> Tensor:
        with torch.autocast(tensors[0].device.type, enabled=False):
            stack = self.stacked(tensors)
            pair = (stack.mT, stack) if self.by_columns != self.transposed else (stack, stack.mT)
            return gram_minus_identity([pair], compute_dtype(tensors[0]), self.groups)

    def slopes(self, tensors: Sequence[Tensor], scaled: Tensor) -> Iterable[Tensor]:
        stack = self.stacked(tensors)
        scaled = scaled.to(self.dtype)
        is_left = self.by_columns == self.transposed
        return self.split(scaled @ stack if is_left else stack @ scaled, tensors)

    def widened(self) -> _Plan:
        return replace(self, dtype=torch.promote_types(self.dtype, torch.float32))

    def split(self, stacks: Tensor, weights: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the parts of what `stacked` joined, in the shapes and dtypes of the weights."""
        dtypes = {weight.dtype for weight in weights}
        stacks = stacks.to(dtypes.pop()) if len(dtypes) == 1 else stacks
        rows = [len(weight) for weight in weights[: len(weights) // self.count]]
        parts = (p for one in stacks.unbind() for p in one.split(rows, int(self.transposed)))
        for part, weight in zip(parts, weights, strict=True):
            yield (part.mT if self.transposed else part).to(weight.dtype)


def _batches(
    stacks: Sequence[Sequence[Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[list[int], _Plan, Sequence[Tensor]]]:
    """Yield the indices of stacks that are computed together, their plan, and their weights."""

    def kind(index: int) -> tuple[Any, ...]:
        stack = stacks[index]
        shards = [(getattr(w, "device_mesh", None), getattr(w, "placements", None)) for w in stack]
        shapes = [(weight.shape, weight.dtype, weight.device) for weight in stack]
        return any(weight.requires_grad for weight in stack), *shapes, *shards

    def size(index: int) -> int:
        first = stacks[index]
        rows = sum(map(len, first))
        columns = first[0].shape[1]
        cut = cut_of(first[0], once=False)
        most = _ENTRIES_CPU if cut is None and first[0].device.type == "cpu" else _ENTRIES
        ranks = 1 if cut is None else cut.ranks
        return most // (rows * columns // ranks + min(rows, columns) ** 2)

    for some in in_stacks(range(len(stacks)), kind, size):
        weights = [weight for index in some for weight in stacks[index]]
        yield some, *_Plan.for_stacks(len(some), weights, dtype)


def _local_blocks(
    count: int, weights: Sequence[Tensor], by_columns: bool, is_square: bool
) -> tuple[Sequence[Tensor], tuple[Any, ...], bool]:
    """Return local blocks, the groups over which to sum their Gram matrices, and if it is W^T W."""
    # W^T W sums over blocks of rows, W W^T over columns. Other cuts are exchanged, or gathered.
    members = len(weights) // count
    cuts = [cut_of(weight, once=False) for weight in weights[:members]]
    first = cuts[0]
    if is_square and first is not None and len(set(cuts)) == 1:
        by_columns = first.dim == 0

    wanted = int(not by_columns)
    turned = [cut is not None and cut.dim != wanted for cut in cuts]
    is_alike = {cut and cut.groups for cut in cuts} == {first and first.groups}
    if first is None or not is_alike or (any(turned) and len(first.groups) > 1):
        # Autograd turns the gather into a scatter of the gradient.
        return [gathered(weight) for weight in weights], (), by_columns

    alike = [weights[index::members] for index in range(members)]
    blocks = [
        _cut_the_other_way(some) if is_turned else [weight.to_local() for weight in some]  # type: ignore[attr-defined]
        for some, is_turned in zip(alike, turned, strict=True)
    ]
    return (
        [block for stack in zip(*blocks, strict=True) for block in stack],
        first.groups,
        by_columns,
    )


def _cut_the_other_way(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return blocks of columns of weights sharded by rows, or the reverse, by one exchange."""
    from torch.distributed.tensor import Shard

    stack: Any = torch.stack(list(weights))
    now = stack.placements
    ways = [Shard(3 - way.dim) if way.is_shard() else way for way in now]  # 1 <-> 2
    return stack.redistribute(placements=ways).to_local().unbind()


def gram_minus_identity(
    factors: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, groups: Sequence[Any] = ()
) -> Tensor:
    """Return the products of batches of factors, summed over process groups, minus identity."""
    sums_wide = factors[0][0].is_cuda and factors[0][0].dtype == torch.bfloat16
    as_wide: dict[str, Any] = {"out_dtype": torch.float32} if sums_wide else {}
    products = [torch.bmm(left, right, **as_wide).to(dtype) for left, right in factors]
    gram = products[0] if len(products) == 1 else torch.cat(products)
    for group in groups:
        torch.distributed.all_reduce(gram, group=group)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram


def squared_distances(plan: GramPlan, tensors: Sequence[Tensor]) -> Tensor:
    """Return |G|_F^2 of all Gram matrices minus identity, with the gradient in closed form."""
    if is_transformed():
        return _plain(plan, *tensors)
    values: Any = _Gram.apply(plan, *tensors)
    return values


class _Gram(torch.autograd.Function):
    """|G|_F^2 of each matrix, G a Gram matrix minus identity; gradient ``4 W G`` or ``4 G W``."""

    @staticmethod
    def forward(ctx: Any, plan: GramPlan, *weights: Tensor) -> Tensor:
        ctx.plan = plan
        gram = plan.grams(weights)
        ctx.save_for_backward(gram, *weights)
        return sums_of_squares(gram)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gram, *weights = ctx.saved_tensors
        plan: GramPlan = ctx.plan
        if torch.is_grad_enabled():
            if plan.groups:
                raise ConfigError(
                    "gram_penalty: no second derivative of weights in shards; gather them"
                )
            return None, *with_graph(partial(_plain, plan), weights, grad)
        with torch.autocast(gram.device.type, enabled=False):
            return None, *plan.slopes(weights, gram * (4 * grad)[:, None, None])


def _plain(plan: GramPlan, *weights: Tensor) -> Tensor:
    """Return the values of `_Gram`, in operations that autograd supports."""
    return sums_of_squares(plan.widened().grams(weights))


def sums_of_squares(gram: Tensor) -> Tensor:
    """Return the squared Frobenius norm of each matrix."""
    return gram.flatten(1).square().sum(1)


def root(value: Tensor) -> Tensor:
    """Return sqrt with gradient 0 at 0: the norm's shortest subgradient."""
    # Written so that NaN stays NaN.
    safe = torch.where(value <= 0, 1.0, value)
    return torch.where(value <= 0, 0.0, safe.sqrt())
