"""Lower bounds of a Lipschitz constant: find an input and a direction that are stretched most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.attack._ascent import Found, LocalSlope, SlopeMeter, as_variables, ascend, in_ball
from wellposed.attack._inputs import Call, in_dtype, perturbation_size
from wellposed.call_checks import known_keywords
from wellposed.errors import (
    ConfigError,
    ConvergenceError,
    ShapeError,
    WellposedError,
    is_about_resources,
)
from wellposed.hooks import copied, eager_calls, same_draws
from wellposed.linalg import TokenNorm, check_token_norm
from wellposed.model_checks import require_module
from wellposed.nn import frozen
from wellposed.torch_modes import in_ordinary_modes


@dataclass(frozen=True)
class LowerBound:
    """Result of an attack: the Lipschitz constant is at least ``value``; see `found_by`."""

    value: float
    """`jacobian` if a ``dtype`` was requested, `slope` if the module ran in its own."""
    norm: TokenNorm
    input: Tensor = field(repr=False)
    """The input found, ``shape``."""
    direction: Tensor = field(repr=False)
    """The perturbation found, ``shape``, of norm 1."""
    values: Tensor = field(repr=False)
    """The best value of each restart."""
    steps: int
    found_by: Literal["jacobian", "difference"] = "jacobian"
    """``"jacobian"``: ``|J(input) direction|``, no lower bound if a backward is wrong (custom
    autograd functions, straight-through estimators). ``"difference"``: measured between two inputs.
    """
    jacobian: float = 0.0
    """Largest ``|J(x) v| / |v|`` of the ascent."""
    slope: float = 0.0
    """Largest ``|f(x) - f(y)| / |x - y|`` measured, a lower bound even if gradients are wrong: 8
    eps of ``|f(x)| + |f(y)|`` are subtracted, more than a forward pass rounds unless it cancels
    large numbers."""
    pair: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """The x and y of `slope`, in `dtype`."""
    dtype: torch.dtype = torch.float64
    """The dtype in which `slope` was measured."""

    def ratio(self, certificate: Any) -> float:
        """Return lower / upper for a `wellposed.Certificate`; if it is sound, at most 1.

        Raises:
            ConfigError: the certificate is in another norm.
        """
        if certificate.norm != self.norm:
            raise ConfigError(
                f"the attack is in norm {self.norm!r}, the certificate in norm {certificate.norm!r}"
            )
        if certificate.total > 0:
            return self.value / certificate.total
        return math.inf if self.value > 0 else 0.0


@known_keywords
@same_draws()
@in_ordinary_modes
def lipschitz_lower_bound(
    module: Callable[..., Any],
    shape: Sequence[int],
    *,
    norm: TokenNorm = "tok",
    restarts: int = 8,
    steps: int = 100,
    inner: int = 2,
    learning_rate: float = 0.05,
    scales: tuple[float, float] = (0.1, 10.0),
    radius: float | None = None,
    forward_kwargs: Mapping[str, Any] | None = None,
    start: Tensor | None = None,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> LowerBound:
    """Return a lower bound of ``sup |f(X) - f(Y)| / |X - Y|``, found by gradient ascent.

    Status: a true lower bound up to rounding if automatic differentiation is right, and no upper
    bound of anything. With custom gradients (another backward, a straight-through estimator)
    ``value`` is no bound; `LowerBound.slope`, measured without gradients, always is. The float64
    copy does not show effects of the module's own dtype (underflow, absorbed terms): ``dtype=None``
    attacks the module as it runs.
    Method: Adam climbs the norm of the Jacobian, whose worst direction is found by alternating
    between input and output (power iteration in norm 2). Source: Kim, Papamakarios, Mnih (2021),
    Appendix I, here for any module and norm.

    Args:
        module: A module or function of ``(restarts, *shape)``; the first tensor of its output
            counts. Hugging Face models are called with ``inputs_embeds``. Modules are copied, in
            eval mode.
        shape: Of one input, ``(tokens, width)``.
        norm: ``"tok"``, ``2``, ``"inf"`` or ``"sum"``. Outputs without tokens count as one token.
            The direction may be a local maximum, except in norm 2.
        restarts: Independent inputs, ascended in one batch.
        steps: Adam steps.
        inner: Alternations per step.
        learning_rate: Of Adam, relative to the input's scale.
        scales: Inputs start as normal numbers times a scale, log-spaced over the restarts.
        radius: Largest 2-norm of tokens, for certificates on a ball.
        forward_kwargs: Passed on (masks, ``is_causal``); a leading 1 is expanded to the restarts.
        start: First inputs, ``(restarts, *shape)``.
        dtype: Of the attacked copy; ``value`` is its Jacobian's, or, if torch cannot differentiate
            it twice (`ReversibleSequential`, nn.Hardsigmoid), the largest slope. None: the module's
            own dtype (else of ``start``), in which ``value`` is the largest slope. (Slopes are
            measured along ascended and random directions, between starts, and after ``steps`` of
            ascent, with ``|x - y| / |x|`` from 1 down to the cube root of the rounding unit.)
        seed: The attack is deterministic.

    Raises:
        ShapeError: ``start`` does not fit, the output has no batch dimension, or ``module`` does
            not run on inputs of this shape.
        ConfigError: unknown norm.
        ConvergenceError: every restart met NaN or infinity.

    Cost: one forward and ``2 inner + 2`` backward passes per step for all restarts, never an (N D)
    x (N D) matrix; ``dtype=None`` adds two of each per step.
    When not to use: to certify anything.

    >>> linear = torch.nn.Linear(2, 2, bias=False)
    >>> _ = linear.weight.data.copy_(torch.diag(torch.tensor([1.0, 3.0])))
    >>> round(lipschitz_lower_bound(linear, (4, 2), norm=2, steps=10).value, 4)
    3.0
    """
    check_token_norm(norm)
    if isinstance(module, nn.Module) or not callable(module):
        require_module("lipschitz_lower_bound", module)
    if start is not None and not bool(torch.isfinite(start).all()):
        raise ConfigError("attack: start holds NaN or infinity; expected finite first inputs")
    moving = dtype or torch.float64
    target: Any = module
    if isinstance(module, nn.Module):
        target = in_dtype(module, moving).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    native = dtype or _own_dtype(module, start)
    if start is None:
        start = _random_start(shape, restarts, scales, moving, generator)
    elif tuple(start.shape) != (restarts, *shape):
        raise ShapeError(
            f"attack: start must be {(restarts, *shape)}, received {tuple(start.shape)}"
        )
    weight = next(target.parameters(), None) if isinstance(target, nn.Module) else None
    begin = start.detach().to("cpu" if weight is None else weight.device, moving)
    unit, log_scale = as_variables(begin)
    kwargs = _expand(forward_kwargs, restarts)
    call = Call(target, kwargs)
    _check_runs(call, begin)
    local_slope = LocalSlope(call, norm)
    none = begin.new_full((restarts,), -math.inf)
    random = torch.randn(unit.shape, dtype=moving, generator=generator, device="cpu")
    random = random.to(begin)
    steepest = Found(begin, random, none)
    direction = random

    def score(is_last: bool) -> Tensor:
        nonlocal steepest, direction
        x = in_ball(unit * log_scale.exp(), radius)
        stretch, direction = local_slope(x, direction, 8 * inner if is_last else inner)
        reached = stretch.clamp_min(torch.finfo(moving).tiny).log()
        steepest = steepest.better(Found.detached(x, direction, stretch))
        return reached

    # Compiled code has no second derivative. Weights stay as they are, so contractive layers bound them once.
    with (
        sdpa_kernel(SDPBackend.MATH),
        torch.enable_grad(),
        eager_calls(),
        _frozen(target),
    ):
        completes = _completes(lambda: ascend([unit, log_scale], score, steps, learning_rate))
    by_jacobian = completes and dtype is not None
    attacked = target
    if dtype is None and isinstance(module, nn.Module):
        attacked = copied(module).eval().requires_grad_(False)
    meter = SlopeMeter(Call(attacked, kwargs), norm, native, radius)
    with _frozen(attacked):
        if by_jacobian:
            with sdpa_kernel(SDPBackend.MATH):
                pairs = meter.along(steepest.x, steepest.other)
        else:
            pairs = meter.ascend(meter.search(begin, random, steepest), steps, learning_rate)
    return _report(steepest, pairs, native, norm, steps, by_jacobian=by_jacobian)


def _frozen(target: Any) -> AbstractContextManager[None]:
    return frozen(target) if isinstance(target, nn.Module) else nullcontext()


def _report(
    steepest: Found,
    pairs: Found,
    dtype: torch.dtype,
    norm: TokenNorm,
    steps: int,
    *,
    by_jacobian: bool,
) -> LowerBound:
    chosen = steepest if by_jacobian else pairs
    if not bool(torch.isfinite(chosen.slopes).any()):
        what = "the Jacobian was" if by_jacobian else f"outputs in {dtype} were"
        raise ConvergenceError(
            f"attack: {what} NaN or infinite at every input; check the weights for NaN, or lower"
            " scales"
        )

    best = chosen.best
    x = pairs.x[best]
    y = pairs.other[best]
    apart = y.double() - x.double()
    size = perturbation_size(apart[None], norm).clamp_min(torch.finfo(torch.float64).tiny)
    jacobian = max(0.0, float(steepest.slopes[steepest.best]))
    slope = max(0.0, float(pairs.slopes[best]))
    return LowerBound(
        value=jacobian if by_jacobian else slope,
        norm=norm,
        input=chosen.x[best],
        direction=steepest.other[best] if by_jacobian else apart / size,
        values=chosen.slopes,
        steps=steps,
        found_by="jacobian" if by_jacobian else "difference",
        jacobian=jacobian,
        slope=slope,
        pair=(x, y),
        dtype=dtype,
    )


# torch's errors if a backward cannot be differentiated (custom functions, some activations).
_NO_SECOND_DERIVATIVE = ("once_differentiable", "is not implemented", "second derivative")


def _completes(climb: Callable[[], None]) -> bool:
    """Run an ascent; return False if torch cannot differentiate a backward again."""
    try:
        climb()
    except (ConfigError, RuntimeError) as error:
        is_expected = any(words in str(error) for words in _NO_SECOND_DERIVATIVE)
        if is_about_resources(error) or not is_expected:
            raise
        return False
    return True


def _own_dtype(module: Any, start: Tensor | None) -> torch.dtype:
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    dtypes = [parameter.dtype for parameter in parameters if parameter.is_floating_point()]
    return dtypes[0] if dtypes else torch.get_default_dtype() if start is None else start.dtype


@torch.no_grad()
def _check_runs(call: Call, begin: Tensor) -> None:
    """Run it once; on failure, report the shape of its input."""
    try:
        call(begin)
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, WellposedError) or is_about_resources(error):
            raise
        raise ShapeError(
            f"attack: {type(call.target).__name__} fails on inputs of shape {tuple(begin.shape)}"
            f" (restarts, tokens, width); give a shape (tokens, width) that it takes: {error}"
        ) from error


def _random_start(
    shape: Sequence[int],
    restarts: int,
    scales: tuple[float, float],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    if len(shape) != 2 or min(*shape, restarts) < 1:
        raise ShapeError(
            f"attack: expected (tokens, width) and restarts of at least 1, received {tuple(shape)},"
            f" {restarts}"
        )
    if not min(scales) > 0:
        raise ConfigError(f"attack: scales must be above 0, received {scales}")
    low, high = (math.log10(scale) for scale in scales)
    scale = torch.logspace(low, high, restarts, dtype=dtype, device="cpu")[:, None, None]
    drawn = torch.randn(restarts, *shape, dtype=dtype, generator=generator, device="cpu")
    return drawn * scale


def _expand(kwargs: Mapping[str, Any] | None, restarts: int) -> dict[str, Any]:
    def grow(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_inference():
            value = value.clone()  # inference tensors cannot be saved for a backward pass
        shared = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 1
        return value.expand(restarts, *value.shape[1:]) if shared else value

    return {name: grow(value) for name, value in (kwargs or {}).items()}
