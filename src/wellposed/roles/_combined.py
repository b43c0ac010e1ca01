"""One answer of names and the pass: the pass decides, names fill in what it did not show."""

from __future__ import annotations

from collections.abc import Sequence
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
    unseen: list[str] = []
    unconfirmed: list[str] = []
    clashes: list[str] = []
    order = {path: index for index, (path, _) in enumerate(model.named_modules())}
    read = _names_read(traced)
    refused = {
        (type(part), weight_key(v)) for part, _ in traced.refused for v in views_of(part).values()
    }

    def both(named: Sequence[Role], by_pass: Sequence[Role]) -> tuple[Role, ...]:
        by_id: dict[int, Role] = {id(role): role for role in by_pass}
        last_first = [
            (view, role) for role in reversed(by_pass) for view in views_of(role).values()
        ]
        holders = {weight_key(view): role for view, role in last_first}
        for role in named:
            views = views_of(role)
            weights = [weight_key(view) for view in views.values()]
            rival = next(filter(None, map(holders.get, weights)), None)
            if rival is None and any((type(role), weight) in refused for weight in weights):
                continue
            if rival is None or not {view.parameter_name for view in views.values()} <= read:
                # a weight that enters in a form computed from several is known by name alone
                by_id.pop(id(rival), None)
                by_id[id(role)] = role
                reached = any(traced.reached(view.parameter) for view in views.values())
                (unconfirmed if reached else unseen).append(role.path)
                continue
            others = views_of(rival)
            differ = [
                f"{role.path}: {name} is {view.label} by name, {others[name].label} in the pass"
                for name, view in views.items()
                if name in others and view.key != others[name].key
            ]
            clashes.extend(differ)
            if not differ:
                # a module that sits in two places has the name that a reader would give it
                by_id.pop(id(rival), None)
                by_id[id(role)] = replace(rival, path=role.path, **views)

        return tuple(sorted(by_id.values(), key=lambda role: order[role.path]))

    attention = both(named.attention, traced.roles.attention)
    feedforward = both(named.feedforward, traced.roles.feedforward)
    notes = [
        f"{_KINDS[type(part)]} {part.path or class_name(model)}: refused. The pass shows"
        f" {', '.join(f'{n} {v.label}' for n, v in views_of(part).items())}, but {why}"
        for part, why in traced.refused
    ]
    if unseen:
        notes.append(f"not reached by this batch, found by name: {', '.join(unseen)}")
    if unconfirmed:
        notes.append(f"found by name; the pass does not show it: {', '.join(unconfirmed)}")
    if clashes:
        sure = "its check confirms" if not traced.unchecked else "nothing checked"
        notes.append(
            f"names say otherwise than the pass, which {sure} and which is taken: {'; '.join(clashes)}"
        )
    if traced.unchecked not in {"", "check=False"}:
        notes.append(f"the roles were not checked: {traced.unchecked}")
    combined = replace(traced.roles, attention=attention, feedforward=feedforward)
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


def _names_read(traced: Trace) -> set[str]:
    from wellposed.roles._record import Product

    return {product.view.parameter_name for product in traced.record.of_kind(Product)}
