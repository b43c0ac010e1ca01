"""Notes on what a pass ran and no role covers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import nn

from wellposed.hooks import class_name
from wellposed.roles._roles import Roles

if TYPE_CHECKING:
    from wellposed.roles._pass import Trace

logger = logging.getLogger("wellposed.roles")
_LOGGED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Notes that were warned about, by model."""


def log_notes(verb: str, model: nn.Module, roles: Roles) -> None:
    """Log the notes on a model in the name of a call: as a warning for the first time in a process, then as INFO.

    Every verb finds the roles again, and would repeat what the user has read.
    """
    logged = _LOGGED.setdefault(model, set())
    fresh = [note for note in roles.notes if note not in logged]
    repeated = [note for note in roles.notes if note in logged]
    logged.update(fresh)
    if fresh:
        logger.warning("%s: %s", verb, "; ".join(fresh))
    if repeated:
        logger.info("%s, as before: %s", verb, "; ".join(repeated))


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
