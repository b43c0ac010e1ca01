"""Stacks of layers of a model, and whether they consist of plain residual blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from wellposed.errors import ConfigError, listed
from wellposed.roles import AttentionRole, FeedForwardRole, Roles, split_path


@dataclass
class LayerStack:
    """A stack of layers: everything below one container, such as ``model.decoder.layers``."""

    path: str
    parts: list[AttentionRole | FeedForwardRole] = field(default_factory=list)
    """Its residual blocks: attention, then feed-forward."""

    @property
    def layers(self) -> int:
        """N: the number of self-attentions or of feed-forward networks, whichever is larger."""
        kinds = [getattr(part, "kind", "feedforward") for part in self.parts]
        return max(kinds.count("self"), kinds.count("feedforward"))

    @property
    def has_cross_attention(self) -> bool:
        """Whether it reads another stack."""
        return any(getattr(part, "kind", None) == "cross" for part in self.parts)

    @property
    def stack(self) -> str:
        """decoder if any part of it is one, else encoder."""
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
    stacks: dict[str, LayerStack] = {}
    for part in (*roles.attention, *roles.feedforward):
        path = split_path(part.path)[0]
        stacks.setdefault(path, LayerStack(path)).parts.append(part)
    return list(stacks.values())


def check_blocks(model: nn.Module, roles: Roles) -> None:
    """Raise ConfigError for what a pass shows to be no stack of plain residual blocks."""
    paths = (part.path for part in roles.feedforward)
    numbered = (path for path in paths if path.rpartition(".")[2].isdigit())
    inner = Counter(path.rpartition(".")[0] for path in numbered if path != split_path(path)[1])
    problems = {
        "only some tokens go through an expert, so the size of a step is unknown; use a model"
        " without experts": [
            part.path
            for part in roles.feedforward
            if part.down.expert is not None or inner[part.path.rpartition(".")[0]] > 1
        ],
        "a gated feed-forward network is a product of three weights, for which the papers have no"
        " factor; use plain ones, or a model with norms": [
            part.path for part in roles.feedforward if part.gate is not None
        ],
        "these parts are added to nothing, so they are no residual blocks, for which the rule is": list(
            roles.not_added
        ),
        "these modules call a norm of torch in their own code, so it cannot be taken out": list(
            roles.inline_norms
        ),
    }
    for problem, paths in problems.items():
        if paths:
            raise ConfigError(f"{type(model).__name__}: {problem}:\n{listed(paths)}")
