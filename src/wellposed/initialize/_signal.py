"""How the size of the signal changes with depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from wellposed.call_checks import known_keywords
from wellposed.errors import ConfigError, listed
from wellposed.initialize._layer_stacks import find_layer_stacks
from wellposed.initialize._token_norms import Meter, reading
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

    @property
    def sizes(self) -> tuple[float, float, float]:
        """The three numbers."""
        return self.norm_in, self.norm_out, self.ratio


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
            (row.path, row.stack, str(row.depth), *(f"{each:.4g}" for each in row.sizes))
            for row in self.rows
        ]
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
        real = real_tokens(batch, layer_stack.stack, roles)
        for path in layer_stack.layer_paths:
            layer, name = [model.get_submodule(path)], path or "the layer"
            entering = Meter(f"input of {name}", layer, real)
            meters[path] = entering, Meter(f"output of {name}", layer, real, "output")
    with quiet_run(model), reading([meter for pair in meters.values() for meter in pair]):
        call_model(model, batch)
    sizes = {path: tuple(meter.root_mean_square for meter in pair) for path, pair in meters.items()}
    unseen = [path for path, pair in sizes.items() if None in pair]
    if unseen:
        raise ConfigError("the batch never went through these layers:\n" + listed(unseen))
    rows: list[LayerSignal] = []
    for layer_stack in layer_stacks:
        start = meters[layer_stack.layer_paths[0]][0].root_mean_square
        for depth, path in enumerate(layer_stack.layer_paths, start=1):
            entered, left = (meter.root_mean_square for meter in meters[path])
            ratio = left / start if start else math.inf
            rows.append(LayerSignal(path, layer_stack.stack, depth, entered, left, ratio))
    return SignalPropagation(tuple(rows))
