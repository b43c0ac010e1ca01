"""Measure every weight that plays a role, and on a batch what flows through the model."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed import linalg
from wellposed.call_checks import known_keywords
from wellposed.errors import ConfigError, ConvergenceError, listed
from wellposed.functional import OrthogonalityErrors, errors_of_gram, orthogonality_errors
from wellposed.linalg import is_sharded, read
from wellposed.measurement._measurement import DIAGNOSTICS, Measurement
from wellposed.roles import Roles, RoleWeight, find_roles
from wellposed.text_table import format_number

_READING = threading.Lock()
"""A weight that is computed is read in evaluation mode, one at a time."""


@known_keywords
def measure(
    model: nn.Module, batch: Any = None, *, spectra: bool = True, roles: Roles | None = None
) -> Measurement:
    """Return how far every weight with a role is from orthogonal, its singular values, their ratio
    and stable rank.

    ``min_s |G / s - I|_F / sqrt(n)`` and ``max_{i != j} |G_ij|`` with G of n rows the smaller of
    ``W W^T`` and ``W^T W`` (the larger cannot be near the identity; ``gram`` in each row says
    which: ``"rows"`` or ``"columns"``), ``sigma_max``, ``sigma_min``, ``sigma_max / sigma_min`` and
    ``|W|_F^2 / |W|_2^2``. The first does not change when W is multiplied by a number; the second
    does, by its square.

    Status: with ``spectra`` exact: every singular value is within ``singular_value_error`` of the
    true one (`wellposed.linalg.spectrum`), and where that could change a digit that `table` prints,
    all are found anew by a float64 SVD;
    without, ``sigma_max`` and the stable rank are empirical (Lanczos to
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
    without about a tenth of it; the batch costs
    one forward pass, the N x N attention weights of one layer at a time, and 2 N^3 FLOPs per
    example and head for ``A A^T``. When not
    to use: inside every training step; see `Monitor`.

    >>> m = measure(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(2, 5, 16))
    >>> [row["role"] for row in m.rows]
    ['query', 'key', 'value', 'output', 'feedforward_in', 'feedforward_out']
    >>> [row["kind"] for row in m.activations]
    ['attention', 'layer']
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model keeps the original here
    roles = roles or find_roles(model, batch)
    weights = list(roles.weights())
    check_measurable(weights)
    rows = weight_rows(weights, spectra=spectra)
    activations, notes = [], []
    if batch is not None:
        from wellposed.measurement._activations import measure_activations

        activations, notes = measure_activations(model, roles, batch)
    if roles.unnamed:
        few = "1 matrix plays" if len(roles.unnamed) == 1 else f"{len(roles.unnamed)} matrices play"
        notes.append(f"{few} no role and no number here is theirs: {', '.join(roles.unnamed)}")
    return Measurement(rows=rows, activations=activations, notes=[*roles.notes, *notes])


def check_measurable(weights: Sequence[RoleWeight]) -> None:
    """Raise for weights that are quantised or not finite, all of them in one message."""
    check_stored(weights)
    with torch.no_grad():
        check_finite(weights, [_is_finite(each.view.tensor()) for each in weights])


def check_stored(weights: Sequence[RoleWeight]) -> None:
    """Raise for weights that are quantised."""
    stored = {weight.view.parameter_name: weight.view.parameter for weight in weights}
    quantised = [f"{n}: {each.dtype}" for n, each in stored.items() if not each.is_floating_point()]
    if quantised:
        problem = "these weights are quantised; measure the model before quantisation"
        raise ConfigError(f"{problem}:\n{listed(quantised)}")


def check_finite(weights: Sequence[RoleWeight], finite: Sequence[bool]) -> None:
    """Raise for weights that are not finite."""
    pairs = zip(weights, finite, strict=True)
    broken = list(dict.fromkeys(each.view.parameter_name for each, fine in pairs if not fine))
    if broken:
        problem = "these weights hold NaN or infinity and cannot be measured"
        raise ConvergenceError(f"{problem}:\n{listed(broken)}")


def _is_finite(parameter: Tensor) -> bool:
    # One finite sum proves all entries finite, at a fraction of the cost of looking at each.
    total = parameter.detach().sum(dtype=torch.promote_types(parameter.dtype, torch.float32))
    return bool(torch.isfinite(total)) or bool(torch.isfinite(parameter).all())


def weight_rows(weights: Sequence[RoleWeight], *, spectra: bool) -> list[dict[str, Any]]:
    """Return the numbers of each weight; on a CPU several at a time, one a thread.

    A matrix of some hundred columns gains little from several threads.
    """
    row = partial(_row, spectra=spectra)
    parameters = [weight.view.parameter for weight in weights]
    if not spectra or any(each.device.type != "cpu" or is_sharded(each) for each in parameters):
        return [row(weight) for weight in weights]
    threads = torch.get_num_threads()
    # Each with one thread of torch's own, the largest first, so that none is waited for at the end.
    one = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    order = sorted(range(len(weights)), key=lambda i: -parameters[i].numel())
    try:
        with one as pool:
            found = dict(zip(order, pool.map(row, [weights[i] for i in order]), strict=True))
    finally:
        torch.set_num_threads(threads)  # what was set in a thread holds for later ones, too
    return [found[i] for i in range(len(weights))]


def identity(weight: RoleWeight) -> dict[str, Any]:
    """Return the entries of a row that say whose it is."""
    name, entry = weight.view.parameter_name, weight.view.entry
    return {
        **{each: getattr(weight, each) for each in ("stack", "layer", "role", "kind", "path")},
        "parameter": name if entry is None else f"{name}[{entry}]",
    }


@torch.no_grad()
def _row(weight: RoleWeight, *, spectra: bool) -> dict[str, Any]:
    with _READING:
        matrix = read(weight.view.tensor())
    rows, cols = matrix.shape
    errors, values = _exact(matrix) if spectra else _quick(matrix)
    free = errors.scale_free.item()
    return {
        **identity(weight),
        "rows": rows,
        "cols": cols,
        "scale_free_orthogonality_error": None if math.isnan(free) else free,
        "orthogonality_error": errors.raw.item(),
        "gram": "rows" if rows <= cols else "columns",
        **values,
        **diagnosed(matrix),
    }


@torch.no_grad()
def diagnosed(weight: Tensor) -> dict[str, float]:
    """Return the numbers of `DIAGNOSTICS`."""
    return {each: float(DIAGNOSTICS.get(each)(read(weight))) for each in DIAGNOSTICS}


def _exact(matrix: Tensor) -> tuple[OrthogonalityErrors, dict[str, Any]]:
    found = linalg.spectrum(matrix)
    errors_of = errors_of_gram([found.gram])
    values, errors, _ = found
    if not _as_printed(found):
        values = linalg.singular_values(matrix)
        errors = values[:1] * len(values) * torch.finfo(values.dtype).eps
    names = ("sigma_max", "sigma_min", "condition_number", "stable_rank")
    return errors_of, {
        **dict(zip(names, _numbers(values, values), strict=True)),
        "sigma_max_status": "exact",
        "singular_value_error": errors.max().item(),
        "singular_values": values.tolist(),
    }


def _as_printed(found: linalg.Spectrum) -> bool:
    """Whether the errors change no digit that `table` prints."""
    below, above = found.values - found.errors, found.values + found.errors
    pairs = zip(_numbers(below, above), _numbers(above, below), strict=True)
    return all(format_number(a) == format_number(b) for a, b in pairs)


def _numbers(tops: Tensor, bottoms: Tensor) -> list[float | None]:
    """Return the largest, the smallest, their ratio and the stable rank."""
    largest, smallest = tops[0].item(), max(0.0, bottoms[-1].item())
    ratio = largest / smallest if smallest > 0 else math.inf
    rank = (bottoms / largest).square().sum().item() if largest > 0 else None
    return [largest, smallest, ratio, rank]


def _quick(matrix: Tensor) -> tuple[OrthogonalityErrors, dict[str, Any]]:
    largest = linalg.largest_singular_value(matrix)
    wide = torch.promote_types(matrix.dtype, torch.float32)
    frobenius = torch.linalg.vector_norm(matrix, dtype=wide).item()
    return orthogonality_errors(matrix if len(matrix) <= matrix.shape[1] else matrix.mT), {
        "sigma_max": largest,
        "sigma_min": None,
        "condition_number": None,
        "stable_rank": (frobenius / largest) ** 2 if largest > 0 else None,
        "sigma_max_status": "empirical",
    }
