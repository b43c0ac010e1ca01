"""A certificate tries itself out: a few forward passes in the module's own dtype, along random and
ascended directions.

That proves nothing. It finds a rule that does not describe the class it is registered for, and a
forward pass whose rounding has nothing to do with the real map any more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.attack import Call, patch_grid, perturbation_size, steepest_direction
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


Sizes = tuple[list[list[float]], list[list[float]]]
Seen = dict[int, list[tuple[Tensor, Tensor]]]
"""What a module read and what it gave at each call, (inputs, examples, ...), by its id."""


def try_out(claim: Claim) -> str:
    """Try a certificate out, and say in one line what came of it.

    Raises:
        UnsoundBoundError: a slope above the bound; the innermost module with one is named.
        NotLipschitzError: the forward pass refuses to run, or gives NaN or infinity.
    """
    reason = ""
    width = _width(claim.module)
    # An additive coupling is twice as wide as its parts.
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


def _run(claim: Claim, width: int) -> Seen:
    """Return what the module and each of its parts made of an input, of one aside of it, and of one
    along the direction that moves the output most."""
    device = next((weight.device for weight in claim.module.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    shape = (3, len(_SCALES), claim.tokens, width)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
    x = _placed(noise[0], claim)
    inputs = [x, x + _placed(noise[1], claim)]
    call = _as_function(claim, device)
    # A contractive layer has computed its bound already.
    with _without_gradients(claim.module), frozen(claim.module, claim.layers):
        ascended = _ascended(call, x, noise[2], claim.norm)
        if ascended is not None:
            inputs.append(x + _placed(ascended, claim))
        return _watched(claim, call, inputs)


def _placed(direction: Tensor, claim: Claim) -> Tensor:
    """Scale each example to its share of half of the ball: the other half is for what is added to
    it."""
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


def _watched(claim: Claim, call: Map, inputs: list[Tensor]) -> Seen:
    """Run all inputs with every part watched, the module itself without a hook: in one pass, or in
    one for each where random numbers are drawn, which would differ within a batch."""
    watched = {id(part): part for _, part, _ in claim.parts if part is not claim.module}
    calls: Seen = {}
    count = len(inputs)

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
        apart = any(part.training for part in claim.module.modules())
        outputs = [call(x) for x in inputs] if apart else [*call(torch.cat(inputs)).chunk(count)]
    seen = {key: _by_input(noted, count, len(inputs[0])) for key, noted in calls.items()}
    return {**seen, id(claim.module): [(torch.stack(inputs), torch.stack(outputs))]}


def _by_input(
    noted: list[tuple[Tensor, Tensor]], count: int, batch: int
) -> list[tuple[Tensor, Tensor]]:
    """Tell apart what a part saw of each input: in one batch, or in a call for each."""
    if not all(len(x) == len(y) == count * batch for x, y in noted):
        if len(noted) % count or any(len(x) != batch or len(y) != batch for x, y in noted):
            return []  # a part that is called once for several examples, or with something else
        each = len(noted) // count
        calls = [noted[call::each] for call in range(each)]
        noted = [(torch.cat([x for x, _ in one]), torch.cat([y for _, y in one])) for one in calls]
    return [
        (x.unflatten(0, (count, batch)), y.unflatten(0, (count, batch)))
        for x, y in noted
        if x.ndim > 1 and y.ndim > 1
    ]


def _judge(claim: Claim, by_part: Seen) -> str:
    """Hold slope / bound, from the first input of each call to each other, against 1."""
    bounds: dict[int, tuple[str, nn.Module, float]] = {}
    for path, part, bound in claim.parts:
        if bound >= bounds.get(id(part), ("", part, 0.0))[2]:
            bounds[id(part)] = (path, part, bound)
    bounds[id(claim.module)] = ("", claim.module, claim.total)
    calls = [(*of, x, y) for of in bounds.values() for x, y in by_part.get(id(of[1]), ())]
    read = _sizes([x for *_, x, _ in calls], claim.norm)
    gave = _sizes([y for *_, y in calls], claim.norm)
    pairs = [
        (call, *pair)
        for call, before, after in zip(calls, read, gave, strict=True)
        for pair in zip(*before, *after, strict=True)
    ]
    shares: list[float] = []
    for (path, part, bound, x, _), moved, inputs, change, outputs in pairs:
        name = f"{path or 'the module'} ({type(part).__name__})"
        slopes = [c / m if m > 0 else 0.0 for c, m in zip(change, moved, strict=True)]
        if not all(map(math.isfinite, slopes)):
            size = float(x[0].norm(dim=-1).max())
            raise NotLipschitzError(
                f"certify: {name} gives NaN or infinity in {claim.dtype} at tokens of norm"
                f" {size:.3g}, so a bound for exact arithmetic says nothing of it; scale the weights"
                " down or use a wider dtype"
            )
        # What rounding may add to the slope of a map with this bound.
        unit = _ULPS * torch.finfo(claim.dtype).eps
        if any(
            slope - bound * (1 + 1e-6) > unit * (given + bound * taken) / move
            for slope, move, taken, given in zip(slopes, moved, inputs, outputs, strict=True)
            if move > 0
        ):
            raise UnsoundBoundError(
                f"certify: {name} has a slope of {max(slopes):.6g} in norm {claim.norm}, above its"
                f" bound {bound:.6g}: its rule is wrong for this module. If the rule is yours"
                " (register_rule), correct it; if it is ours, please report it with the module's"
                " options"
            )
        shares.append(max(slopes) / bound if bound > 0 else 0.0)
    return (
        f"{len(shares)} pairs through {len(by_part)} modules, largest slope / bound"
        f" {max(shares):.3f}"
    )


def _sizes(values: list[Tensor], norm: TokenNorm) -> list[Sizes]:
    """Return for each how far its inputs are from the first one, and the sum of the sizes of both,
    by example, in float64; those of one shape are measured together."""
    groups: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        groups.setdefault((value.shape, value.dtype), []).append(place)
    found: dict[int, Sizes] = {}
    for ((count, batch, *_), _), places in groups.items():
        own = torch.stack([values[place] for place in places]).double()
        both = torch.cat([own[:, 1:] - own[:, :1], own], 1).flatten(0, 2)
        both = both.unsqueeze(1) if both.ndim == 2 else both.flatten(1, -2)
        sizes = perturbation_size(both, norm).view(len(places), -1, batch)
        apart, each = sizes.split([count - 1, count], 1)
        sums = each[:, 1:] + each[:, :1]
        found |= zip(places, zip(apart.tolist(), sums.tolist(), strict=True), strict=True)
    return [found[place] for place in range(len(values))]


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
    quiet, exact = quiet_run(module, evaluate=False), full_precision(device)
    with quiet, torch.autocast(device, enabled=False), exact:
        yield


def _width(module: nn.Module) -> int | None:
    """How wide the tokens are that a module reads, where it or its first part with a width says
    so."""
    grid = patch_grid(module)
    if grid is not None:
        return grid.size
    if hasattr(module, "get_input_embeddings"):
        return module.get_input_embeddings().weight.shape[-1]  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    shape = getattr(module, "normalized_shape", (None,))
    own = (getattr(module, "in_features", None), getattr(module, "embed_dim", None), shape[-1])
    widths = [*own, *(_width(child) for child in module._modules.values() if child is not None)]
    return next((width for width in widths if isinstance(width, int)), None)
