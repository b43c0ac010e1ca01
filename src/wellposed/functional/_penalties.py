"""How far weights are from orthogonal, as numbers that carry gradient.

Shape legend: W is (m, n) = (out_features, in_features); a stack of weights shares n and adds up to
m rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import compute_dtype, cut_of, gathered, in_stacks, is_sharded, mean_over_ranks
from wellposed.tensor_calls import is_transformed, with_graph

Side = Literal["columns", "rows"]
# Entries of weights and Gram matrices that one batch holds; on a CPU what its caches hold.
_ENTRIES, _ENTRIES_CPU = 1 << 24, 1 << 18


def gram_penalty(
    weight: Tensor | Sequence[Tensor],
    *,
    squared: bool = True,
    side: Side = "columns",
    gram_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``|W^T W - I|_F^2`` (``side="columns"``) or ``|W W^T - I|_F^2`` (``"rows"``);
    unsquared on request.

    Status: a penalty, exact to rounding; zero if and only if the columns (rows) are orthonormal,
    which a wide (tall) weight cannot reach: its least value is the difference of the two sizes.

    Method: the smaller Gram matrix only, by ``|W^T W - I|_F^2 = |W W^T - I|_F^2 + n - m`` for W of
    shape (m, n); value and gradient ``4 W (W^T W - I)`` are one fused autograd function, two matrix
    products in all.
    Squared columns: Zhang et al. (2021, sec. 2.1); unsquared rows: McGrath (2024, eq. 2).

    Args:
        weight: shape (m, n), floating point; or several of equal n, which stand for their stack
            along outputs (zhang2021's P) without being copied together.
        squared: False gives the norm itself, with gradient zero at an orthogonal weight.
        side: which of the two Gram matrices is compared with the identity.
        gram_dtype: dtype of the two matrix products, for example ``torch.bfloat16``; the default is
            the weight's, at least float32. bf16 makes the gradient wrong by 0.5 % far from, and 8 %
            near, an orthogonal weight. Of bfloat16 weights on a GPU the default is bfloat16, with
            Gram matrices summed and kept in float32: the gradient is as near as its own rounding.

    Returns:
        a scalar, at least float32.

    Raises:
        ShapeError: not a matrix, or weights of different widths or devices.
        ConfigError: integer (quantised) weights, or float16 on a CPU.

    Cost: 4 m n min(m, n) FLOPs for value and gradient; memory min(m, n)^2. On shards (DTensor) the
    ranks share the FLOPs, and one all-reduce sums the Gram matrices of their parts. If rows of a
    wide or columns of a tall weight are sharded, an exchange cuts it the other way first. A slice
    of a fused weight across shards is gathered. As FSDP2 does, the gradient is that of the mean of
    the losses of all ranks.

    When not to use: for exact orthogonality use `wellposed.constrain_`.

    >>> gram_penalty(2 * torch.eye(3)).item()  # three times (4 - 1)^2
    27.0
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    check_weights(weights)
    if side not in ("columns", "rows"):
        raise ConfigError(f"gram_penalty: side = {side!r}, expected 'columns' or 'rows'")
    ((_, values),) = gram_penalties([weights], squared=squared, side=side, gram_dtype=gram_dtype)
    return mean_over_ranks(values.squeeze(0), weights)


def gram_penalties(
    stacks: Sequence[Sequence[Tensor]], *, squared: bool, side: Side, gram_dtype: torch.dtype | None
) -> list[tuple[list[int], Tensor]]:
    """Return places in ``stacks``, and the values of `gram_penalty` there as one tensor that carries
    gradient, for all stacks that are alike in shapes, dtypes, devices and shards.

    Status and method: as `gram_penalty`, in one batched product for the values and one for the
    gradients. Arguments as there, of each stack checked by `check_weights`.

    Cost: as many launches as for one stack. A batch holds at most 2^24 entries (2^18 on one CPU) of
    weights, or of one rank's shards of them, and Gram matrices, or one stack: 64 MiB in float32 for
    a copy of the weights, and as much for their gradients. Gram matrices stay until the backward
    pass. On shards one all-reduce for each batch, and two exchanges if they must be cut the other
    way. The gradient on shards is that of this rank's loss: see `wellposed.linalg.mean_over_ranks`.

    >>> stacks = [[torch.eye(3)], [torch.eye(2)], [2 * torch.eye(3)]]
    >>> how = {"squared": True, "side": "columns", "gram_dtype": None}
    >>> [(places, values.tolist()) for places, values in gram_penalties(stacks, **how)]
    [([0, 2], [0.0, 27.0]), ([1], [0.0])]
    """
    found = []
    for places, plan, weights in _batches(stacks, gram_dtype):
        values: Tensor = (_plain if is_transformed() else _Gram.apply)(plan, *weights)  # type: ignore[assignment]
        values = values + plan.missing * ((side == "columns") - plan.by_columns)
        found.append((places, values if squared else _root(values)))
    return found


def qr_penalty(
    weight: Tensor, method: Literal["householder", "gram_schmidt"] = "householder"
) -> Tensor:
    """Return ``|Q - W|_F`` where ``W = Q R``, Q with orthonormal columns and R upper triangular.

    Status: a penalty, exact to rounding. Its gradient goes through the factorisation. For a wide W
    the factors are those of W^T.

    Method: McGrath (2024, eq. 1). ``householder`` is LAPACK's, whose R may have a negative
    diagonal, so the target Q may be far from W; ``gram_schmidt`` is the Q that Gram-Schmidt gives,
    of the R with a positive diagonal.

    Args:
        weight: shape (m, n), floating point, of full rank.
        method: how Q is computed; the two differ by the signs of columns.

    Returns:
        a scalar, at least float32.

    Raises:
        ShapeError: not a matrix. ConfigError: quantised weight, float16 on a CPU, unknown method.
        ConvergenceError: the weight is rank deficient, so Q is not defined.

    Cost: about 4 m n^2 FLOPs.

    When not to use: McGrath reports that both forms halve accuracy; `gram_penalty` is cheaper and
    trains.

    >>> round(qr_penalty(torch.diag(torch.tensor([1.0, 3.0])), "gram_schmidt").item(), 4)  # Q = I
    2.0
    """
    if method not in ("householder", "gram_schmidt"):
        raise ConfigError(
            f"qr_penalty: method = {method!r}, expected 'householder' or 'gram_schmidt'"
        )
    check_weights([weight])
    given, weight = weight, gathered(weight)
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
        return mean_over_ranks(_root((q - matrix).square().sum()), [given])


def check_weights(weights: Sequence[Tensor]) -> None:
    """Raise for what no orthogonality penalty can be computed on; all offenders in one message."""
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


@dataclass(frozen=True)
class _Plan:
    """How stacks of one shape are worked on in one batch: which Gram matrices are formed (W^T W or
    W W^T), from products in which dtype, and over which process groups those of local blocks are
    summed; whether weights are stored as W^T."""

    count: int
    missing: int  # columns - rows of a stack
    by_columns: bool
    transposed: bool
    dtype: torch.dtype
    groups: tuple[Any, ...]

    @classmethod
    def of(
        cls, count: int, weights: Sequence[Tensor], dtype: torch.dtype | None
    ) -> tuple[_Plan, Sequence[Tensor]]:
        """Choose the plan of ``count`` stacks; return it with their weights, or local blocks of
        sharded ones."""
        first = weights[0]
        is_low_on_gpu = first.dtype == torch.bfloat16 and first.is_cuda
        dtype = dtype or (first.dtype if is_low_on_gpu else compute_dtype(first))
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"gram_dtype = {dtype}, which has no products with a gradient; expected"
                " torch.bfloat16, float16, float32 or float64"
            )
        missing, groups = first.shape[1] - sum(map(len, weights)) // count, ()
        by_columns = missing <= 0
        if any(is_sharded(weight) for weight in weights):
            weights, groups, by_columns = _local_blocks(count, weights, by_columns, not missing)
        transposed = all(weight.stride(0) == 1 < weight.stride(1) for weight in weights)
        return cls(count, missing, by_columns, transposed, dtype, groups), weights

    def stacked(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the stacks as they are stored, (count, m, n) or (count, n, m); of one weight
        without a copy."""
        stored = [weight.mT for weight in weights] if self.transposed else weights
        axis = int(self.transposed)
        whole = stored[0] if len(stored) == 1 else torch.cat(list(stored), axis)
        shape = (self.count, whole.shape[axis] // self.count)
        return whole.to(self.dtype).unflatten(axis, shape).movedim(axis, 0)

    def split(self, stacks: Tensor, weights: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield what `stacked` joined, in the shapes and dtypes of the weights."""
        dtypes = {weight.dtype for weight in weights}
        stacks = stacks.to(dtypes.pop()) if len(dtypes) == 1 else stacks
        rows = [len(weight) for weight in weights[: len(weights) // self.count]]
        parts = (p for one in stacks.unbind() for p in one.split(rows, int(self.transposed)))
        for part, weight in zip(parts, weights, strict=True):
            yield (part.mT if self.transposed else part).to(weight.dtype)


def _batches(
    stacks: Sequence[Sequence[Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[list[int], _Plan, Sequence[Tensor]]]:
    """Yield the places of stacks that are worked on together, how, and all their weights."""

    def kind(place: int) -> tuple[Any, ...]:
        stack = stacks[place]
        shards = [(getattr(w, "device_mesh", None), getattr(w, "placements", None)) for w in stack]
        shapes = [(weight.shape, weight.dtype, weight.device) for weight in stack]
        return any(weight.requires_grad for weight in stack), *shapes, *shards

    def size(place: int) -> int:
        first = stacks[place]
        rows, columns = sum(map(len, first)), first[0].shape[1]
        cut = cut_of(first[0], once=False)
        most = _ENTRIES_CPU if cut is None and first[0].device.type == "cpu" else _ENTRIES
        ranks = 1 if cut is None else cut.ranks
        return most // (rows * columns // ranks + min(rows, columns) ** 2)

    for some in in_stacks(range(len(stacks)), kind, size):
        weights = [weight for place in some for weight in stacks[place]]
        yield some, *_Plan.of(len(some), weights, dtype)


def _local_blocks(
    count: int, weights: Sequence[Tensor], by_columns: bool, is_square: bool
) -> tuple[Sequence[Tensor], tuple[Any, ...], bool]:
    """Return blocks of ``count`` stacks of sharded weights whose Gram matrices add up to the smaller
    one, over which process groups, and whether that is W^T W (of a square stack, either).

    W^T W is the sum of those of blocks of rows, W W^T of columns. What is cut the other way is
    exchanged between ranks, all stacks at once; what cannot be, is gathered.
    """
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
    alike = [weights[place::members] for place in range(members)]
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
    ways = [Shard(3 - each.dim) if each.is_shard() else each for each in now]  # 1 <-> 2
    return stack.redistribute(placements=ways).to_local().unbind()


def _gram_minus_identity(plan: _Plan, weights: Sequence[Tensor]) -> Tensor:
    with torch.autocast(weights[0].device.type, enabled=False):
        stack = plan.stacked(weights)
        left, right = (stack.mT, stack) if plan.by_columns != plan.transposed else (stack, stack.mT)
        sums_wide = stack.is_cuda and stack.dtype == torch.bfloat16
        as_wide: dict[str, Any] = {"out_dtype": torch.float32} if sums_wide else {}
        gram = torch.bmm(left, right, **as_wide).to(compute_dtype(weights[0]))
        for group in plan.groups:
            torch.distributed.all_reduce(gram, group=group)
        gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram


def _slopes(plan: _Plan, weights: Sequence[Tensor], gram: Tensor, by: Tensor) -> list[Tensor]:
    """Return the gradients ``W G`` or ``G W`` of all weights, each Gram matrix times a number."""
    with torch.autocast(gram.device.type, enabled=False):
        stack, scaled = plan.stacked(weights), (gram * by[:, None, None]).to(plan.dtype)
        is_left = plan.by_columns == plan.transposed
        return list(plan.split(scaled @ stack if is_left else stack @ scaled, weights))


class _Gram(torch.autograd.Function):
    """|G|_F^2 of each stack for a Gram matrix minus identity, with gradient ``4 W G`` or ``4 G W``."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *weights: Tensor) -> Tensor:
        ctx.plan = plan
        gram = _gram_minus_identity(plan, weights)
        ctx.save_for_backward(gram, *weights)
        return _squares(gram)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gram, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            if ctx.plan.groups:
                raise ConfigError(
                    "gram_penalty: no second derivative of weights in shards; gather them"
                )
            return None, *with_graph(partial(_plain, ctx.plan), weights, grad)
        return None, *_slopes(ctx.plan, weights, gram, 4 * grad)


def _plain(plan: _Plan, *weights: Tensor) -> Tensor:
    """The values of `_Gram`, by operations that autograd knows."""
    dtype = torch.promote_types(plan.dtype, torch.float32)
    return _squares(_gram_minus_identity(replace(plan, dtype=dtype), weights))


def _squares(gram: Tensor) -> Tensor:
    return gram.flatten(1).square().sum(1)


def _root(value: Tensor) -> Tensor:
    """Return sqrt with gradient 0 at 0: the norm's subgradient of least length."""
    # Written so that what is no number stays none.
    safe = torch.where(value <= 0, 1.0, value)
    return torch.where(value <= 0, 0.0, safe.sqrt())
