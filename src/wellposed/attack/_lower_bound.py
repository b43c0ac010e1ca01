"""Lower bounds of a Lipschitz constant by attack: find an input and a direction that stretch the
most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.attack._ascent import Found, LocalSlope, SlopeMeter, as_variables, ascend, in_ball
from wellposed.attack._inputs import Call, in_dtype, perturbation_size
from wellposed.call_checks import known_keywords, require_module
from wellposed.errors import ConfigError, ConvergenceError, ShapeError, WellposedError
from wellposed.linalg import TokenNorm, check_token_norm
from wellposed.tensor_calls import in_ordinary_modes
from wellposed.watch import copied, same_draws


@dataclass(frozen=True)
class LowerBound:
    """``value``: the Lipschitz constant is at least this. `found_by` says how far that can be
    trusted."""

    value: float
    """`jacobian` where a ``dtype`` was asked for, `slope` where the module was attacked in its
    own."""
    norm: TokenNorm
    input: Tensor = field(repr=False)
    """The input found, ``shape``."""
    direction: Tensor = field(repr=False)
    """The perturbation found, ``shape``, of norm 1."""
    values: Tensor = field(repr=False)
    """The best value of each restart."""
    steps: int
    found_by: Literal["jacobian", "difference"] = "jacobian"
    """``"jacobian"``: ``|J(input) direction|`` by automatic differentiation, no lower bound where a
    backward is wrong (custom autograd functions, straight-through estimators); ``"difference"``:
    measured between two inputs."""
    jacobian: float = 0.0
    """Largest ``|J(x) v| / |v|`` of the ascent."""
    slope: float = 0.0
    """Largest ``|f(x) - f(y)| / |x - y|`` measured, a lower bound whatever the gradients say: 8 eps
    of ``|f(x)| + |f(y)|`` are taken off, more than a forward pass rounds unless it cancels large
    numbers."""
    pair: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """The x and y of `slope`, in `dtype`."""
    dtype: torch.dtype = torch.float64
    """In which `slope` was measured."""

    def ratio(self, certificate: Any) -> float:
        """Return lower / upper, the total of a `wellposed.Certificate`: no sound one of the same norm
        lets it exceed 1.

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
    """Return a lower bound of ``sup |f(X) - f(Y)| / |X - Y|``: the Jacobian norm at the worst input
    an ascent finds.

    Status: a true lower bound up to rounding, whatever the ascent does, where automatic
    differentiation gives the true derivative; no upper bound of anything. Under custom gradients
    (an autograd function with another backward, a straight-through estimator) ``value`` is no
    bound; `LowerBound.slope`, measured at ``x`` and ``x + t v`` without any gradient, is one
    always. The copy in float64 does not see what the module's own dtype does to it (underflow,
    absorbed terms): ``dtype=None`` attacks the module as it runs. In each step the worst direction
    is found by alternating between input and output (power iteration in norm 2, sign and row
    updates in "inf", per-token normalisation in "tok") from vector-Jacobian products alone, and the
    input climbs the gradient of that norm by Adam; the idea of Kim, Papamakarios, Mnih (2021),
    Appendix I, for any module and norm.

    Args:
        module: a module or function of ``(restarts, *shape)``; the first tensor of its output
            counts. A Hugging Face model is called with ``inputs_embeds``. Modules are copied, cast
            to ``dtype`` and put in eval mode.
        shape: of one input, ``(tokens, width)``.
        norm: ``"tok"``, ``2``, ``"inf"`` or ``"sum"``. In "tok" and "sum" the last dimension is the
            token; outputs without a token dimension count as one token. In "tok", "sum" and "inf"
            the direction found may be a local maximum.
        restarts: independent inputs, ascended in one batch.
        steps: Adam steps.
        inner: alternations per step (the direction is kept from step to step).
        learning_rate: of Adam, relative to the input's scale.
        scales: inputs start from normal numbers times a scale, log-spaced over the restarts.
        radius: tokens are kept within this 2-norm, where the certificate holds on a ball.
        forward_kwargs: passed on (masks, ``is_causal``); tensors with a leading 1 are expanded to
            the restarts.
        start: ``(restarts, *shape)`` first inputs.
        dtype: of the attacked copy; ``value`` is then its Jacobian's, or, where torch cannot
            differentiate a backward again (`ReversibleSequential`, nn.Hardsigmoid), the largest
            slope measured between two inputs. None: the module's own (of its first parameter; else
            of ``start``). Gradients in low precision may be useless, so ``value`` is then the
            largest slope measured in that dtype: along the directions an ascent in float64 finds,
            along random ones, from start to start, and after ``steps`` of ascent of both inputs.
            Steps are large: ``|x - y| / |x|`` from 1 down to the cube root of the rounding unit.
        seed: the attack is deterministic.

    Raises:
        ShapeError: ``start`` does not fit, the output has no batch dimension, or ``module`` does
            not run on inputs of this shape.
        ConfigError: unknown norm.
        ConvergenceError: every restart met NaN or infinity.

    Cost: per step one forward, ``2 inner + 2`` backward passes for all restarts; never an (N D) x
    (N D) matrix; ``dtype=None`` adds two forward and backward passes per step.
    When not to use: to certify anything.

    >>> linear = torch.nn.Linear(2, 2, bias=False)
    >>> _ = linear.weight.data.copy_(torch.diag(torch.tensor([1.0, 3.0])))
    >>> round(lipschitz_lower_bound(linear, (4, 2), norm=2, steps=10).value, 4)
    3.0
    """
    check_token_norm(norm)
    if not callable(module):
        require_module("lipschitz_lower_bound", module)
    if start is not None and not bool(torch.isfinite(start).all()):
        raise ConfigError("attack: start holds NaN or infinity; expected finite first inputs")
    moving = dtype or torch.float64
    target: Any = module
    if isinstance(module, nn.Module):
        target = in_dtype(module, moving).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    own = dtype or _own_dtype(module, start)
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
    found, direction = Found(begin, random, none), random

    def score(is_last: bool) -> Tensor:
        nonlocal found, direction
        x = in_ball(unit * log_scale.exp(), radius)
        stretch, direction = local_slope(x, direction, 8 * inner if is_last else inner)
        reached = stretch.clamp_min(torch.finfo(moving).tiny).log()
        found = found.better(Found.of(x, direction, stretch))
        return reached

    # compiled code has no second derivative
    with (
        sdpa_kernel(SDPBackend.MATH),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        completes = _completes(lambda: ascend([unit, log_scale], score, steps, learning_rate))
    by_jacobian = completes and dtype is not None
    attacked = target
    if dtype is None and isinstance(module, nn.Module):
        attacked = copied(module).eval().requires_grad_(False)
    meter = SlopeMeter(Call(attacked, kwargs), norm, own, radius)
    if by_jacobian:
        with sdpa_kernel(SDPBackend.MATH):
            pairs = meter.along(found.x, found.other)
    else:
        pairs = meter.ascend(meter.search(begin, random, found), steps, learning_rate)
    return _report(found, pairs, own, norm, steps, by_jacobian=by_jacobian)


def _report(
    found: Found,
    pairs: Found,
    dtype: torch.dtype,
    norm: TokenNorm,
    steps: int,
    *,
    by_jacobian: bool,
) -> LowerBound:
    chosen = found if by_jacobian else pairs
    if not bool(torch.isfinite(chosen.slopes).any()):
        what = "the Jacobian was" if by_jacobian else f"outputs in {dtype} were"
        raise ConvergenceError(
            f"attack: {what} NaN or infinite at every input; check the weights for NaN, or lower"
            " scales"
        )
    best = chosen.best
    x, y = pairs.x[best], pairs.other[best]
    apart = y.double() - x.double()
    size = perturbation_size(apart[None], norm).clamp_min(torch.finfo(torch.float64).tiny)
    jacobian = max(0.0, float(found.slopes[found.best]))
    slope = max(0.0, float(pairs.slopes[best]))
    return LowerBound(
        value=jacobian if by_jacobian else slope,
        norm=norm,
        input=chosen.x[best],
        direction=found.other[best] if by_jacobian else apart / size,
        values=chosen.slopes,
        steps=steps,
        found_by="jacobian" if by_jacobian else "difference",
        jacobian=jacobian,
        slope=slope,
        pair=(x, y),
        dtype=dtype,
    )


# What torch says where a backward has no derivative of its own: a function with a custom backward,
# some activations.
_NO_SECOND_DERIVATIVE = ("once_differentiable", "is not implemented", "second derivative")


def _completes(climb: Callable[[], None]) -> bool:
    """Run an ascent; False where torch cannot differentiate a backward again."""
    try:
        climb()
    except (ConfigError, RuntimeError) as error:
        if not any(words in str(error) for words in _NO_SECOND_DERIVATIVE):
            raise
        return False
    return True


def _own_dtype(module: Any, start: Tensor | None) -> torch.dtype:
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    dtypes = [parameter.dtype for parameter in parameters if parameter.is_floating_point()]
    return dtypes[0] if dtypes else torch.get_default_dtype() if start is None else start.dtype


@torch.no_grad()
def _check_runs(call: Call, begin: Tensor) -> None:
    """Run it once, and say what it was given where it fails."""
    try:
        call(begin)
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        if isinstance(error, (WellposedError, torch.OutOfMemoryError)):
            raise
        raise ShapeError(
            f"attack: {type(call.target).__name__} fails on inputs of shape {tuple(begin.shape)}"
            f" (restarts, tokens, width); give the (tokens, width) that it takes: {error}"
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
            value = value.clone()  # which may be saved for a backward pass
        shared = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == 1
        return value.expand(restarts, *value.shape[1:]) if shared else value

    return {name: grow(value) for name, value in (kwargs or {}).items()}
