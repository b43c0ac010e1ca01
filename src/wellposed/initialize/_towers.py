"""Which stack of layers a weight belongs to, and how deep that stack is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from wellposed.errors import ConfigError, listed
from wellposed.roles import AttentionRole, FeedForwardRole, Roles

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h|resblocks)\.(\d+)(?=\.|$)")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass
class Tower:
    """A stack of layers: everything below one container, such as ``model.decoder.layers``."""

    path: str
    attention: list[AttentionRole] = field(default_factory=list)
    feedforward: list[FeedForwardRole] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """K, the number of residual blocks."""
        return len(self.attention) + len(self.feedforward)

    @property
    def layers(self) -> int:
        """N, the number of layers: of self-attentions, or of feed-forward networks where there are more."""
        return max(sum(role.kind == "self" for role in self.attention), len(self.feedforward))

    @property
    def has_cross_attention(self) -> bool:
        """Whether it reads another stack."""
        return any(role.kind == "cross" for role in self.attention)

    @property
    def stack(self) -> str:
        """encoder, or decoder where any part of it is one."""
        roles = [*self.attention, *self.feedforward]
        return "decoder" if any(role.stack == "decoder" for role in roles) else "encoder"

    def layer_paths(self) -> list[str]:
        """Return the dotted path of each layer, in order."""
        paths = [split_path(role.path)[1] for role in [*self.attention, *self.feedforward]]
        return list(dict.fromkeys(paths))

    def __str__(self) -> str:
        kind = "with cross-attention" if self.has_cross_attention else self.stack
        return f"{self.path or 'the model'}: {self.layers} layers, {self.blocks} residual blocks, {kind}"


def find_towers(roles: Roles) -> list[Tower]:
    """Return the stacks of layers of a model, in model order."""
    towers: dict[str, Tower] = {}
    for role in roles.attention:
        path = split_path(role.path)[0]
        towers.setdefault(path, Tower(path)).attention.append(role)
    for network in roles.feedforward:
        path = split_path(network.path)[0]
        towers.setdefault(path, Tower(path)).feedforward.append(network)
    return list(towers.values())


def split_path(path: str) -> tuple[str, str]:
    """Return the container and the layer that hold a module; both are the parent where nothing is numbered.

    >>> split_path("model.encoder.layers.3.self_attn"), split_path("self_attn"), split_path("layers.0")
    (('model.encoder.layers', 'model.encoder.layers.3'), ('', ''), ('layers', 'layers.0'))
    """
    match = _LAYER.search(path) or _NUMBER.search(path)
    if match is not None:
        return path[: match.start(1)].rstrip("."), path[: match.end(1)]
    # feed-forward roles of torch's and BART's layers sit on the layer itself, whose path is empty at the root
    return "", ""


def encoder_and_decoder(towers: list[Tower]) -> tuple[Tower, Tower | None]:
    """Return the only tower and None, or an encoder and the decoder that reads it.

    Raises:
        ConfigError: any other number or kind of stacks.
    """
    if len(towers) == 1:
        return towers[0], None
    reading = [tower for tower in towers if tower.has_cross_attention]
    if len(towers) == 2 and len(reading) == 1:
        other = next(tower for tower in towers if tower is not reading[0])
        return other, reading[0]
    raise ConfigError(
        f"T-Fixup is for one stack of layers, or an encoder and the decoder that reads it; found {len(towers)} stacks; "
        "initialise each by itself, as t_fixup_(model.get_submodule(path)):\n"
        + listed([str(tower) for tower in towers])
    )
