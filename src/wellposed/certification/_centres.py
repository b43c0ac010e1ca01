"""Inputs around which a local certificate is made: what every part of a module reads there."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.attack import Call, in_dtype, reads_pairs
from wellposed.errors import ConfigError, ShapeError, is_about_resources
from wellposed.hooks import eager_calls

# Allowance for float64 rounding of the recorded values, relative to the largest token.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Centre:
    """Tokens (batch, tokens, width) that a module reads at the given inputs, in float64."""

    tokens: Tensor
    mask: str = "none"
    """``"none"``, ``"causal"``, or ``"other"`` if attention may not see all tokens."""

    @property
    def size(self) -> float:
        """Largest 2-norm of a token."""
        return float(self.tokens.norm(dim=-1).max())

    def reach(self, moved: float) -> float:
        """Return how far a token may be from its centre, rounding of the centre included."""
        return moved + _ROUNDING * self.size


@dataclass(frozen=True)
class Centres:
    """The centres of all parts of a module by id, and the outputs of the module there."""

    by_module: Mapping[int, Centre]
    outputs: Tensor
    count: int


def check_around(
    module: nn.Module, around: object, seq_len: int | None, *, caller: str = "certify"
) -> Tensor:
    """Return inputs in float64, or raise what is wrong with them."""
    if not isinstance(around, Tensor):
        raise ConfigError(
            f"{caller}: around must be a tensor of inputs (batch, tokens, width), received"
            f" {type(around).__name__}; of token ids: wellposed.models.input_vectors(model, ids)"
        )
    if not around.is_floating_point():
        raise ConfigError(
            f"{caller}: around has dtype {around.dtype}; expected vectors, of token ids those of"
            " wellposed.models.input_vectors(model, ids)"
        )
    if around.ndim != 3 or 0 in around.shape:
        raise ShapeError(
            f"{caller}: around must be (batch, tokens, width) with none of them 0, received"
            f" {tuple(around.shape)}"
        )
    if seq_len is not None and around.shape[1] > seq_len:
        raise ShapeError(
            f"{caller}: around has {around.shape[1]} tokens, and seq_len={seq_len} covers fewer; pass"
            f" seq_len={around.shape[1]}"
        )
    if not bool(around.isfinite().all()):
        raise ConfigError(f"{caller}: around holds NaN or infinity; expected finite inputs")

    dropped = next((name for name, part in module.named_modules() if _drops(part)), None)
    if dropped is not None:
        raise ConfigError(
            f"{caller}: around= needs one map, and dropout is on in {dropped or 'the module'} (training"
            " mode); call module.eval()"
        )
    if reads_pairs(module):
        raise ConfigError(
            f"{caller}: around= is of one text, and this model reads pairs, for which no local bound"
            " is proved; leave it out"
        )

    return around.detach().double()


def _drops(part: nn.Module) -> bool:
    rates = (getattr(part, name, 0.0) for name in ("p", "dropout"))
    return part.training and any(isinstance(rate, float) and rate > 0 for rate in rates)


def record_centres(
    module: nn.Module, around: Tensor, *, is_causal: bool = False, caller: str = "certify"
) -> Centres:
    """Run a float64 copy of a module in its own mode on ``around``, and record its parts' inputs.

    Raises:
        ShapeError: the module does not run on them.
    """
    twin = in_dtype(module, torch.float64).requires_grad_(False)
    device = next((weight.device for weight in twin.parameters()), around.device)
    pairs = zip(module.modules(), twin.modules(), strict=True)
    owners = {id(copy): id(original) for original, copy in pairs}
    recorded: dict[int, list[Centre]] = {}

    def note(part: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tensors = (value for value in (*args, *keywords.values()) if isinstance(value, Tensor))
        x = next(tensors, None)
        if x is None or not x.is_floating_point() or x.ndim < 2 or x.shape[0] != len(around):
            recorded.setdefault(owners[id(part)], []).append(Centre(around[:0]))
            return
        tokens = x.detach().double().clone()
        tokens = tokens.unsqueeze(1) if x.ndim == 2 else tokens.flatten(1, -2)
        mask = _mask_of(_by_name(part, args, keywords))
        recorded.setdefault(owners[id(part)], []).append(Centre(tokens, mask))

    handles = [
        part.register_forward_pre_hook(note, with_kwargs=True) for part in twin.modules()
    ]  # fmt: skip
    call = Call(twin, {"is_causal": True} if is_causal else {})
    try:
        with eager_calls():
            outputs = call(around.to(device))
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        if is_about_resources(error):
            raise
        raise ShapeError(
            f"{caller}: {type(module).__name__} does not run on around of shape"
            f" {tuple(around.shape)}: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    # A part that runs twice, or on something else than tokens, has no one centre.
    centres = {
        key: calls[0] for key, calls in recorded.items() if len(calls) == 1 and len(calls[0].tokens)
    }
    return Centres(centres, outputs.double(), len(around))


def _by_name(
    part: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments of a call of a module by name, those passed by position too."""
    try:
        return inspect.signature(part.forward).bind(*args, **keywords).arguments
    except (TypeError, ValueError):
        # No signature, or a call that fails by itself.
        return keywords


_OTHER_MASKS = ("attn_mask", "attention_mask", "mask", "src_mask", "src_key_padding_mask", "cache")


def _mask_of(arguments: Mapping[str, Any]) -> str:
    padding = arguments.get("key_padding_mask")
    finished = getattr(padding, "mask", None)
    if isinstance(padding, Tensor) or finished is not None:
        return "other"
    if any(arguments.get(name) is not None for name in _OTHER_MASKS):
        return "other"
    causal = getattr(padding, "is_causal", False) if padding is not None else False
    return "causal" if causal or arguments.get("is_causal") else "none"


def smallest_deviation(centre: Centre, moved: float, *, centred: bool) -> float:
    """Return the smallest standard deviation (or root mean square) of a token in the balls; 0 or less
    if one may become constant. Either is ``1/sqrt(D)``-Lipschitz in the token."""
    tokens = centre.tokens
    if centred:
        tokens = tokens - tokens.mean(-1, keepdim=True)
    root = math.sqrt(tokens.shape[-1])
    return float(tokens.norm(dim=-1).min()) / root * (1 - 1e-9) - centre.reach(moved) / root
