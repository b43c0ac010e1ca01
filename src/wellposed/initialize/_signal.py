"""How the size of the signal changes with depth, and the norms of the tokens on their way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.call_checks import known_keywords
from wellposed.errors import ConfigError, ConvergenceError, listed
from wellposed.initialize._plan import find_layer_stacks
from wellposed.roles import find_roles
from wellposed.text_table import aligned
from wellposed.watch import call_model, first_tensor, quiet_run, real_tokens


@dataclass
class Meter:
    """Euclidean norms of the real tokens that enter or leave a module, over as many calls as there
    are."""

    where: str
    """What an error names."""
    module: nn.Module
    real: Tensor | None
    """(batch, tokens), True for real tokens; where it does not fit, all count."""
    side: Literal["input", "output"] = "input"
    norms: list[Tensor] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        """Mean norm; None where no token was seen."""
        return torch.cat(self.norms).mean().item() if self.norms else None

    @property
    def root_mean_square(self) -> float:
        """Root of the mean squared norm of at least one token."""
        return torch.cat(self.norms).square().mean().sqrt().item()

    def entered(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Add the norms of the tokens that enter a module."""
        self._add([*arguments, *keywords.values()])

    def left(self, _: nn.Module, __: Any, output: Any) -> None:
        """Add the norms of the tokens that leave a module."""
        self._add(output)

    def _add(self, value: Any) -> None:
        hidden = first_tensor(value)
        if hidden is None:
            return
        norms = hidden.detach().to(torch.promote_types(hidden.dtype, torch.float32)).norm(dim=-1)
        fits = self.real is not None and self.real.shape == norms.shape
        norms = norms[self.real.to(norms.device)] if self.real is not None and fits else norms
        infinite = int((~norms.isfinite()).sum())
        if infinite:
            raise ConvergenceError(
                f"{self.where}: {infinite} of {norms.numel()} token norms are not finite (dtype"
                f" {hidden.dtype}); the signal overflows before this point: look at it with"
                " signal_propagation on a float32 copy, and use bf16 or float32"
            )
        if norms.numel():
            self.norms.append(norms.flatten().double().cpu())


@contextmanager
def reading(meters: Sequence[Meter]) -> Iterator[None]:
    """Let the meters read every call of their modules inside the context."""
    with ExitStack() as stack:
        for meter in meters:
            handle = (
                meter.module.register_forward_hook(meter.left)
                if meter.side == "output"
                else meter.module.register_forward_pre_hook(meter.entered, with_kwargs=True)
            )
            stack.callback(handle.remove)
        yield


@dataclass(frozen=True)
class LayerSignal:
    """Root mean square token norms around one layer."""

    path: str
    """Dotted path of the layer."""
    stack: str
    depth: int
    """1 for the first layer of its stack."""
    norm_in: float
    norm_out: float
    ratio: float
    """Norm after this layer over the norm that entered the stack: |out| / |in| of the stack cut
    here."""


@dataclass(frozen=True)
class SignalPropagation:
    """|out| / |in| after every layer; ``print`` it for a table."""

    rows: tuple[LayerSignal, ...]

    def ratios(self, stack: str | None = None) -> list[float]:
        """Return |out| / |in| after each layer of a stack (encoder or decoder), or of all stacks.

        >>> SignalPropagation((LayerSignal("layers.0", "encoder", 1, 2.0, 3.0, 1.5),)).ratios("encoder")
        [1.5]
        """
        return [row.ratio for row in self.rows if stack is None or row.stack == stack]

    def table(self) -> str:
        """Return the rows as aligned text.

        >>> print(SignalPropagation((LayerSignal("layers.0", "encoder", 1, 2.0, 3.0, 1.5),)).table())
        layer     stack    depth  norm in  norm out  |out|/|in|
        layers.0  encoder      1        2         3         1.5
        """
        head = ("layer", "stack", "depth", "norm in", "norm out", "|out|/|in|")
        body = []
        for row in self.rows:
            sizes = (f"{each:.4g}" for each in (row.norm_in, row.norm_out, row.ratio))
            body.append((row.path, row.stack, str(row.depth), *sizes))
        return aligned([head, *body], "llr")

    def __str__(self) -> str:
        return self.table()


@known_keywords
def signal_propagation(
    model: nn.Module, batch: Any, *, patterns: Mapping[str, str | Sequence[str]] | None = None
) -> SignalPropagation:
    """Return |x_l| / |x_0| for every layer l of every stack, |x| the root mean square norm of the
    real tokens.

    Empirical: one forward pass on ``batch``, in eval mode, without gradients; the model is left as
    it was. About 1 at every depth is what T-Fixup's initial weights give; Xavier without LayerNorm
    grows exponentially with depth.

    Args:
        model: any model that `find_roles` knows.
        batch: a tensor, a mapping of keywords or a sequence of arguments of ``model``. Tokens that
            its ``attention_mask`` (``decoder_attention_mask``) marks as padding are not counted.
        patterns: as in `find_roles`.

    Returns:
        One row a layer.

    Raises:
        RoleNotFoundError: no attention or feed-forward part is recognised.
        ConvergenceError: a norm is not finite; the first such layer is named.
        ConfigError: the batch never enters a layer, or is nothing a model can be called with.

    Cost: one forward pass. When not to use: on a model with LayerNorm after the sum, where every
    ratio is set by the norm and says nothing.

    >>> import torch
    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    >>> len(signal_propagation(encoder, torch.randn(2, 5, 8)).ratios("encoder"))
    3
    """
    roles = find_roles(model, patterns=patterns)
    layer_stacks = find_layer_stacks(roles)
    meters: dict[str, tuple[Meter, Meter]] = {}
    for layer_stack in layer_stacks:
        real = real_tokens(batch, layer_stack.stack, roles.attention)
        for path in layer_stack.layer_paths:
            layer, name = model.get_submodule(path), path or "the layer"
            entering = Meter(f"input of {name}", layer, real)
            meters[path] = entering, Meter(f"output of {name}", layer, real, "output")
    with quiet_run(model), reading([meter for pair in meters.values() for meter in pair]):
        call_model(model, batch)
    unseen = [path for path, pair in meters.items() if not all(meter.norms for meter in pair)]
    if unseen:
        raise ConfigError("the batch never went through these layers:\n" + listed(unseen))
    rows: list[LayerSignal] = []
    for each in layer_stacks:
        start = meters[each.layer_paths[0]][0].root_mean_square
        for depth, path in enumerate(each.layer_paths, start=1):
            entered, left = (meter.root_mean_square for meter in meters[path])
            ratio = left / start if start else math.inf
            rows.append(LayerSignal(path, each.stack, depth, entered, left, ratio))
    return SignalPropagation(tuple(rows))
