"""``constrain_(to="logits")``: check the attention modules, then watch and scale them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wellposed.constrain._announce import announce, print_moves
from wellposed.constrain._optimizers import unwrapped_optimizers
from wellposed.constrain._options import LOGITS, check_length
from wellposed.constrain._refusals import check_values, check_weights, merge_tied
from wellposed.constrain._report import ConstraintReport
from wellposed.constrain._select import BY_HEAD, Where, roles_or_error, select_weights, unwrap_model
from wellposed.constrain._start import ConstrainedWeight
from wellposed.constrain._weight_slice import WeightSlice, has_empty_weights
from wellposed.constrain.logits._capped import CappedAttention
from wellposed.constrain.logits._handle import LogitConstraint
from wellposed.constrain.logits._rows import head_rows
from wellposed.constrain.logits._trial import tried_attention
from wellposed.errors import ConfigError, RoleNotFoundError, WellposedError, listed
from wellposed.interrupts import run_all
from wellposed.roles import AttentionRole, Roles

# The largest logit if the user gives none, as in Kimi Team 2025.
_LARGEST = 100.0


def constrain_logits(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    where: Where | None,
    *,
    bound: float | str | None,
    batch: Any,
    dry_run: bool,
) -> LogitConstraint:
    """Cap the attention logits of the chosen queries and keys; as `constrain_` otherwise."""
    check_length(bound)
    _check_not_compiled(model)
    model = unwrap_model(model, "constrain_")
    model_roles = roles_or_error(BY_HEAD, model, batch)
    chosen = select_weights(
        model,
        "query" if where is None else where,
        per="head",
        model_roles=model_roles,
        verb=BY_HEAD,
    )
    roles = _attention_of(model_roles, chosen)
    slices = merge_tied(model, [rows.weight_slice for role in roles for rows in head_rows(role)])
    owners = check_weights(slices, unwrapped_optimizers(optimizer), LOGITS)
    is_empty = dry_run and has_empty_weights(slices)
    if not is_empty:
        check_values(slices)

    owner_by_parameter = dict(zip((part.parameter for part in slices), owners, strict=True))
    largest = _LARGEST if bound is None else float(bound)
    modules = tried_attention(roles, model, owner_by_parameter, largest, batch)
    handle = LogitConstraint(model, modules)
    if not is_empty:
        handle.report = ConstraintReport(tuple(_row(module) for module in modules))
    return _begin(handle, dry_run=dry_run)


def _begin(handle: LogitConstraint, *, dry_run: bool) -> LogitConstraint:
    """Install the hooks, or print the modules; no weight moves before a step."""
    summary = handle.report.summary(LOGITS) if handle.report.rows else ""
    try:
        if dry_run:
            print_moves(summary, handle.report.moved)
        else:
            handle.attach()
            announce(handle, summary)
        return handle
    except BaseException:
        run_all(handle.detach)
        raise


def _row(module: CappedAttention) -> ConstrainedWeight:
    """Return the row of the report: before a pass nothing is known, and nothing moves."""
    return ConstrainedWeight(
        module.path,
        shape=module.slices[0].shape,
        size=module.bound,
        moved_frobenius=0.0,
        error_before=0.0,
        error_after=0.0,
    )


def _check_not_compiled(model: nn.Module) -> None:
    """Raise `ConfigError` for a compiled model, in which hooks do not see the logits."""
    kind = torch._dynamo.eval_frame.OptimizedModule
    for module in model.modules():
        if isinstance(module, kind) or getattr(module, "_compiled_call_impl", None):
            raise ConfigError(
                "constrain_: to='logits' uses hooks, which a compiled model does not run; leave"
                " torch.compile out, or use to='spectral'"
            )


def _attention_of(
    model_roles: Roles | WellposedError, chosen: Collection[WeightSlice]
) -> list[AttentionRole]:
    """Return the attention modules with a chosen query or key; raise if heads are not known."""
    if isinstance(model_roles, WellposedError):
        raise model_roles
    asked = {id(part.parameter) for part in chosen}
    roles = model_roles.attention
    roles = [r for r in roles if {id(r.query.parameter), id(r.key.parameter)} & asked]
    if not roles:
        raise RoleNotFoundError(
            "constrain_: to='logits' needs a query or key of attention, and none of these weights is"
            f" one; leave where= out for all queries:\n{listed([part.label for part in chosen])}"
        )

    with_rows = [
        r
        for r in roles
        if {"query", "key"} <= {*r.heads} and "query" not in dict(r.extra_projections)
    ]
    unknown = [role.path for role in roles if role not in with_rows]
    if unknown:
        raise ConfigError(
            "constrain_: to='logits' scales rows by head, and the rows of these heads are unknown, or"
            f" several weights make a query:\n{listed(unknown)}"
        )

    return roles
