"""Advice in errors about roles: the words to type, for the call that was made."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from torch import nn

from wellposed.errors import MAX_LISTED
from wellposed.roles._roles import Roles

_EVERY = "where={'query': PATTERN, 'key': PATTERN, ...}"


@dataclass(frozen=True)
class Verb:
    """A public call that finds roles; ``batch`` and ``where`` are how it takes a batch, and names.

    Either is empty if it does not help. In ``where``, PATTERN stands for a pattern on names.
    """

    name: str
    batch: str
    where: str

    @classmethod
    def by_role(cls, name: str, arguments: str, *, takes_batch: bool = True) -> Verb:
        """Return a call that takes patterns by role."""
        batch = f"{name}({arguments}, batch=batch)" if takes_batch else ""
        return cls(name, batch, f"{name}({arguments}, {_EVERY})")

    @classmethod
    def by_name(cls, name: str, arguments: str, keyword: str = "where") -> Verb:
        """Return a call that takes patterns on the weights that it shall change."""
        call = f"{name}({arguments}"
        return cls(name, f"{call}, batch=batch)", f"{call}, {keyword}=[PATTERN, ...])")


FIND_ROLES = Verb.by_role("find_roles", "model")


def advice(verb: Verb, model: nn.Module, *, ran: bool) -> str:
    """Return what to type so that roles are found, and the names of the model's matrices.

    A batch is advised unless a pass ``ran``.
    """
    patterns = weight_patterns(model)
    if not patterns:
        return f"{type(model).__name__} has no matrix"

    lines = [f"  {pattern}" for pattern in patterns[: 2 * MAX_LISTED]]
    left = len(patterns) - len(lines)
    if left:
        lines.append(f"  ... and {left} more")

    ways = [
        f"give a batch: {verb.batch}" if verb.batch and not ran else "",
        f"name weights with a PATTERN of this model: {verb.where}" if verb.where else "",
    ]
    choice = "; or ".join(filter(None, ways)) or "its matrices are"
    return "\n".join([f"{choice[0].upper()}{choice[1:]}", *lines])


def batch_advice(verb: Verb, model: nn.Module, roles: Roles) -> str:
    """Return `advice` for roles that were found, but not those that the call needs."""
    return advice(verb, model, ran=roles.by_pass)


def heads_advice(verb: Verb, roles: Roles) -> str:
    """Return what to type so that the heads of attention are found, of which names tell the rest."""
    names = "set the number of heads on the attention, as num_heads"
    by_batch = "" if roles.by_pass or not verb.batch else f"Give a batch: {verb.batch}; or "
    return f"{by_batch}{names}" if by_batch else names.capitalize()


def weight_patterns(model: nn.Module) -> list[str]:
    """Return patterns on the names of all matrices, layer numbers as ``*``, with shapes and counts."""
    count = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name), tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
    )
    return [
        f"{name} {shape}{f', {number} times' if number > 1 else ''}"
        for (name, shape), number in count.items()
    ]
