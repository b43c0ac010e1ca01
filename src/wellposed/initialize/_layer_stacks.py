"""Which stack of layers a weight belongs to, and how deep that stack is."""

from __future__ import annotations

from dataclasses import dataclass, field

from wellposed.roles import AttentionRole, FeedForwardRole, Roles
from wellposed.roles.layer_paths import split_path


@dataclass
class LayerStack:
    """A stack of layers: everything below one container, such as ``model.decoder.layers``."""

    path: str
    parts: list[AttentionRole | FeedForwardRole] = field(default_factory=list)
    """Its residual blocks: attention, then feed-forward."""

    @property
    def layers(self) -> int:
        """N, the number of layers: of self-attentions, or of feed-forward networks where there are
        more."""
        kinds = [getattr(part, "kind", "feedforward") for part in self.parts]
        return max(kinds.count("self"), kinds.count("feedforward"))

    @property
    def has_cross_attention(self) -> bool:
        """Whether it reads another stack."""
        return any(getattr(part, "kind", None) == "cross" for part in self.parts)

    @property
    def stack(self) -> str:
        """encoder, or decoder where any part of it is one."""
        return "decoder" if any(part.stack == "decoder" for part in self.parts) else "encoder"

    @property
    def layer_paths(self) -> list[str]:
        """Dotted path of each layer, in order."""
        return list(dict.fromkeys(split_path(part.path)[1] for part in self.parts))

    def __str__(self) -> str:
        kind = "with cross-attention" if self.has_cross_attention else self.stack
        size = f"{self.layers} layers, {len(self.parts)} residual blocks"
        return f"{self.path or 'the model'}: {size}, {kind}"


def find_layer_stacks(roles: Roles) -> list[LayerStack]:
    """Return the stacks of layers of a model, in model order."""
    found: dict[str, LayerStack] = {}
    for part in (*roles.attention, *roles.feedforward):
        path = split_path(part.path)[0]
        found.setdefault(path, LayerStack(path)).parts.append(part)
    return list(found.values())


def layer_paths(roles: Roles) -> list[str]:
    """Return the dotted paths of all layers."""
    return [path for layer_stack in find_layer_stacks(roles) for path in layer_stack.layer_paths]
