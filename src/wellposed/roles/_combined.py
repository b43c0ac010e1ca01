"""One answer of names and the pass: the pass decides, names fill in what it did not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from wellposed.hooks import class_name
from wellposed.roles._families import Role
from wellposed.roles._notes import unread_parts
from wellposed.roles._roles import AttentionRole, FeedForwardRole, Roles, views_of, weight_key

if TYPE_CHECKING:
    from wellposed.roles._pass import Trace


_KINDS = {AttentionRole: "attention", FeedForwardRole: "feed-forward"}


def combined_roles(model: nn.Module, named: Roles, traced: Trace) -> Roles:
    """Return the roles of the pass, and those found by name in modules that it did not show."""
    merge = _Merge(model, traced)
    attention = merge.parts(named.attention, traced.roles.attention)
    feedforward = merge.parts(named.feedforward, traced.roles.feedforward)
    combined = replace(traced.roles, attention=attention, feedforward=feedforward)

    notes = [*_refusals(model, traced), *merge.notes()]
    if traced.unchecked not in {"", "check=False"}:
        notes.append(f"the roles were not checked: {traced.unchecked}")
    notes += unread_parts(model, combined, traced)

    with_role = {(id(weight.view.owner), weight.view.attribute) for weight in combined.weights()}
    open_calls = {
        note: weights
        for note, weights in traced.incomplete.items()
        if not any((id(w.view.owner), w.view.attribute) in with_role for w in weights)
        and (weights or not named.attention)
    }
    loose = {(w.role, w.view.key): w for weights in open_calls.values() for w in weights}
    return replace(combined, loose=tuple(loose.values()), notes=(*notes, *open_calls))


class _Merge:
    """The parts of both, and where names and the pass do not agree."""

    def __init__(self, model: nn.Module, traced: Trace) -> None:
        self._traced = traced
        self._order = {path: index for index, (path, _) in enumerate(model.named_modules())}
        self._read = _names_read(traced)
        self._refused = {
            (type(part), weight_key(view))
            for part, _ in traced.refused
            for view in views_of(part).values()
        }
        self._unseen: list[str] = []
        self._unconfirmed: list[str] = []
        self._clashes: list[str] = []

    def parts(self, named: Sequence[Role], by_pass: Sequence[Role]) -> tuple[Role, ...]:
        """Return the parts of one kind, in the order of the model."""
        by_id: dict[int, Role] = {id(role): role for role in by_pass}
        last_first = [
            (view, role) for role in reversed(by_pass) for view in views_of(role).values()
        ]
        holders = {weight_key(view): role for view, role in last_first}
        for role in named:
            views = views_of(role)
            weights = [weight_key(view) for view in views.values()]
            rival = next(filter(None, map(holders.get, weights)), None)
            if rival is None and any((type(role), weight) in self._refused for weight in weights):
                continue

            if rival is None or not {view.parameter_name for view in views.values()} <= self._read:
                # a weight that enters in a form computed from several is known by name alone
                by_id.pop(id(rival), None)
                by_id[id(role)] = role
                reached = any(self._traced.reached(view.parameter) for view in views.values())
                (self._unconfirmed if reached else self._unseen).append(role.path)
            elif not self._differ(role, rival):
                # a module that sits in two places has the name that a reader would give it
                by_id.pop(id(rival), None)
                by_id[id(role)] = replace(rival, path=role.path, **views)

        return tuple(sorted(by_id.values(), key=lambda role: self._order[role.path]))

    def _differ(self, role: Role, rival: Role) -> bool:
        """Note each weight that is another by name than in the pass; return whether one is."""
        others = views_of(rival)
        differ = [
            f"{role.path}: {name} is {view.label} by name, {others[name].label} in the pass"
            for name, view in views_of(role).items()
            if name in others and view.key != others[name].key
        ]
        self._clashes.extend(differ)
        return bool(differ)

    def notes(self) -> Iterator[str]:
        """Yield what names alone say, and what they say otherwise than the pass."""
        if self._unseen:
            yield f"not reached by this batch, found by name: {', '.join(self._unseen)}"
        if self._unconfirmed:
            yield f"found by name; the pass does not show it: {', '.join(self._unconfirmed)}"
        if self._clashes:
            sure = "its check confirms" if not self._traced.unchecked else "nothing checked"
            yield (
                f"names say otherwise than the pass, which {sure} and which is taken:"
                f" {'; '.join(self._clashes)}"
            )


def _refusals(model: nn.Module, traced: Trace) -> Iterator[str]:
    """Yield a line for each part that the pass shows and that is no role."""
    for part, why in traced.refused:
        shows = ", ".join(f"{name} {view.label}" for name, view in views_of(part).items())
        path = part.path or class_name(model)
        yield f"{_KINDS[type(part)]} {path}: refused. The pass shows {shows}, but {why}"


def _names_read(traced: Trace) -> set[str]:
    from wellposed.roles._record import Product

    return {product.view.parameter_name for product in traced.record.of_kind(Product)}
