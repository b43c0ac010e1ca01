"""Measure every weight that plays a role, and on a batch what flows through the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from wellposed.call_checks import known_keywords
from wellposed.measurement._condition import StackedCondition
from wellposed.measurement._measurement import Measurement
from wellposed.measurement._stacks import transferred
from wellposed.roles import Roles, RoleWeight, Verb, current_roles, find_roles_for
from wellposed.zero_weights import check_whole

_MEASURE = Verb(
    "measure",
    "measure(model, batch)",
    "measure(model, roles=find_roles(model, where={'query': PATTERN, 'key': PATTERN, ...}))",
)


@known_keywords
def measure(
    model: nn.Module, batch: Any = None, *, spectra: bool = True, roles: Roles | None = None
) -> Measurement:
    """Measure the orthogonality errors, singular values and stable rank of every weight with a
    role.

    A batch adds the 2-norms of token vectors and three numbers of each attention head.
    `Measurement` defines every number.

    Status: with ``spectra`` exact: every singular value is within ``singular_value_error`` of the
    true one. They are roots of float64 eigenvalues of the Gram matrix, or come from a float64 SVD
    if their error could change a digit that `table` prints. Without, ``sigma_max`` and the stable
    rank are empirical (Lanczos to 1e-3, from below), ``sigma_min`` and the condition number are
    ``None``. Both orthogonality errors are exact to float32 rounding.
    Source: McGrath (2024, eq. 3, sec. 4.3) for ``max |G_ij|`` and affinities; Rudelson and
    Vershynin (2007) for the stable rank.

    The model runs in evaluation mode without gradients. Its training flags, gradients, hooks and
    random state are restored. Padded tokens are left out if the batch has a mask.

    Args:
        model: any model in which `find_roles` finds weights.
        batch: a tensor, a tuple of arguments, or a mapping of keywords such as
            ``{"input_ids": ..., "attention_mask": ...}``, also used to find roles. ``None``
            measures weights alone.
        spectra: keep all singular values of every weight.
        roles: the result of an earlier `find_roles` of this model, to save finding them again.

    Returns:
        `Measurement`. Its notes list the matrices without a role, and the layers that compute
        something else than their weight (a hook, a replaced ``forward``, a wrapper).

    Raises:
        RoleNotFoundError: no attention or feed-forward weight is recognised.
        ConvergenceError: weights hold NaN or infinity; all are named.
        ConfigError: no module, a quantised weight, or a batch that the model cannot be called with.

    Cost: with ``spectra`` the eigenvalues of one float64 Gram matrix a weight, a third of an SVD;
    without, about a tenth of it. A device is read once. A batch costs one forward pass, the N x N
    attention weights of one layer at a time, and 2 N^3 FLOPs per example and head.
    When not to use: inside every training step; use `Monitor`.

    >>> import torch
    >>> m = measure(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(2, 5, 16))
    >>> [row["role"] for row in m.rows]
    ['query', 'key', 'value', 'output', 'feedforward_in', 'feedforward_out']
    >>> [row["kind"] for row in m.activations]
    ['attention', 'layer']
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model keeps the original here
    check_whole("measure", model)
    roles = find_roles_for(_MEASURE, model, batch) if roles is None else current_roles(model, roles)
    weights = list(roles.weights())
    condition = StackedCondition(weights, spectra=spectra)
    numbers = condition.rows(transferred(condition.measured()))
    rows = [{**identity(weight), **row} for weight, row in zip(weights, numbers, strict=True)]
    activations = []
    notes = []
    if batch is not None:
        from wellposed.measurement._activations import measure_activations

        activations, notes = measure_activations(model, roles, batch)
    if roles.unnamed:
        few = "1 matrix plays" if len(roles.unnamed) == 1 else f"{len(roles.unnamed)} matrices play"
        notes.append(f"{few} no role and no number here is theirs: {', '.join(roles.unnamed)}")
    return Measurement(rows=rows, activations=activations, notes=[*roles.notes, *notes])


def identity(weight: RoleWeight) -> dict[str, Any]:
    """Return the columns of a row that name a weight, and its shape."""
    name = weight.view.parameter_name
    entry = weight.view.expert
    return {
        **{key: getattr(weight, key) for key in ("stack", "layer", "role", "kind", "path")},
        "parameter": name if entry is None else f"{name}[{entry}]",
        **dict(zip(("rows", "cols"), weight.view.shape, strict=True)),
    }
