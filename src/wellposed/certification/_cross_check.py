"""A certificate tries itself out: a few forward passes in the module's own dtype, along random and
ascended directions.

That proves nothing. It finds a rule that does not describe the class it is registered for, and a
forward pass whose rounding has nothing to do with the real map any more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.attack import Call, perturbation_size, steepest_direction
from wellposed.errors import NotContractiveError, NotLipschitzError, UnsoundBoundError
from wellposed.linalg import TokenNorm, full_precision
from wellposed.nn import frozen
from wellposed.watch import quiet_run

# Sizes of the inputs, as shares of the ball; each is one example of the batch.
_SCALES = (1.0, 0.1)
TRIED_TOKENS = 4
# Allowance for the rounding of a forward pass, in units of the last place of what goes in and what
# comes out.
_ULPS = 64
# Where no part says how wide its input is, any width will do.
_ANY_WIDTH = 8

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Claim:
    """What is tried out: bounds of a module and of its parts in one norm, for tokens of 2-norm at
    most ``radius``."""

    module: nn.Module
    total: float
    parts: Sequence[tuple[str, nn.Module, float]]
    norm: TokenNorm
    radius: float | None
    tokens: int
    """How many tokens to try it out with."""
    is_causal: bool
    dtype: torch.dtype
    layers: Mapping[int, Any]
    """What contractive layers divide by, by their ids."""


@dataclass(frozen=True)
class _Pair:
    """Two inputs of a module, and its two outputs."""

    x: Tensor
    aside: Tensor
    y: Tensor
    other: Tensor


def try_out(claim: Claim) -> str:
    """Try a certificate out, and say in one line what came of it.

    Raises:
        UnsoundBoundError: a slope above the bound; the innermost module with one is named.
        NotLipschitzError: the forward pass refuses to run, or gives NaN or infinity.
    """
    reason = ""
    width = _width(claim.module)
    # The inputs of TransJect are twice as wide as its table, whose rows stand beside positions.
    for candidate in (_ANY_WIDTH,) if width is None else (width, 2 * width):
        try:
            by_part = _run(claim, candidate)
        except (NotLipschitzError, NotContractiveError) as error:
            raise NotLipschitzError(
                f"certify: bounded by {claim.total:.4g}, but it does not run: {error}"
            ) from error
        # Whatever a module of somebody else's raises at an input it is not made for.
        except Exception as error:
            reason = f"{type(error).__name__} at an input (batch, tokens, {candidate})"
            continue
        return _judge(claim, by_part)
    return f"not run: {reason}"


def _run(claim: Claim, width: int) -> dict[int, list[_Pair]]:
    """Return the pairs that each part saw, by its id; those of the module itself are found without
    any hook on it."""
    device = next((weight.device for weight in claim.module.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    shape = (3, len(_SCALES), claim.tokens, width)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
    x = _placed(noise[0], claim)
    inputs = [x, x + _placed(noise[1], claim)]
    call = _as_function(claim, device)
    # A contractive layer has computed its bound already.
    made = frozen(claim.module, claim.layers) if claim.layers else nullcontext()
    with _without_gradients(claim.module), made:
        ascended = _ascended(call, x, noise[2], claim.norm)
        if ascended is not None:
            inputs.append(x + _placed(ascended, claim))
        first, *others = _outputs(call, inputs, claim.module)
        seen = _seen_by_parts(claim, call, [x, inputs[-1]])
    pairs = zip(inputs[1:], others, strict=True)
    seen[id(claim.module)] = [_Pair(x, aside, first, other) for aside, other in pairs]
    return seen


def _placed(direction: Tensor, claim: Claim) -> Tensor:
    """Scale each example to a fraction of half the radius, so that the sum of two stays in the ball."""
    radius = min(direction.shape[-1] ** 0.5, math.inf if claim.radius is None else claim.radius)
    reach = (0.5 - 1e-3) * radius * direction.new_tensor(_SCALES)
    longest = perturbation_size(direction, "tok")
    scale = torch.where(longest > 0, reach / longest, 0.0)
    return (direction * scale[:, None, None]).to(claim.dtype)


def _ascended(call: Map, x: Tensor, cotangent: Tensor, norm: TokenNorm) -> Tensor | None:
    """The direction that moves a random functional of the output most; None where the output does
    not depend on x."""
    start = x.detach().requires_grad_()
    with torch.enable_grad():
        y = call(start)
    if not y.requires_grad:
        return None
    enough = y.numel() <= cotangent.numel()
    noise = cotangent.flatten()[: y.numel()] if enough else y.detach().double().flatten()
    (pulled,) = torch.autograd.grad(y, start, noise.view_as(y).to(y.dtype), allow_unused=True)
    if pulled is None or not bool(pulled.isfinite().all()):
        return None
    return steepest_direction(pulled.double(), norm)


def _outputs(call: Map, inputs: Sequence[Tensor], module: nn.Module) -> Sequence[Tensor]:
    """One pass for all inputs; one for each where random numbers are drawn, which would differ
    within a batch."""
    if any(part.training for part in module.modules()):
        return [call(x) for x in inputs]
    return call(torch.cat(list(inputs))).chunk(len(inputs))


def _seen_by_parts(claim: Claim, call: Map, inputs: Sequence[Tensor]) -> dict[int, list[_Pair]]:
    """Run both inputs again with every part watched."""
    watched = {id(part): part for _, part, _ in claim.parts if part is not claim.module}
    calls: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def note(part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        vectors = [x for x in args if isinstance(x, Tensor)]
        if vectors and isinstance(output, Tensor):
            # Several vectors of an example move together: they are its tokens.
            several = len(vectors) == len(args) > 1 and all(x.ndim == 2 for x in vectors)
            x = torch.stack(vectors, dim=1) if several else vectors[0].clone()
            calls.setdefault(id(part), []).append((x.detach(), output.detach().clone()))

    with ExitStack() as stack:
        for part in watched.values():
            stack.callback(part.register_forward_hook(note).remove)
        if watched:
            _outputs(call, inputs, claim.module)
    return {key: _paired(noted, len(inputs[0])) for key, noted in calls.items()}


def _paired(noted: list[tuple[Tensor, Tensor]], batch: int) -> list[_Pair]:
    """Pair a part's inputs and outputs under the first input with those under the second, which came
    in one batch or in two calls."""
    half = len(noted) // 2
    if all(len(x) == len(y) == 2 * batch for x, y in noted):
        pairs = [_Pair(*x.chunk(2), *y.chunk(2)) for x, y in noted]
    elif len(noted) % 2 or any(len(x) != batch or len(y) != batch for x, y in noted):
        return []  # a part that is called once for several examples, or with something else
    else:
        both = zip(noted[:half], noted[half:], strict=True)
        pairs = [_Pair(x, aside, y, other) for (x, y), (aside, other) in both]
    return [pair for pair in pairs if pair.x.ndim > 1 and pair.y.ndim > 1]


def _judge(claim: Claim, by_part: dict[int, list[_Pair]]) -> str:
    bounds: dict[int, tuple[str, nn.Module, float]] = {}
    for path, part, bound in claim.parts:
        if bound >= bounds.get(id(part), ("", part, 0.0))[2]:
            bounds[id(part)] = (path, part, bound)
    bounds[id(claim.module)] = ("", claim.module, claim.total)
    shares = [
        _share(pair, bound, f"{path or 'the module'} ({type(part).__name__})", claim)
        for path, part, bound in bounds.values()
        for pair in by_part.get(id(part), ())
    ]
    return (
        f"{len(shares)} pairs through {len(by_part)} modules, largest slope / bound"
        f" {max(shares):.3f}"
    )


def _share(pair: _Pair, bound: float, name: str, claim: Claim) -> float:
    """Return slope / bound, both of the slope's parts evaluated in float64."""
    moved = _size(pair.aside.double() - pair.x.double(), claim.norm)
    change = _size(pair.other.double() - pair.y.double(), claim.norm)
    slope = torch.where(moved > 0, change / moved, 0.0)
    if not bool(slope.isfinite().all()):
        size = float(pair.x.norm(dim=-1).max())
        raise NotLipschitzError(
            f"certify: {name} gives NaN or infinity in {claim.dtype} at tokens of norm {size:.3g},"
            " so a bound for exact arithmetic says nothing of it; scale the weights down or use a"
            " wider dtype"
        )
    # What rounding may add to the slope of a map with this bound.
    inputs, outputs = (
        sum(_size(value, claim.norm) for value in values)
        for values in ((pair.x, pair.aside), (pair.y, pair.other))
    )
    noise = _ULPS * torch.finfo(claim.dtype).eps * (outputs + bound * inputs)
    excess = slope - bound * (1 + 1e-6)
    allowed = torch.where(moved > 0, noise / moved, 0.0).clamp_min(0)
    if bool((excess > allowed).any()):
        raise UnsoundBoundError(
            f"certify: {name} has a slope of {float(slope.max()):.6g} in norm {claim.norm}, above"
            f" its bound {bound:.6g}: its rule is wrong for this module. If the rule is yours"
            " (register_rule), correct it; if it is ours, please report it with the module's"
            " options"
        )
    return float(slope.max()) / bound if bound > 0 else 0.0


