"""DT-Fixup: initial weights of new layers on top of a pretrained encoder, from the size of what it
gives them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, DataError, listed
from wellposed.initialize._factors import dt_fixup_factor
from wellposed.initialize._layer_stacks import LayerStack, find_layer_stacks
from wellposed.initialize._norms import check_norms, matches, norms_of, take_out
from wellposed.initialize._plan import SCALED_ROLES, carry_out, largest_bias, plan, say
from wellposed.initialize._report import DTFixupReport
from wellposed.initialize._token_norms import Meter, reading
from wellposed.options import Gt, Le, Size
from wellposed.roles import Roles, find_roles, patterns_of
from wellposed.watch import call_model, quiet_run, real_tokens


@checked_arguments
def dt_fixup_(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: str | None = None,
    mu: Literal["max", "quantile"] = "max",
    quantile: Annotated[float, Gt(0), Le(1)] = 0.99,
    max_batches: Size | None = None,
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
    factor (the paper: Xavier for all that is not pretrained), biases and embeddings left alone, bit
    for bit. Xavier normal, as in the paper's code.

    Idempotent: what enters the new layers does not depend on them, and the draw is seeded, so that
    a second call writes the same bits. For an ensemble inside one process give each member a
    ``seed``.

    Args:
        model: pretrained encoder and new layers in one module; called on every batch.
        loader: batches, each a tensor, a mapping of keywords or a sequence of arguments of
            ``model``, on its device. Tokens that ``attention_mask`` marks as padding are not
            counted.
        layers: dotted path of the new layers, a stack or a list of them, in ``model``; None means
            that all of ``model`` but its embeddings is new: a stack whose batches are hidden
            states, or a whole BERT.
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

    Cost: one forward pass over the data and 8 bytes a token.
    When not to use: embeddings that are trained from scratch (`t_fixup_`); relation-aware
    attention, whose relation values the paper scales too.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 8)
    >>> report = dt_fixup_(encoder, [torch.full((1, 3, 4), 0.5)])
    >>> report.mu, round(report.factors["new layers"], 6), len(report.norms_removed)
    (1.0, 0.125, 16)
    """
    if not isinstance(loader, Iterable):
        raise ConfigError(
            f"loader: received {type(loader).__name__}; expected batches, as a list or a DataLoader"
        )
    new = _submodule(model, layers)
    roles = find_roles(new, patterns=patterns)
    only = _only_stack(roles)
    unscaled = dict.fromkeys((part.path for part in only.parts), 1.0)
    steps = plan(
        new,
        roles,
        unscaled,
        draw="xavier_normal",
        embeddings=None,
        leave=patterns_of("leave", leave),
        where=layers or "",
    )
    check_norms(new, keep)
    first, inside = only.layer_paths[0], tuple(f"{path}." for path in only.layer_paths)
    kept = patterns_of("keep", keep)
    skipped = [
        norm
        for path, norm in norms_of(new)
        if not path.startswith(inside) and not matches(path, kept)
    ]
    batches = islice(loader, max_batches)
    norms = _entering_norms(model, new.get_submodule(first), batches, skipped)
    middle = norms.kthvalue(max(1, math.ceil(quantile * norms.numel()))).values.item()
    chosen = norms.max().item() if mu == "max" else middle
    factor = dt_fixup_factor(only.layers, chosen)
    steps = [
        replace(step, factor=factor) if step.draw != "kept" and step.role in SCALED_ROLES else step
        for step in steps
    ]
    generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else seed)
    rows = carry_out(steps, generator, zero_biases=zero_biases, dry_run=dry_run)
    removed = take_out(new, keep, dry_run=dry_run)
    prefix = f"{layers}." if layers else ""
    report = DTFixupReport(
        title=f"DT-Fixup of {layers or type(model).__name__}",
        rows=tuple(replace(row, name=prefix + row.name) for row in rows),
        norms_removed=tuple(prefix + path for path in removed),
        factors={"new layers": factor},
        largest_bias=0.0 if zero_biases else largest_bias(steps),
        entering={"new layers": norms.mean().item()},
        dry_run=dry_run,
        mu=chosen,
        largest=norms.max().item(),
        quantile=middle,
        level=quantile,
        tokens=norms.numel(),
    )
    if not dry_run:
        say(report.line(), report.moved)
    return report


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


def _only_stack(roles: Roles) -> LayerStack:
    layer_stacks = find_layer_stacks(roles)
    if len(layer_stacks) != 1 or layer_stacks[0].has_cross_attention:
        raise ConfigError(
            "DT-Fixup is for one stack of self-attention layers; name it with layers='path';"
            " found:\n" + listed([str(each) for each in layer_stacks])
        )
    return layer_stacks[0]


def _entering_norms(
    model: nn.Module, first: nn.Module, batches: Iterable[Any], skipped: Sequence[nn.Module]
) -> Tensor:
    """Return the norm of every real token that enters ``first``, shape (tokens,), on the CPU;
    norms that will be taken out in front of it let everything through."""
    meter = Meter("input of the new layers", [first], None)
    with ExitStack() as stack:
        for norm in skipped:
            handle = norm.register_forward_hook(lambda _, arguments, __: arguments[0])
            stack.callback(handle.remove)
        stack.enter_context(quiet_run(model))
        stack.enter_context(reading([meter]))
        for batch in batches:
            meter.real = real_tokens(batch, None, Roles())
            call_model(model, batch)
    if not meter.norms:
        raise DataError(
            "dt_fixup_: no token entered the new layers; the loader is empty, or the model bypasses"
            " them"
        )
    return torch.cat(meter.norms)
