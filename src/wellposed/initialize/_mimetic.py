"""Mimetic initialisation: products of attention weights near a multiple of the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, RoleNotFoundError, listed
from wellposed.initialize._draw import carry_out
from wellposed.initialize._plan import Step, check_not_sharded, check_writable
from wellposed.initialize._report import InitializationReport, reported
from wellposed.interrupts import undoing
from wellposed.model_checks import require_module
from wellposed.options import fits
from wellposed.roles import AttentionRole, Verb, batch_advice, find_roles_for, heads_advice

MIMETIC = Verb("mimetic_", "mimetic_(model, batch=batch)", "")


@checked_arguments
@torch.no_grad()
def mimetic_(
    model: nn.Module,
    *,
    query_key: tuple[float, float] = (0.7, 0.7),
    value_output: tuple[float, float] = (0.4, 0.4),
    batch: Any = None,
) -> InitializationReport:
    """Draw self-attention with ``W_q^T W_k ~ a Z + b I`` for each head, and ``W_o W_v ~ a Z - b I``.

    Z has entries N(0, 1/d), and weights are the halves of a singular value decomposition of the right
    side: ``W_q = S^(1/2) U^T``, ``W_k = S^(1/2) V^T``. They have the k largest singular values, k the
    width of a head. So tokens begin by attending to tokens like them.

    Status: exact in distribution; the products are the nearest of their rank (Eckart and Young). That
    it helps training is empirical, mostly for small data.
    Source: Trockman and Kolter 2023 (arXiv 2305.09828), section 4. With grouped keys (ours): the key
    is that of the group's first head, and each query is the least-squares solution for it.

    Args:
        model: any Transformer that `find_roles` knows. Biases, feed-forward networks, embeddings,
            norms and cross-attention stay.
        query_key: (a, b) of queries and keys.
        value_output: (a, b) of values and outputs.
        batch: as in `find_roles`.

    Returns:
        The report; ``print`` it. `torch.manual_seed` repeats a draw.

    Raises:
        RoleNotFoundError: no self-attention with known heads. Nothing is changed.
        ConfigError: one weight for query and key (tied L2 attention), a width of the output that is
            not that of the values, frozen, parametrised or sharded weights, or not two finite
            numbers. Nothing is changed.

    After an exception or a signal the model is as before.
    Cost: a decomposition of d x d for each head, in float64. When not to use: pretrained weights, which
    it overwrites (a warning says by how much).

    >>> report = mimetic_(nn.TransformerEncoderLayer(16, 2, 32))
    >>> [row.role for row in report.rows]
    ['query', 'key', 'value', 'output']
    """
    require_module("mimetic_", model)
    _check_pairs(query_key=query_key, value_output=value_output)
    roles = find_roles_for(MIMETIC, model, batch)
    check_not_sharded(model)
    attention = [role for role in roles.attention if role.kind == "self"]
    headless = [role.path for role in attention if not role.heads]
    if headless or not attention:
        where = f":\n{listed(headless)}" if headless else ""
        raise RoleNotFoundError(
            f"mimetic_: {type(model).__name__} has no self-attention with known heads{where}\n"
            f"{heads_advice(MIMETIC, roles) if headless else batch_advice(MIMETIC, model, roles)}"
        )

    _check(attention)
    steps = [step for role in attention for step in _steps(role, query_key, value_output)]
    check_writable(steps)
    with undoing() as undo:
        rows = carry_out(steps, undo)
        undo.forget()
    title = f"Mimetic initialisation of {type(model).__name__}"
    return reported(InitializationReport(title=title, rows=tuple(rows)))


def _check_pairs(**pairs: Any) -> None:
    for name, pair in pairs.items():
        is_pair = isinstance(pair, Sequence) and len(pair) == 2
        if not is_pair or not all(fits(number, float) for number in pair):
            raise ConfigError(
                f"mimetic_: {name} = {pair!r}, expected two finite numbers (a, b), of the noise and of"
                " the identity"
            )


def _check(attention: Sequence[AttentionRole]) -> None:
    tied = [role.path for role in attention if role.query.key == role.key.key]
    if tied:
        raise ConfigError(
            "mimetic_: query and key are one weight, whose product is symmetric and has no part -b I;"
            f" use dot-product attention, or leave the initialisation as it is:\n{listed(tied)}"
        )

    odd = [
        f"{role.path}: values {role.value.shape}, output {role.output.shape}, {role.num_heads} heads"
        for role in attention
        if role.output.shape != (role.value.shape[1], role.num_heads * _value_width(role))
        or role.query.shape[1] != role.key.shape[1]
    ]
    if odd:
        raise ConfigError(
            "mimetic_: the output reads other numbers than the values of all heads, or queries other"
            f" tokens than keys, so that W_o W_v is no map of a token:\n{listed(odd)}"
        )


def _value_width(role: AttentionRole) -> int:
    return role.value.shape[0] // role.num_key_value_heads


def _target(width: int, noise: float, identity: float) -> Tensor:
    """Return ``noise Z + identity I`` in float64."""
    drawn = torch.randn(width, width, dtype=torch.float64) / width**0.5
    return noise * drawn + identity * torch.eye(width, dtype=torch.float64)


def _halves(target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return L and R with ``L^T R`` the nearest matrix of this rank; zero rows if the rank is above."""
    left, values, right = torch.linalg.svd(target)
    root = values[:rank].sqrt()[:, None]
    halves = [root * left.mT[:rank], root * right[:rank]]
    missing = rank - len(root)
    return tuple(nn.functional.pad(half, (0, 0, 0, missing)) for half in halves)  # pyright: ignore[reportReturnType]


def _steps(
    role: AttentionRole, query_key: tuple[float, float], value_output: tuple[float, float]
) -> list[Step]:
    width = role.query.shape[1]
    group = role.num_heads // role.num_key_value_heads
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    for _ in range(role.num_key_value_heads):
        target = _target(width, *query_key)
        query, key = _halves(target, role.head_dim)
        keys.append(key)
        queries.append(query)
        # For the key that is there, the least squares of |Q^T K - T|.
        targets = [_target(width, *query_key) for _ in range(group - 1)]
        queries += [torch.linalg.lstsq(key.mT, other.mT).solution for other in targets]

    noise, identity = value_output
    values, outputs = _halves(_target(width, noise, -identity).mT, role.value.shape[0])
    blocks = outputs.mT.chunk(role.num_key_value_heads, -1)
    # The heads of a group read one value, and share its output.
    output = torch.cat([block / group for block in blocks for _ in range(group)], -1)
    return [
        *_written(role, "query", queries),
        *_written(role, "key", keys),
        *_written(role, "value", values.chunk(role.num_key_value_heads)),
        Step("output", role.stack, role.layer, role.output, "given", values=output),
    ]


def _written(role: AttentionRole, name: str, heads: Sequence[Tensor]) -> list[Step]:
    """Return a step for the rows of all heads, or one for each if other rows lie between them."""
    view = getattr(role, name)
    if view.spans is not None and len(view.spans) > 1:
        return [
            Step(name, role.stack, role.layer, part, "given", values=values)
            for part, values in zip(role.by_head(name), heads, strict=True)
        ]
    first = view.spans[0][0] if view.spans else 0
    rows = torch.empty(view.shape, dtype=torch.float64)
    for spans, values in zip(role.heads[name], heads, strict=True):
        places = [row - first for start, stop in spans for row in range(start, stop)]
        rows[places] = values
    return [Step(name, role.stack, role.layer, view, "given", values=rows)]