def _as_function(claim: Claim, device: torch.device) -> Map:
    """The module with the same random numbers at each call, since a bound is of one fixed map."""
    module = claim.module
    causal = claim.is_causal and "is_causal" in inspect.signature(module.forward).parameters
    call = Call(module, {"is_causal": True} if causal else {})
    if not any(part.training for part in module.modules()):
        return call

    def run(x: Tensor) -> Tensor:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            return call(x)

    return run


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Record no graph of the weights."""
    learnt = [weight for weight in module.parameters() if weight.requires_grad]
    try:
        for weight in learnt:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in learnt:
            weight.requires_grad_(True)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Leave the module as it was, and run it in the mode it is in and in its own dtype.

    Autocast, float32 products in less than float32, and inference mode belong to the caller, not to
    the module.
    """
    devices = (weight.device.type for weight in module.parameters() if not weight.is_meta)
    device = next(devices, "cpu")
    with quiet_run(module, evaluate=False), full_precision(device):
        yield


def _width(module: nn.Module) -> int | None:
    """How wide the tokens are that a module reads, where it or its first part with a width says
    so."""
    if hasattr(module, "get_input_embeddings"):
        return module.get_input_embeddings().weight.shape[-1]  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    shape = getattr(module, "normalized_shape", (None,))
    own = (getattr(module, "in_features", None), getattr(module, "embed_dim", None), shape[-1])
    widths = [*own, *(_width(child) for child in module._modules.values() if child is not None)]
    return next((width for width in widths if isinstance(width, int)), None)


def _size(x: Tensor, norm: TokenNorm) -> Tensor:
    x = x.double()
    return perturbation_size(x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2), norm)
