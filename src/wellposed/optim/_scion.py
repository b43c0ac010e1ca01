"""Scion: steps to the farthest point of a norm ball, by role."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError
from wellposed.half_weights import lost_steps_warning
from wellposed.linalg import in_stacks
from wellposed.moves import say_moves
from wellposed.optim._assign import Assigned, assigned, check_parameter
from wellposed.optim._balls import BALLS, ball_named
from wellposed.optim._layout import WHOLE, Piece
from wellposed.options import Positive, Rate, fits

logger = logging.getLogger(__name__)

Group = dict[str, Any]
# Entries of one stacked operand, of which about ten copies live at once.
_ENTRIES = 2**24
_MOMENTUM = "momentum_buffer"


class _Matrix(NamedTuple):
    """A matrix of a group, with its momentum: views."""

    weight: Tensor
    momentum: Tensor


class Scion(Optimizer):
    """Step ``W <- (1 - lr) W - lr r Z``, ``Z`` the point of the unit ball farthest along the momentum.

    Status: the step is a convex combination, so a weight that begins in its ball of radius r stays there
    if ``0 <= lr <= 1``. That is up to rounding of the stored dtype (measured: 1e-5 in float32).
    Weights that begin outside come nearer by the factor ``1 - lr`` a step, or at once by
    `shrink_into_balls_`. That a ball helps training is empirical.
    Source: Pethick et al. 2025 (arXiv 2502.07529), the constrained algorithm. Their five Newton-Schulz
    steps end with singular values up to 1.2, outside the ball; two more steps end below 1.

    With a model, roles tell the balls:
    - matrices of attention and feed-forward networks, and other linear layers: ``"spectral"``,
      ``|W|_2 <= radius sqrt(out / in)``. Query, key and value of a fused weight are apart, and each
      expert of a stack. The step is ``U V^T``.
    - the output embedding of a language model, tied or not: ``"sign"``, ``|W_ij| <= head_radius / in``.
    - other embeddings: ``"vectors"``, root mean square of each vector at most ``embedding_radius``.
    - biases and gains: ``"rms"``, root mean square at most ``radius``.
    Else give groups, ``{"params": [...], "norm": "spectral", "radius": 50.0}``.

    Args:
        params: A module, whose trainable parameters are taken, or groups that name ``norm`` and
            ``radius``.
        lr: Part of the way to the farthest point; with a ball from 0 to 1. Paper: 2^-12, and 2^-6 to
            2^-4 for small models.
        momentum: Weight of the past; 1 minus the paper's.
        radius: Of hidden matrices and vectors. Paper: 50 for GPT-2.
        head_radius: Of the output embedding. Paper: 3000 for GPT-2.
        embedding_radius: Of other embeddings.
        ball: Hold the balls. False: ``W <- W - lr r Z``, the paper's unconstrained algorithm.
        norms: Patterns of parameter names, mapped to names of balls: before roles.
        batch: Input for `find_roles`, if the model's config does not describe it.

    Raises:
        ConfigError: a parameter without a ball (three dimensions, but no stack of experts), weights in
            shards, a group without ``norm`` or with weight decay, which the ball replaces.
        RoleNotFoundError: no attention or feed-forward weight was recognised.

    Cost: one momentum; 19 products with the smaller Gram matrix for a matrix, weights of one shape in
    one batched product. No host read inside a step.
    When not to use: to fine-tune weights that AdamW trained; for sharded weights; in bfloat16 weights,
    which lose steps (a warning says so). `torch.optim.Muon` needs no radii.

    >>> optimizer = Scion(nn.TransformerEncoderLayer(8, 2, 16), lr=0.1, radius=2.0)
    >>> [(group["norm"], len(group["params"])) for group in optimizer.param_groups]
    [('spectral', 4), ('rms', 8)]
    """

    @checked_arguments
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 2.0**-8,
        *,
        momentum: Rate = 0.9,
        radius: Positive = 50.0,
        head_radius: Positive = 3000.0,
        embedding_radius: Positive = 1.0,
        ball: bool = True,
        norms: Mapping[str, str] | None = None,
        batch: Any = None,
    ) -> None:
        self._pieces: dict[Tensor, tuple[Piece, ...]] = {}
        self._names: dict[Tensor, str] = {}
        groups: Any = params
        if isinstance(params, nn.Module):
            sizes = {"head": head_radius, "embedding": embedding_radius}
            rows = assigned(params, norms or {}, batch)
            self._pieces = {row.parameter: row.pieces for row in rows}
            self._names = {row.parameter: row.name for row in rows}
            groups = _groups_of(rows, radius, sizes)
        elif norms is not None:
            raise ConfigError("Scion: norms= belongs to a model; groups name their own norm")
        super().__init__(groups, {"lr": lr, "momentum": momentum, "ball": ball})
        self._tell()

    def _tell(self) -> None:
        """Log which weights have which ball, and warn of those that lose steps."""
        parameters = [weight for group in self.param_groups for weight in group["params"]]
        count = Counter[str]()
        for group in self.param_groups:
            count[group["norm"]] += len(group["params"])
        logger.info("Scion: %s", ", ".join(f"{norm} {number}" for norm, number in count.items()))
        warning = lost_steps_warning("Scion", parameters, "Scion")
        if warning:
            logger.warning("%s", warning)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group that names its ``norm`` and ``radius``; ``weight_decay`` must be 0."""
        if not isinstance(param_group, dict) or "norm" not in param_group:
            raise ConfigError(
                "Scion: a group of parameters names no norm; give the model, Scion(model), or groups"
                f" {{'params': [...], 'norm': ..., 'radius': ...}} with a norm of {', '.join(BALLS)}"
            )

        number = len(self.param_groups)
        ball_named(param_group["norm"])
        if not fits(param_group.get("radius"), Positive):
            raise ConfigError(
                f"Scion: group {number}: radius = {param_group.get('radius')!r}, expected a number > 0"
            )

        _check_options({**self.defaults, **param_group}, number)
        super().add_param_group(param_group)
        for index, parameter in enumerate(self.param_groups[-1]["params"]):
            label = self._names.setdefault(parameter, f"group {number}, parameter {index}")
            pieces = self._pieces.setdefault(parameter, WHOLE)
            is_stack = pieces[0].expert is not None
            check_parameter(label, parameter, param_group["norm"], is_stack=is_stack)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; ``closure`` runs once, before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            _check_options(group, number)
            stepped = [weight for weight in group["params"] if weight.grad is not None]
            if stepped:
                self._step(group, stepped)
        return loss

    def _step(self, group: Group, stepped: list[Tensor]) -> None:
        momenta = [self._momentum_of(weight) for weight in stepped]
        gradients = [weight.grad for weight in stepped if weight.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1.0 - group["momentum"])
        if group["ball"]:
            torch._foreach_mul_(stepped, 1.0 - group["lr"])

        ball = BALLS[group["norm"]]
        matrices = [
            _Matrix(piece.matrix_in(weight), piece.matrix_in(momentum))
            for weight, momentum in zip(stepped, momenta, strict=True)
            for piece in self._pieces[weight]
        ]
        for batch in in_stacks(
            matrices, _kind, lambda item: _ENTRIES // max(1, item.weight.numel())
        ):
            weights = [item.weight for item in batch]
            farthest = ball.farthest(torch.stack([_at_least_1d(item.momentum) for item in batch]))
            step = -group["lr"] * group["radius"] * ball.radius(_shape(weights[0]))
            parts = [
                part.reshape(weight.shape)
                for part, weight in zip(
                    farthest.to(weights[0].dtype).unbind(), weights, strict=True
                )
            ]
            torch._foreach_add_(weights, parts, alpha=step)

    def _momentum_of(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if _MOMENTUM not in state:
            assert weight.grad is not None
            if weight.grad.is_sparse:
                raise ConfigError(
                    f"Scion: {self._names[weight]} has a sparse gradient; use nn.Embedding(sparse=False)"
                )
            state[_MOMENTUM] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state[_MOMENTUM]

    def sizes(self) -> dict[str, float]:
        """Return the norm of every matrix in units of its radius, by name: at most 1 inside the ball.

        Status: of spectral norms a certified upper bound. Cost: an eigensolver for each matrix, and a
        read: for the end of a run, not for every step.
        """
        return {name: size for name, _, size in self._measured()}

    @torch.no_grad()
    def shrink_into_balls_(self) -> dict[str, float]:
        """Divide matrices outside their ball by their size; return how far each moved, as a fraction.

        The moves are logged, as the model then computes something else.
        """
        moved: dict[str, float] = {}
        for name, matrix, size in self._measured():
            moved[name] = 1.0 - 1.0 / size if size > 1.0 else 0.0
            if size > 1.0:
                matrix.div_(size)
        say_moves(logger, "Scion: weights outside their ball were divided by their size", moved)
        return moved

    @torch.no_grad()
    def _measured(self) -> Iterator[tuple[str, Tensor, float]]:
        for group in self.param_groups:
            ball = BALLS[group["norm"]]
            for weight in group["params"]:
                for piece in self._pieces[weight]:
                    matrix = piece.matrix_in(weight)
                    radius = group["radius"] * ball.radius(_shape(matrix))
                    size = ball.size(_at_least_1d(matrix)) / radius
                    yield f"{self._names[weight]}{piece.label}", matrix, size

    def __getstate__(self) -> dict[str, Any]:
        """Give a copy the places of its matrices as well."""
        return {**super().__getstate__(), "_pieces": self._pieces, "_names": self._names}


def _groups_of(rows: Iterable[Assigned], radius: float, sizes: Mapping[str, float]) -> list[Group]:
    groups: dict[tuple[str, str], Group] = {}
    for row in rows:
        size = sizes.get(row.kind, radius)
        key = row.norm, row.kind
        group = groups.setdefault(key, {"params": [], "norm": row.norm, "radius": size})
        group["params"].append(row.parameter)
    return [*groups.values()]


def _check_options(group: Group, number: int) -> None:
    """Raise for a rate, momentum or decay that the step does not take."""
    rate = group["lr"]
    most = 1.0 if group["ball"] else float("inf")
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0.0 <= rate <= most:
        raise ConfigError(
            f"Scion: group {number}: lr = {rate!r}, expected a number from 0 to 1, as the step goes that"
            " part of the way; with ball=False any number >= 0"
        )
    if not fits(group["momentum"], Rate):
        raise ConfigError(
            f"Scion: group {number}: momentum = {group['momentum']!r}, expected a number >= 0 and < 1"
        )
    if group.get("weight_decay"):
        raise ConfigError(
            f"Scion: group {number}: weight_decay = {group['weight_decay']!r}, but the ball is the decay;"
            " set it to 0"
        )


def _kind(matrix: _Matrix) -> object:
    weight = matrix.weight
    return weight.shape, weight.dtype, weight.device


def _at_least_1d(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape) or (1,)
