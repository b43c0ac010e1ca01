"""Notes on what a pass ran and no role covers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from wellposed.hooks import class_name
from wellposed.roles._roles import Roles

if TYPE_CHECKING:
    from wellposed.roles._pass import Trace


def unread_parts(model: nn.Module, roles: Roles, traced: Trace) -> Iterator[str]:
    """Yield a note on attention of another kind, and one on networks with a convolution inside."""
    paths = {module: path for path, module in model.named_modules()}
    known_paths = {part.path for part in roles.attention}
    linear = [paths.get(module, "") for module in traced.record.without_softmax]
    linear = [path or class_name(model) for path in linear if path not in known_paths]
    if linear:
        text = "three activations multiplied without a softmax, not read as attention"
        yield f"{text}: {', '.join(linear)}"

    names = {weight.view.parameter_name for weight in roles.weights()}
    convolved = [
        f"{up.label}, {down.label}"
        for up, down in traced.convolved
        if not {up.parameter_name, down.parameter_name} <= names
    ]
    if convolved:
        text = "networks with a convolution inside, not read as feed-forward"
        yield f"{text}: {'; '.join(dict.fromkeys(convolved))}"
