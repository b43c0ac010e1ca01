"""How the size of the signal changes with depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from wellposed.errors import ConfigError, listed
from wellposed.initialize._layer_stacks import find_layer_stacks
from wellposed.initialize._token_norms import Hook, MeanNorm, hooks
from wellposed.roles import find_roles
from wellposed.text_table import aligned
from wellposed.watch import call_model, quiet_run, real_tokens


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
        body = [
            (
                row.path,
                row.stack,
                str(row.depth),
                f"{row.norm_in:.4g}",
                f"{row.norm_out:.4g}",
                f"{row.ratio:.4g}",
            )
            for row in self.rows
        ]
        return aligned([head, *body], "llr")

    def __str__(self) -> str:
        return self.table()


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
    meters: dict[tuple[str, str], tuple[MeanNorm, MeanNorm]] = {}
    before: list[tuple[nn.Module, Hook]] = []
    after: list[tuple[nn.Module, Hook]] = []
    for layer_stack in layer_stacks:
        real = real_tokens(batch, layer_stack.stack, roles)
        for path in layer_stack.layer_paths():
            pair = (
                MeanNorm(f"input of {path or 'the layer'}"),
                MeanNorm(f"output of {path or 'the layer'}"),
            )
            meters[layer_stack.path, path] = pair
            layer = model.get_submodule(path)
            before.append((layer, partial(pair[0].add, real=real)))
            after.append((layer, partial(pair[1].add, real=real)))
    with quiet_run(model), hooks(before, after):
        call_model(model, batch)
    unseen = [
        path
        for (_, path), (entered, left) in meters.items()
        if not (entered.tokens and left.tokens)
    ]
    if unseen:
        raise ConfigError("the batch never went through these layers:\n" + listed(unseen))
    rows: list[LayerSignal] = []
    for layer_stack in layer_stacks:
        start = _size(meters[layer_stack.path, layer_stack.layer_paths()[0]][0])
        for depth, path in enumerate(layer_stack.layer_paths(), start=1):
            entered, left = map(_size, meters[layer_stack.path, path])
            rows.append(
                LayerSignal(
                    path,
                    layer_stack.stack,
                    depth,
                    entered,
                    left,
                    left / start if start else math.inf,
                )
            )
    return SignalPropagation(tuple(rows))


def _size(meter: MeanNorm) -> float:
    return meter.root_mean_square or 0.0
