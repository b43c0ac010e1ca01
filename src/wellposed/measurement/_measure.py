"""Measure every weight that plays a role, and on a batch what flows through the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from wellposed.call_checks import known_keywords
from wellposed.measurement._condition import StackedCondition
from wellposed.measurement._measurement import Measurement
from wellposed.measurement._stacks import transferred
from wellposed.roles import Roles, RoleWeight, find_roles


@known_keywords
def measure(
    model: nn.Module, batch: Any = None, *, spectra: bool = True, roles: Roles | None = None
) -> Measurement:
    """Return how far every weight with a role is from orthogonal, its singular values, their ratio
    and stable rank.

    ``min_s |G / s - I|_F / sqrt(n)`` and ``max_{i != j} |G_ij|`` with G of n rows the smaller of
    ``W W^T`` and ``W^T W`` (the larger cannot be near the identity), ``sigma_max``, ``sigma_min``,
    ``sigma_max / sigma_min`` and ``|W|_F^2 / |W|_2^2``. The first does not change when W is
    multiplied by a number; the second does, by its square.

    Status: with ``spectra`` exact: every singular value is within ``singular_value_error`` of the
    true one. They are roots of the eigenvalues of G in float64; if their errors could change a digit
    that `table` prints, all of that weight are found anew by a float64 SVD.
    Without, ``sigma_max`` and the stable rank are empirical (Lanczos to
    1e-3, from below), and ``sigma_min`` and the condition number are ``None``. Both errors are
    exact to float32 rounding. Sources: McGrath (2024, eq. 3) for ``max
    |G_ij|``; Rudelson and Vershynin (2007) for the stable rank. On a batch: mean and largest 2-norm
    of the token vectors behind every layer, attention
    and feed-forward module, and per head the mean entropy (nats) of the attention rows, their mean
    sensitivity ``p1 (1 - p1 + p2)`` and the orthogonality error of the affinity A (McGrath, 2024,
    sec. 4.3): the largest ``|(A A^T)_ij|`` over queries i != j, mean of the batch. Padded tokens
    are left out where the batch holds a mask.

    The model runs in evaluation mode without gradients and is left as it was: training flags,
    gradients, hooks and random state.

    Args:
        model: any model in which `find_roles` finds weights.
        batch: what the model is called with: a tensor, a tuple of arguments, or a mapping of
            keywords such as ``{"input_ids": ..., "attention_mask": ...}``; ``None`` measures
            weights alone. Roles come from it, too.
        spectra: keep all singular values of every weight.
        roles: those of an earlier `find_roles` of this model, which saves finding them again.

    Returns:
        `Measurement`; see there for the entries of a row. Matrices that play no role are listed in
        its notes.

    Raises:
        RoleNotFoundError: no attention or feed-forward weight is recognised.
        ConvergenceError: weights hold NaN or infinity; all are named.
        ConfigError: no module, a quantised weight, or a batch that the model cannot be called with.

    Cost: with ``spectra`` the eigenvalues of one float64 Gram matrix per weight, a third of an SVD,
    without about a tenth of it. Weights of one Gram size are worked on at once, and a device is
    read once. The batch costs
    one forward pass, the N x N attention weights of one layer at a time, and 2 N^3 FLOPs per
    example and head for ``A A^T``. When not
    to use: inside every training step; see `Monitor`.

    >>> import torch
    >>> m = measure(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(2, 5, 16))
    >>> [row["role"] for row in m.rows]
    ['query', 'key', 'value', 'output', 'feedforward_in', 'feedforward_out']
    >>> [row["kind"] for row in m.activations]
    ['attention', 'layer']
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model keeps the original here
    roles = roles or find_roles(model, batch)
    weights = list(roles.weights())
    condition = StackedCondition(weights, spectra=spectra)
    numbers = condition.rows(transferred(condition.measured()))
    rows = [{**identity(weight), **row} for weight, row in zip(weights, numbers, strict=True)]
    activations, notes = [], []
    if batch is not None:
        from wellposed.measurement._activations import measure_activations

        activations, notes = measure_activations(model, roles, batch)
    if roles.unnamed:
        few = "1 matrix plays" if len(roles.unnamed) == 1 else f"{len(roles.unnamed)} matrices play"
        notes.append(f"{few} no role and no number here is theirs: {', '.join(roles.unnamed)}")
    return Measurement(rows=rows, activations=activations, notes=[*roles.notes, *notes])


def identity(weight: RoleWeight) -> dict[str, Any]:
    """Return the entries of a row that say whose it is, and its shape."""
    name, entry = weight.view.parameter_name, weight.view.entry
    return {
        **{each: getattr(weight, each) for each in ("stack", "layer", "role", "kind", "path")},
        "parameter": name if entry is None else f"{name}[{entry}]",
        **dict(zip(("rows", "cols"), weight.view.shape, strict=True)),
    }
