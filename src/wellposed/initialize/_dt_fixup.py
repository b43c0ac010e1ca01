"""DT-Fixup: initial weights of new layers on top of a pretrained encoder, from the size of what it
gives them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, DataError, listed
from wellposed.initialize._factors import dt_fixup_factor
from wellposed.initialize._layer_stacks import LayerStack, find_layer_stacks
from wellposed.initialize._norms import check_norms, patterns_of, remove_norms_
from wellposed.initialize._plan import Step, check_steps, head_steps, layer_steps, leave_alone
from wellposed.initialize._report import DTFixupReport
from wellposed.initialize._token_norms import hooks, token_norms
from wellposed.initialize._write import largest_bias, write, zero_biases_
from wellposed.roles import Roles, find_roles
from wellposed.watch import call_model, quiet_run, real_tokens


def dt_fixup_(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: str | None = None,
    mu: Literal["max", "quantile"] = "max",
    quantile: float = 0.99,
    max_batches: int | None = None,
    zero_biases: bool = False,
    keep: str | Sequence[str] = (),
    leave: str | Sequence[str] = (),
    patterns: Mapping[str, str | Sequence[str]] | None = None,
    seed: int | None = None,
    dry_run: bool = False,
) -> DTFixupReport:
    """Set value, output and feed-forward weights of N new layers to Xavier / sqrt(N (4 mu^2 + 2 mu
    + 2)).

    Exact in distribution, given mu; that one training step then moves the output by order lr is the
    first-order argument of Xu et al. (2021), "Optimizing Deeper Transformers on Small Datasets",
    section 3. mu is the largest Euclidean norm of a token that enters the new layers, measured here
    in one pass over ``loader`` without gradients. LayerNorms of the new layers are replaced by
    `x -> x`; nothing outside them changes. Query and key of the new layers are drawn without the
    factor (the paper: Xavier for all that is not pretrained), biases left alone, bit for bit.
    Xavier normal, as in the paper's code.

    Idempotent: what enters the new layers does not depend on them, and the draw is seeded, so that
    a second call writes the same bits. For an ensemble inside one process give each member a
    ``seed``.

    Args:
        model: pretrained encoder and new layers in one module; called on every batch.
        loader: batches, each a tensor, a mapping of keywords or a sequence of arguments of
            ``model``, on its device. Tokens that ``attention_mask`` marks as padding are not
            counted.
        layers: dotted path of the new layers, a stack or a list of them, in ``model``; None means
            that all of ``model`` is new and batches are hidden states.
        mu: what the factor is made of. The maximum is the paper's; one outlier moves it, the
        quantile does not.
        quantile: level of the quantile that is reported beside the maximum, in (0, 1].
        max_batches: stop after so many.
        zero_biases: as in `t_fixup_`; wanted where the new layers are torch's, whose biases are not
        0.
        keep: shell-style pattern(s) on dotted paths, inside the new layers, of norms that may stay.
        leave: as in `t_fixup_`, inside the new layers: role(s) or pattern(s) on names of what is
        left as it is.
        patterns: as in `find_roles`, inside the new layers.
        seed: of the draw; None takes `torch.initial_seed()`, what `torch.manual_seed` was last
        given.
        dry_run: measure and report, and change nothing.

    Returns:
        The report, with mu, the maximum, the quantile and the number of tokens; ``print`` it.

    Raises:
        ConfigError: ``layers`` names no module, or more than one stack, cross-attention or gated
            feed-forward networks; a name in ``leave`` that is no role and matches nothing; a norm
            stays; an argument out of range. Nothing is changed.
        RoleNotFoundError: matrices of the new layers without a role, all listed.
        DataError: the loader gave no token.
        ConvergenceError: a token norm is not finite.

    Cost: one forward pass over the data and 4 bytes a token; a dry run also copies the new layers.
    When not to use: embeddings that are trained from scratch (`t_fixup_`); relation-aware
    attention, whose relation values the paper scales too.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 8)
    >>> report = dt_fixup_(encoder, [torch.full((1, 3, 4), 0.5)])
    >>> report.mu, round(report.factors["new layers"], 6), len(report.norms_removed)
    (1.0, 0.125, 16)
    """
    _check_arguments(quantile, max_batches)
    new = _submodule(model, layers)
    layer_stack = _only_stack(new, patterns)
    roles = find_roles(new, patterns=patterns)
    inside = layer_stack.layer_paths()
    left = patterns_of(leave)
    check_steps(new, _plan(new, roles, 1.0, inside, left), left, where=layers or "")
    check_norms(new, keep)
    norms = _entering_norms(model, new, loader, max_batches)
    largest, middle = norms.max().item(), _quantile(norms, quantile)
    chosen = largest if mu == "max" else middle
    factor = dt_fixup_factor(layer_stack.layers, chosen)
    target = copy.deepcopy(new) if dry_run else new
    if dry_run:
        roles = find_roles(target, patterns=patterns)
    steps = _plan(target, roles, factor, inside, left)
    removed = remove_norms_(target, keep=keep)
    generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else seed)
    if zero_biases:
        zero_biases_(steps)
    prefix = f"{layers}." if layers else ""
    rows = [replace(row, name=prefix + row.name) for row in write(steps, generator)]
    return DTFixupReport(
        title=f"DT-Fixup of {layers or type(model).__name__}",
        rows=tuple(rows),
        norms_removed=tuple(prefix + path for path in removed),
        factors={"new layers": factor},
        largest_bias=largest_bias(steps),
        entering={"new layers": norms.double().mean().item()},
        dry_run=dry_run,
        mu=chosen,
        largest=largest,
        quantile=middle,
        level=quantile,
        tokens=norms.numel(),
    )


def _check_arguments(quantile: float, max_batches: int | None) -> None:
    if not 0 < quantile <= 1:
        raise ConfigError(f"quantile: received {quantile!r}; expected a number in (0, 1]")
    if max_batches is not None and max_batches < 1:
        raise ConfigError(
            f"max_batches: received {max_batches!r}; expected at least 1, or None for all batches"
        )


def _plan(
    new: nn.Module, roles: Roles, factor: float, inside: Sequence[str], leave: Sequence[str]
) -> list[Step]:
    paths = [role.path for role in (*roles.attention, *roles.feedforward)]
    steps = layer_steps(roles, dict.fromkeys(paths, factor), "xavier_normal")
    outside = [replace(step, draw="xavier_normal") for step in head_steps(new, steps, inside)]
    return leave_alone(new, roles, [*steps, *outside], leave)


def _submodule(model: nn.Module, path: str | None) -> nn.Module:
    if not path:
        return model
    try:
        return model.get_submodule(path)
    except AttributeError:
        children = [name for name, _ in model.named_children()]
        raise ConfigError(
            f"layers: {type(model).__name__} has no module {path!r}; its"
            f" children:\n{listed(children)}"
        ) from None


def _only_stack(new: nn.Module, patterns: Mapping[str, str | Sequence[str]] | None) -> LayerStack:
    layer_stacks = find_layer_stacks(find_roles(new, patterns=patterns))
    if len(layer_stacks) != 1 or layer_stacks[0].has_cross_attention:
        raise ConfigError(
            "DT-Fixup is for one stack of self-attention layers; name it with layers='path';"
            " found:\n" + listed([str(layer_stack) for layer_stack in layer_stacks])
        )
    return layer_stacks[0]


def _entering_norms(
    model: nn.Module, new: nn.Module, loader: Iterable[Any], max_batches: int | None
) -> Tensor:
    """Return the norm of every real token that enters the new layers, shape (tokens,), on the
    CPU."""
    first = new[0] if isinstance(new, (nn.ModuleList, nn.Sequential)) and len(new) else new
    norms: list[Tensor] = []
    current: list[Any] = [None]

    def note(hidden: Tensor) -> None:
        found = token_norms(
            hidden, real_tokens(current[0], None, Roles()), "input of the new layers"
        )
        norms.append(found.float().cpu())

    with quiet_run(model), hooks([(first, note)], []):
        for batch in islice(loader, max_batches):
            current[0] = batch
            call_model(model, batch)
    if not sum(found.numel() for found in norms):
        raise DataError(
            "dt_fixup_: no token entered the new layers; the loader is empty, or the model bypasses"
            " them"
        )
    return torch.cat(norms)


def _quantile(norms: Tensor, level: float) -> float:
    """Return the smallest norm that at least a share ``level`` of the tokens do not exceed."""
    return norms.kthvalue(max(1, math.ceil(level * norms.numel()))).values.item()
