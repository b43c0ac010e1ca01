"""Which stack of layers a weight belongs to, and how deep that stack is."""

from __future__ import annotations

from dataclasses import dataclass, field

from wellposed.errors import ConfigError, listed
from wellposed.roles import AttentionRole, FeedForwardRole, Roles
from wellposed.roles.layer_paths import split_path


@dataclass
class LayerStack:
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
        """N, the number of layers: of self-attentions, or of feed-forward networks where there are
        more."""
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
        return (
            f"{self.path or 'the model'}: {self.layers} layers, {self.blocks} residual blocks,"
            f" {kind}"
        )


def find_layer_stacks(roles: Roles) -> list[LayerStack]:
    """Return the stacks of layers of a model, in model order."""
    layer_stacks: dict[str, LayerStack] = {}
    for role in roles.attention:
        path = split_path(role.path)[0]
        layer_stacks.setdefault(path, LayerStack(path)).attention.append(role)
    for network in roles.feedforward:
        path = split_path(network.path)[0]
        layer_stacks.setdefault(path, LayerStack(path)).feedforward.append(network)
    return list(layer_stacks.values())


def encoder_and_decoder(layer_stacks: list[LayerStack]) -> tuple[LayerStack, LayerStack | None]:
    """Return the only stack and None, or an encoder and the decoder that reads it.

    Raises:
        ConfigError: any other number or kind of stacks.
    """
    if len(layer_stacks) == 1:
        return layer_stacks[0], None
    reading = [layer_stack for layer_stack in layer_stacks if layer_stack.has_cross_attention]
    if len(layer_stacks) == 2 and len(reading) == 1:
        other = next(layer_stack for layer_stack in layer_stacks if layer_stack is not reading[0])
        return other, reading[0]
    raise ConfigError(
        "T-Fixup is for one stack of layers, or an encoder and the decoder that reads it; found"
        f" {len(layer_stacks)} stacks; initialise each by itself, as"
        " t_fixup_(model.get_submodule(path)):\n"
        + listed([str(layer_stack) for layer_stack in layer_stacks])
    )
