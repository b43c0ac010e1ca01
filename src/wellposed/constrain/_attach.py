"""`constrain_`: check everything, move weights to the nearest of their set, install the hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from wellposed.call_checks import checked_arguments
from wellposed.constrain._announce import announce, print_moves, summarized
from wellposed.constrain._handle import Constraint
from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._optimizers import unwrapped_optimizers
from wellposed.constrain._options import LOGITS, Set, SetOptions, refuse_options
from wellposed.constrain._plan import planned
from wellposed.constrain._refusals import check_values, check_weights, merge_tied
from wellposed.constrain._report import ConstraintReport
from wellposed.constrain._select import (
    BY_HEAD,
    CONSTRAIN,
    Where,
    roles_or_error,
    select_weights,
    unwrap_model,
)
from wellposed.constrain._set import SETS, MatrixSet
from wellposed.constrain._start import start_weights
from wellposed.constrain._steps import MatrixConstraint
from wellposed.constrain._weight_slice import WeightSlice, has_empty_weights
from wellposed.constrain.logits import constrain_logits
from wellposed.errors import unknown_name
from wellposed.interrupts import run_all
from wellposed.options import Positive
from wellposed.removed_names import removed_keywords
from wellposed.roles import is_table, is_transposed


@removed_keywords(roles="where")
@checked_arguments
def constrain_(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    where: Where | None = None,
    *,
    to: Set = "orthogonal",
    per: Literal["head"] | None = None,
    batch: Any = None,
    bound: Positive | str | None = None,
    gain: Positive | Literal["fit"] | None = None,
    embeddings: Literal["refuse", "fit"] = "refuse",
    batched: bool | None = None,
    dry_run: bool = False,
) -> Constraint:
    """Keep the chosen weights in a set through every ``optimizer.step()``.

    Status: by set.
    - ``"orthogonal"``: ``W^T W = gain^2 I`` (``W W^T`` if wide), to tolerance: the largest entry of
      ``|W^T W / gain^2 - I|`` is at most 1e-5 in float32 (measured: singular values within
      1e-4 at width 256), 1e-11 in float64, and as stored 8e-3 in bfloat16, 1e-3 in float16.
    - ``"spectral"``: ``|W|_2 <= bound``, or ``X sqrt(fan_out / fan_in)`` for ``bound="rms:X"``.
      Certified as stored, in every dtype.
    - ``"columns"``: ``|W e_j| = bound`` for columns of W (out, in) and embedding vectors, up to
      rounding. Nothing is claimed of ``|W|_2``.
    - ``"spectral_soft"``, ``"spectral_hammer"``, ``"spectral_sphere"``, ``"rows"``, ``"hypersphere"``: as
      their classes in `SETS` say; the hammer promises nothing (docs/howto/orthogonal.md).
    - ``"logits"``: attention logits at most ``bound``, by QK-clip. Exact for the batch that was
      seen with the weights before the step, empirical for others (docs/howto/logits.md).
    Source: Absil et al. 2008, Edelman et al. 1998; Yang et al. 2023 (rms); Kimi Team 2025 (logits).
    Details: docs/theory/steps.md.

    Weights stay plain parameters; hooks retract them after each step. Attaching moves each to the
    nearest in its set. Orthogonal and column weights do not decay. A weight edited between steps is
    back in its set after its next step with a gradient.

    Args:
        model: Any module. With FSDP2 or tensor parallelism, call after sharding.
        optimizer: The optimizer of the weights, or several; wrappers (Accelerate) are unwrapped.
        where: Roles of `find_roles`, such as ``("query", "key")``; names, fnmatch patterns or
            ``"re:"`` patterns of modules, else of parameters; or module types. Parts of fused
            weights, and experts, are separate. The default of ``"spectral"``, ``"layers"``, is all
            matrices of attention and feed-forward; that of ``"logits"``, all queries.
        to: The set.
        per: ``"head"``: each head alone; needed if roles interleave (GPT-NeoX, Bloom, Falcon).
        batch: Model input for `find_roles` and logits, if the model's config does not describe it.
        bound: Largest singular value or logit (default 100, others 1), or length; above 0.
        gain: Singular value of orthogonal weights, or ``"fit"``: each weight's mean singular value.
            The default is ``"fit"`` for pretrained Hugging Face models, else 1.
        embeddings: Refuse (``"refuse"``) those with more vectors than dimensions, or ``"fit"``:
            Each is orthogonal on its smaller side, with its mean singular value as gain.
        batched: Use one product for all weights of one shape. None: not for large ones on a CPU.
        dry_run: Print the moves and the plan of a step (`wellposed.plan.Plan`); change nothing.

    Returns:
        `Constraint` with ``.report`` (how far weights moved), ``.error()`` and ``.remove()``.

    Raises:
        RoleNotFoundError: ``where`` matches nothing.
        ShapeError: No matrix or stack of experts, or an embedding of more vectors than dimensions.
        ConfigError: A weight, optimizer or option that cannot be used. From ``optimizer.step``: a
            weight was replaced, or an orthogonal one changed its dtype.
        ConvergenceError: A weight, or later a step, is not finite.

    Cost: a step adds 3 to 6 products of its size for a square orthogonal weight, and keeps a copy
    of it; 2 to 6, at most 35, for a spectral one. (A matmul, forward and backward, is 3.)
    When not to use: if a weight must shrink or grow freely (use `wellposed.OrthogonalityPenalty`),
    or the optimizer keeps its own copy of the weights (DeepSpeed ZeRO, schedule-free and
    Lookahead are refused).

    >>> import torch
    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> handle = constrain_(model, optimizer, where="weight")
    >>> model(torch.randn(4, 8)).square().sum().backward()
    >>> optimizer.step()
    >>> handle.error().worst < 1e-5
    True
    """
    options = SetOptions(bound=bound, gain=gain, embeddings=embeddings)
    if to == LOGITS:
        others = {"per": per, "batched": batched}
        foreign = [name for name in options.changed() if name != "bound"]
        foreign += [name for name, value in others.items() if value]
        refuse_options(to, foreign)
        return constrain_logits(model, optimizer, where, bound=bound, batch=batch, dry_run=dry_run)

    matrix_set = _set_for(to, options)
    is_default = where is None and matrix_set.default_where is not None
    where = matrix_set.default_where if where is None else where
    model = unwrap_model(model, "constrain_")
    options = replace(options, is_pretrained=_is_pretrained(model))
    tables = {id(module.weight): module for module in model.modules() if is_table(module)}

    verb = CONSTRAIN if per is None else BY_HEAD
    model_roles = roles_or_error(verb, model, batch)
    selected = select_weights(model, where, per=per, model_roles=model_roles, verb=verb)
    if matrix_set.reads_orientation(options):
        selected = [_oriented(weight_slice, tables) for weight_slice in selected]
    slices = merge_tied(model, selected)

    def refusal(weight_slice: WeightSlice) -> str | None:
        is_of_table = id(weight_slice.parameter) in tables
        return matrix_set.refusal(weight_slice, options, is_table=is_of_table)

    owners = check_weights(slices, unwrapped_optimizers(optimizer), to, refusal)
    is_empty = dry_run and has_empty_weights(slices)
    if not is_empty:
        check_values(slices, lambda zeros: matrix_set.refusal_of_zeros(zeros, options))

    weights: list[ConstrainedMatrix] = []
    for weight_slice, owner in zip(slices, owners, strict=True):
        is_of_table = id(weight_slice.parameter) in tables
        chosen = matrix_set.chosen(weight_slice, options, is_table=is_of_table)
        weights.append(ConstrainedMatrix(weight_slice, owner, chosen))
    handle = MatrixConstraint(model, weights, batched=batched)
    handle.check_decay(owners)
    return _begin(handle, to, model, is_default=is_default, is_empty=is_empty, dry_run=dry_run)


def _begin(
    handle: MatrixConstraint,
    to: Set,
    model: nn.Module,
    *,
    is_default: bool,
    is_empty: bool,
    dry_run: bool,
) -> Constraint:
    """Move the weights into their sets, install the hooks, return the handle: all, or nothing."""
    undos: list[Callable[[], None]] = []
    try:
        if not is_empty:
            rows = start_weights(handle.weights, dry_run=dry_run, undos=undos)
            handle.report = ConstraintReport(rows)
        summary = summarized(handle, to, model if is_default else None)
        if dry_run:
            print_moves(summary, handle.report.moved)
            handle.plan = planned(model, handle.weights, to).show()
        else:
            handle.attach()
            announce(handle, summary)
        return handle
    except BaseException:
        run_all(handle.detach, *undos)
        raise


def _set_for(to: Set, options: SetOptions) -> type[MatrixSet]:
    """Return the kind of set; refuse unknown ones, and options of others."""
    if to not in SETS:
        raise unknown_name(SETS.kind, to, [*SETS, LOGITS])
    matrix_set = SETS.get(to)
    refuse_options(to, [name for name in options.changed() if name not in matrix_set.options])
    if "bound" in matrix_set.options:
        matrix_set.check_bound(options.bound)
    return matrix_set


def _is_pretrained(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "_name_or_path", ""))


def _oriented(part: WeightSlice, tables: Mapping[int, nn.Embedding]) -> WeightSlice:
    """Orient a whole weight as (out, in), for sets that tell rows from columns."""
    if part.part:
        return part
    table = tables.get(id(part.parameter))
    padding = None if table is None else table.padding_idx
    flipped = table is not None or is_transposed(part.module)
    return replace(part, transposed=flipped, padding=padding)
