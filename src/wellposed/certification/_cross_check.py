"""Test a certificate: a few forward passes along random and gradient-ascent directions.

This proves nothing. It finds rules that do not describe their class, and excessive rounding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.attack import Call, perturbation_size, rounding_unit, steepest_direction
from wellposed.errors import (
    NotContractiveError,
    NotLipschitzError,
    UnsoundBoundError,
    is_about_resources,
)
from wellposed.hooks import quiet_run
from wellposed.interrupts import undoing
from wellposed.linalg import TokenNorm, full_precision
from wellposed.nn import frozen

# Sizes of inputs, as fractions of the ball; one example of the batch for each.
_SCALES = (1.0, 0.1)
TRIED_TOKENS = 4
# Allowance for the rounding of a forward pass, in units of the last place of inputs and outputs.
_ULPS = 64
# Width of inputs if no part has one.
_ANY_WIDTH = 8

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Claim:
    """Bounds to test: a module and its parts in one norm, for tokens of 2-norm at most ``radius``."""

    module: nn.Module
    total: float
    parts: Sequence[tuple[str, nn.Module, float]]
    norm: TokenNorm
    radius: float | None
    tokens: int
    """Number of tokens of a test input."""
    is_causal: bool
    dtype: torch.dtype
    layers: Mapping[int, Any]
    """Bounds that contractive layers divide by, by module id."""
    visited: Sequence[tuple[str, nn.Module, bool]] = ()
    """Every module that a rule reached, innermost first, and whether it may change its input."""
    centres: Tensor | None = None
    """Inputs around which the bounds hold, or None: around zero."""


@dataclass(frozen=True)
class _Pair:
    """Two inputs of a module and its two outputs."""

    x: Tensor
    aside: Tensor
    y: Tensor
    other: Tensor


def try_out(claim: Claim) -> tuple[str, dict[str, float]]:
    """Test a certificate; return the result in one line, and the largest slope of each path.

    Raises:
        UnsoundBoundError: a slope above the bound; the innermost such module is named.
        NotLipschitzError: the forward pass refuses to run, or gives NaN or infinity.
    """
    reasons: list[str] = []
    width = width_of(claim.module)
    # TransJect appends positions to embeddings, so its inputs are twice as wide as its table.
    candidates = (_ANY_WIDTH,) if width is None else (width, 2 * width)
    for candidate in candidates if claim.centres is None else (claim.centres.shape[-1],):
        try:
            by_part = _run(claim, candidate)
        except UnsoundBoundError:
            raise
        except (NotLipschitzError, NotContractiveError) as error:
            raise NotLipschitzError(
                f"certify: bounded by {claim.total:.4g}, but it does not run: {error}"
            ) from error
        # A foreign module may raise anything at an input that it is not made for.
        except Exception as error:
            if is_about_resources(error):
                raise
            reasons.append(f"{type(error).__name__} at an input (batch, tokens, {candidate})")
            continue
        return _judge(claim, by_part)

    # The second width is a guess, and its failure says less than that of the first.
    return f"not run: {reasons[0]}", {}


@contextmanager
def _unchanged_inputs(claim: Claim) -> Iterator[None]:
    """Raise `UnsoundBoundError` if a module changes its input although its rule does not say so."""
    before: dict[int, list[list[tuple[Tensor, int, Tensor]]]] = {}
    offenders: list[str] = []

    def enter(part: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *keywords.values()) if isinstance(x, Tensor)]
        noted = [(x, x._version, x.detach().clone()) for x in tensors]
        before.setdefault(id(part), []).append(noted)

    def leave(path: str, part: nn.Module, _args: Any, _output: Any) -> None:
        noted = before[id(part)].pop()
        if any(_has_changed(*entry) for entry in noted):
            offenders.append(f"{path or 'the module'} ({type(part).__name__})")

    with undoing() as undo:
        for path, part, may_overwrite in claim.visited:
            if not may_overwrite:
                undo.hook(part.register_forward_pre_hook, enter, with_kwargs=True)
                undo.hook(part.register_forward_hook, partial(leave, path))
        try:
            yield
        finally:
            # Our own layers raise as well, and what they raise would hide the part.
            if offenders:
                raise UnsoundBoundError(
                    f"certify: {offenders[0]} changes its input in a call, which its rule does not"
                    " say, so whatever uses that tensor again (a residual) computes something else;"
                    " write its operations out of place (inplace=False)"
                )


def _has_changed(tensor: Tensor, version: int, value: Tensor) -> bool:
    # Another view of the same memory may have been written to.
    counted = tensor._version != version and tensor._base is None
    return counted or not torch.equal(tensor.nan_to_num(), value.nan_to_num())


def _run(claim: Claim, width: int) -> dict[int, list[_Pair]]:
    """Return the pairs of each part by its id; the module itself is measured without a hook."""
    device = next((weight.device for weight in claim.module.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tokens = claim.tokens if claim.centres is None else claim.centres.shape[1]
    shape = (3, len(_SCALES), tokens, width)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
    x = _placed(noise[0], claim)
    if claim.centres is not None:
        first = claim.centres[torch.arange(len(_SCALES)) % len(claim.centres)]
        x = x + first.to(x)

    inputs = [x, x + _placed(noise[1], claim)]
    call = _as_function(claim, device)
    # Contractive layers have computed their bounds already.
    made = frozen(claim.module, claim.layers) if claim.layers else nullcontext()
    with _without_gradients(claim.module), made:
        try:
            ascended = _ascended(call, x, noise[2], claim.norm)
            if ascended is not None:
                inputs.append(x + _placed(ascended, claim))
            first, *others = _outputs(call, inputs, claim.module)
        except Exception as error:
            if is_about_resources(error):
                raise
            # Our layers refuse a part that overwrites its input; the hooks name it.
            with _unchanged_inputs(claim):
                _outputs(call, inputs, claim.module)
            raise
        with _unchanged_inputs(claim):
            by_part = _seen_by_parts(claim, call, [x, inputs[-1]])

    pairs = zip(inputs[1:], others, strict=True)
    by_part[id(claim.module)] = [_Pair(x, aside, first, other) for aside, other in pairs]
    return by_part


def _placed(direction: Tensor, claim: Claim) -> Tensor:
    """Scale each example to a fraction of half the radius, so that sums of two stay in the ball."""
    radius = min(direction.shape[-1] ** 0.5, math.inf if claim.radius is None else claim.radius)
    reach = (0.5 - 1e-3) * radius * direction.new_tensor(_SCALES)
    longest = perturbation_size(direction, "tok")
    scale = torch.where(longest > 0, reach / longest, 0.0)
    return (direction * scale[:, None, None]).to(claim.dtype)


def _ascended(call: Map, x: Tensor, cotangent: Tensor, norm: TokenNorm) -> Tensor | None:
    """Return the direction that moves a random functional of the output most, or None."""
    start = x.detach().requires_grad_()
    with torch.enable_grad():
        y = call(start.clone())
    if not y.requires_grad:
        return None
    enough = y.numel() <= cotangent.numel()
    noise = cotangent.flatten()[: y.numel()] if enough else y.detach().double().flatten()
    (pulled,) = torch.autograd.grad(y, start, noise.view_as(y).to(y.dtype), allow_unused=True)
    if pulled is None or not bool(pulled.isfinite().all()):
        return None
    return steepest_direction(pulled.double(), norm)


def _outputs(call: Map, inputs: Sequence[Tensor], module: nn.Module) -> Sequence[Tensor]:
    """Return the outputs of one pass; of one each in train mode, as draws differ in a batch."""
    if any(part.training for part in module.modules()):
        return [call(x.clone()) for x in inputs]
    return call(torch.cat(list(inputs))).chunk(len(inputs))


def _seen_by_parts(claim: Claim, call: Map, inputs: Sequence[Tensor]) -> dict[int, list[_Pair]]:
    """Run both inputs again with a hook on every part."""
    watched = {id(part): part for _, part, _ in claim.parts if part is not claim.module}
    calls: dict[int, list[tuple[Tensor, Tensor]]] = {}
    entered: dict[int, list[Tensor | None]] = {}

    def enter(part: nn.Module, args: tuple[Any, ...]) -> None:
        """Copy the input, which a call in place overwrites."""
        vectors = [x for x in args if isinstance(x, Tensor)]
        # Several vectors of an example move together, as its tokens.
        several = len(vectors) == len(args) > 1 and all(x.ndim == 2 for x in vectors)
        x = torch.stack(vectors, dim=1) if several else vectors[0].clone() if vectors else None
        entered.setdefault(id(part), []).append(x)

    def note(part: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        x = entered[id(part)].pop()
        if x is not None and isinstance(output, Tensor):
            calls.setdefault(id(part), []).append((x.detach(), output.detach().clone()))

    with undoing() as undo:
        for part in watched.values():
            undo.hook(part.register_forward_pre_hook, enter)
            undo.hook(part.register_forward_hook, note)
        if claim.visited:
            _outputs(call, inputs, claim.module)
    return {key: _paired(noted, len(inputs[0])) for key, noted in calls.items()}


def _paired(noted: list[tuple[Tensor, Tensor]], batch: int) -> list[_Pair]:
    """Pair what a part did under the first input with the second (one batch, or two calls)."""
    half = len(noted) // 2
    if all(len(x) == len(y) == 2 * batch for x, y in noted):
        pairs = [_Pair(*x.chunk(2), *y.chunk(2)) for x, y in noted]
    elif len(noted) % 2 or any(len(x) != batch or len(y) != batch for x, y in noted):
        return []  # a part that runs once for several examples, or on something else
    else:
        both = zip(noted[:half], noted[half:], strict=True)
        pairs = [_Pair(x, aside, y, other) for (x, y), (aside, other) in both]
    return [pair for pair in pairs if pair.x.ndim > 1 and pair.y.ndim > 1]


def _judge(claim: Claim, by_part: dict[int, list[_Pair]]) -> tuple[str, dict[str, float]]:
    bounds: dict[int, tuple[str, nn.Module, float]] = {}
    for path, part, bound in claim.parts:
        if bound >= bounds.get(id(part), ("", part, 0.0))[2]:
            bounds[id(part)] = (path, part, bound)

    bounds[id(claim.module)] = ("", claim.module, claim.total)
    unit = rounding_unit(claim.module, claim.dtype)
    shares: list[float] = []
    slopes: dict[str, float] = {}
    for path, part, bound in bounds.values():
        name = f"{path or 'the module'} ({type(part).__name__})"
        of_part = [_share(pair, bound, name, claim, unit) for pair in by_part.get(id(part), ())]
        shares += of_part
        if of_part:
            slopes[path] = max(of_part) * bound

    return (
        f"{len(shares)} pairs through {len(by_part)} modules, largest slope / bound"
        f" {max(shares):.3f}"
    ), slopes


def _share(pair: _Pair, bound: float, name: str, claim: Claim, unit: float) -> float:
    """Return slope / bound, with differences taken in float64."""
    moved = _size(pair.aside.double() - pair.x.double(), claim.norm)
    change = _size(pair.other.double() - pair.y.double(), claim.norm)
    slope = torch.where(moved > 0, change / moved, 0.0)
    if not bool(slope.isfinite().all()):
        size = float(pair.x.norm(dim=-1).max())
        raise NotLipschitzError(
            f"certify: {name} gives NaN or infinity in {claim.dtype} at tokens of norm {size:.3g},"
            " so a bound for exact arithmetic does not cover it; scale the weights down or use a"
            " wider dtype"
        )

    # Largest slope that rounding may add to a map with this bound.
    inputs, outputs = (
        sum(_size(value, claim.norm) for value in values)
        for values in ((pair.x, pair.aside), (pair.y, pair.other))
    )
    noise = _ULPS * unit * (outputs + bound * inputs)
    excess = slope - bound * (1 + 1e-6)
    allowed = torch.where(moved > 0, noise / moved, 0.0).clamp_min(0)
    if bool((excess > allowed).any()):
        raise UnsoundBoundError(
            f"certify: {name} has a slope of {float(slope.max()):.6g} in norm {claim.norm}, above"
            f" its bound {bound:.6g}: its rule is wrong for this module. If the rule is yours"
            " (register_rule), correct it; if it is ours, please report it with the module's"
            " options"
        )

    if claim.centres is not None:
        # Steps in small balls are not much longer than the rounding of their ends.
        slope = (slope - allowed).clamp_min(0)
    return float(slope.max()) / bound if bound > 0 else 0.0


def _as_function(claim: Claim, device: torch.device) -> Map:
    """Return the module with the same random numbers at each call: a bound is of one map."""
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
    with undoing() as undo:
        for weight in learnt:
            undo.later(weight.requires_grad_, True)
            weight.requires_grad_(False)
        yield


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Run the module in its own mode and dtype, and leave it as it was. Autocast, float32 products
    in less than float32, and inference mode belong to the caller and are off."""
    devices = (weight.device.type for weight in module.parameters() if not weight.is_meta)
    device = next(devices, "cpu")
    with quiet_run(module, evaluate=False), full_precision(device):
        yield


def channels_of(module: nn.Module) -> int | None:
    """Return the number of channels that the first convolution of a module reads, or None."""
    return next(
        (part.in_channels for part in module.modules() if isinstance(part, nn.Conv1d)), None
    )


def width_of(module: nn.Module) -> int | None:
    """Return the width of the tokens that a module, or its first part with a width, reads."""
    if hasattr(module, "get_input_embeddings"):
        return module.get_input_embeddings().weight.shape[-1]  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    shape = getattr(module, "normalized_shape", (None,))
    sizes = (getattr(module, "in_features", None), getattr(module, "embed_dim", None), shape[-1])
    widths = [*sizes, *(width_of(child) for child in module._modules.values() if child is not None)]
    return next((width for width in widths if isinstance(width, int)), None)


def _size(x: Tensor, norm: TokenNorm) -> Tensor:
    x = x.double()
    return perturbation_size(x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2), norm)
