"""Forms of a penalty: how a distance from orthogonality becomes a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from torch import Tensor

from wellposed.errors import ConfigError, unknown_name
from wellposed.penalize._affinity_form import AFFINITY, JASMIN
from wellposed.penalize._roles import PENALISED_ROLES
from wellposed.registry import Registry

_OURS = ("paper", "gram_squared", "gram", "qr")
Form: TypeAlias = Literal["paper", "gram_squared", "gram", "qr"] | str
FORMS: Registry[Callable[[Tensor], Tensor]] = Registry(
    "form", entry_points="wellposed.penalties", taken=_OURS
)
"""Registered forms: ``form(weight) -> scalar`` with gradient, of a matrix (out, in)."""


def chosen_forms(form: Form | Mapping[str, Form], strengths: Sequence[str]) -> dict[str, str]:
    """Return the form of each strength: as asked for, or that of its paper."""
    if not isinstance(form, (str, Mapping)):
        raise ConfigError(f"form = {form!r}, expected a form or a mapping from strength to form")
    asked = dict.fromkeys(strengths, form) if isinstance(form, str) else {**form}
    asked.pop(AFFINITY, None)  # see `affinity_form`
    names = (*_OURS, *FORMS)
    for strength, name in asked.items():
        if name == JASMIN:
            raise ConfigError(
                f"form {name!r} is one of affinity, and {strength} is penalised too; pass"
                f" form={{'affinity': {name!r}}}"
            )
        if name not in names:
            raise unknown_name("form", str(name), names)
        if strength not in PENALISED_ROLES:
            raise unknown_name("strength in form", strength, PENALISED_ROLES)

    chosen = {name: asked.get(name, "paper") for name in strengths}
    return {
        name: PENALISED_ROLES.get(name).paper_form if form == "paper" else form
        for name, form in chosen.items()
    }
