"""T-Fixup and DT-Fixup: initial weights for Transformers without LayerNorm and warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, ConvergenceError, DataError, listed
from wellposed.hooks import call_model, first_tensor, quiet_run, real_tokens
from wellposed.initialize._draw import carry_out
from wellposed.initialize._factors import (
    dt_fixup_factor,
    t_fixup_decoder_factor,
    t_fixup_encoder_factor,
    t_fixup_factor,
)
from wellposed.initialize._norms import check_norms, take_out
from wellposed.initialize._plan import SCALED_ROLES, plan
from wellposed.initialize._report import InitializationReport, reported
from wellposed.initialize._stacks import LayerStack, check_blocks, find_layer_stacks
from wellposed.interrupts import undoing
from wellposed.model_checks import require_module
from wellposed.removed_names import removed_keywords
from wellposed.roles import Verb, find_roles_for, patterns_of

T_FIXUP = Verb.by_role("t_fixup_", "model")
DT_FIXUP = Verb.by_role("dt_fixup_", "model, loader", takes_batch=False)


@removed_keywords(keep="exclude", leave="exclude", patterns="where")
@checked_arguments
def t_fixup_(
    model: nn.Module,
    *,
    remove_norms: bool = True,
    exclude: str | Sequence[str] = (),
    where: Mapping[str, str | Sequence[str]] | None = None,
    batch: Any = None,
) -> InitializationReport:
    """Draw weights so that one step of size lr moves the output by order lr at any depth, without
    norms.

    LayerNorms become `x -> x`, and weights become factor * draw:

    | weights | draw | factor, encoder-decoder | factor, one stack |
    |---|---|---|---|
    | value, output, feed-forward of the encoder | Xavier uniform | 0.67 N^(-1/4) | v |
    | the same of the decoder, cross-attention too | Xavier uniform | (9 N)^(-1/4) | v |
    | source and shared embeddings, tables of positions | N(0, 1/d) | (9 N_encoder)^(-1/4), once | v |
    | the decoder's own embeddings | N(0, 1/d) | (9 N_decoder)^(-1/4) | |
    | untied output layer | N(0, 1/d) | 1 | 1 |
    | query, key, other linear layers outside the stacks | Xavier uniform | 1 | 1 |
    | all biases, frozen tables, what ``exclude`` names | unchanged, bit for bit | | |

    N counts the layers of the weight's own stack; v is (3K)^(-1/4) for K residual blocks. Padding
    rows stay zero. `torch.manual_seed` repeats a draw. A warning is logged if weights came from a
    checkpoint. Make the optimizer afterwards.

    Status: exact in distribution; the claim on steps is a first-order argument on matrices. With
    trained biases the change grows like N. docs/theory/fixup.md has more, and rates for Adam.
    Source: Huang et al. (2020), appendices A to C; ours for one stack.

    Args:
        model: any Transformer that `find_roles` knows: wellposed's, `torch.nn`, BERT, GPT-2, ...
        remove_norms: take LayerNorms out; False refuses a model that has any.
        exclude: what stays unchanged: role(s) of the report, as in ``("query", "key")``, and
            shell-style pattern(s) on names of parameters and paths of norms (``"*.q_norm"``).
        where: patterns by role, as in `find_roles`.
        batch: as in `find_roles`.

    Returns:
        The report; ``print`` it.

    Raises:
        RoleNotFoundError: no role found, or weights without one, all listed. Nothing is changed.
        ConfigError: an unknown name in ``exclude``; a norm that stays; experts, gated networks, parts
            that are no residual blocks; parametrized, frozen or shared weights; stacks that are
            neither one nor an encoder-decoder. Nothing is changed.

    After an exception or a signal the model is as before. Cost: one draw of every weight, and a copy
    of each meanwhile; try it on `copy.deepcopy(model)`.
    When not to use: pretrained weights, which it overwrites (see `dt_fixup_`); a model with norms.

    `wellposed.models.load_saved_model` loads a saved Hugging Face model without norms; a plain
    ``from_pretrained`` adds fresh ones: call `remove_recorded_norms_` after it.

    >>> report = t_fixup_(nn.Transformer(16, 4, 6, 6, 32, batch_first=True))
    >>> {name: round(factor, 5) for name, factor in report.factors.items()}
    {'encoder': 0.42809, 'decoder': 0.36889, 'embeddings': 0.36889, "decoder's embeddings": 0.36889}
    >>> len(report.norms_removed), report.rows[0].role, report.rows[0].drawn
    (32, 'query', True)
    """
    require_module("t_fixup_", model)
    roles = find_roles_for(T_FIXUP, model, batch, where=where)
    check_blocks(model, roles)
    factors, by_path = _factors(model, find_layer_stacks(roles))
    tables = {"encoder": factors["embeddings"]}
    if "decoder's embeddings" in factors:
        tables["decoder"] = factors["decoder's embeddings"]

    excluded = patterns_of("exclude", exclude)
    steps = plan(
        model,
        roles,
        by_path,
        draw="xavier_uniform",
        embeddings=tables,
        exclude=excluded,
        verb=T_FIXUP,
    )
    norms = check_norms(model, excluded, roles.norms, remove=remove_norms)
    with undoing() as undo:
        rows = carry_out(steps, undo)
        removed = take_out(model, norms, undo)
        undo.forget()

    report = InitializationReport(
        title=f"T-Fixup of {type(model).__name__}",
        rows=tuple(rows),
        norms_removed=removed,
        factors=factors,
    )
    return reported(report)


def _factors(
    model: nn.Module, layer_stacks: list[LayerStack]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the factors by name, and by path of each attention and feed-forward role."""
    reading_other = [stack for stack in layer_stacks if stack.has_cross_attention]
    if len(layer_stacks) == 1:
        (only,) = layer_stacks
        depth = getattr(getattr(model, "config", None), "num_hidden_layers", None)
        if isinstance(depth, int) and depth != only.layers:
            raise ConfigError(
                f"{type(model).__name__}: its configuration has num_hidden_layers={depth}, but"
                f" {only.layers} layers were found at {only.path!r}; weights shared between layers"
                " have no T-Fixup rule; layers of unknown names need where="
            )
        value = t_fixup_factor(len(only.parts))
        return {only.stack: value, "embeddings": value}, {part.path: value for part in only.parts}
    if len(layer_stacks) != 2 or len(reading_other) != 1:
        raise ConfigError(
            "T-Fixup is for one stack of layers, or an encoder and the decoder that reads it; found"
            f" {len(layer_stacks)} stacks; initialise each by itself, as"
            " t_fixup_(model.get_submodule(path)):\n" + listed([*map(str, layer_stacks)])
        )

    encoder, decoder = sorted(layer_stacks, key=lambda stack: stack.has_cross_attention)
    factors = {
        "encoder": t_fixup_encoder_factor(encoder.layers),
        "decoder": t_fixup_decoder_factor(decoder.layers),
        "embeddings": t_fixup_decoder_factor(encoder.layers),
        "decoder's embeddings": t_fixup_decoder_factor(decoder.layers),
    }
    by_path = {part.path: factors["encoder"] for part in encoder.parts}

    return factors, by_path | {part.path: factors["decoder"] for part in decoder.parts}


@removed_keywords(keep="exclude", leave="exclude", patterns="where")
@checked_arguments
def dt_fixup_(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: str | None = None,
    exclude: str | Sequence[str] = (),
    where: Mapping[str, str | Sequence[str]] | None = None,
    seed: int | None = None,
) -> InitializationReport:
    """Draw N new layers; values, outputs, feed-forward: Xavier / sqrt(N (4 mu^2 + 2 mu + 2)).

    mu is the largest 2-norm of a token that enters the new layers, measured in one pass over
    ``loader`` without gradients. Their LayerNorms become `x -> x`. Query and key are drawn without
    the factor; biases, embeddings and all other modules stay unchanged. Draws are Xavier normal, as
    in the paper's code, and seeded, so a second call writes the same bits.

    Status: exact in distribution, given mu; that a step moves the output by order lr is a
    first-order argument.
    Source: Xu et al. (2021), "Optimizing Deeper Transformers on Small Datasets", section 3.

    Args:
        model: pretrained encoder and new layers in one module; called on every batch.
        loader: batches (tensors, mappings of keywords or sequences of arguments) on its device.
            Tokens that ``attention_mask`` marks as padding are not counted.
        layers: path of the new layers, a stack or list; None: all of ``model`` but its embeddings.
        exclude: as in `t_fixup_`, inside the new layers.
        where: as in `t_fixup_`, inside the new layers.
        seed: of the draw; None takes `torch.initial_seed()`. Ensembles in one process need several.

    Returns:
        The report, with mu and the number of tokens; ``print`` it.

    Raises:
        ConfigError: ``layers`` names no module or several stacks; cross-attention or gated
            networks; a bad name in ``exclude``; a norm that stays; an argument out of range. Nothing
            is changed.
        RoleNotFoundError: matrices of the new layers without a role, all listed.
        DataError: the loader gave no token.
        ConvergenceError: a token norm is not finite.

    After an exception or a signal the model is as before. Cost: one forward pass over the data, 8
    bytes a token, and a copy of the new layers.
    When not to use: embeddings trained from scratch (`t_fixup_`); relation-aware attention.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 8)
    >>> report = dt_fixup_(encoder, [torch.full((1, 3, 4), 0.5)])
    >>> report.mu, round(report.factors["new layers"], 6), len(report.norms_removed)
    (1.0, 0.125, 16)
    """
    if not isinstance(loader, Iterable):
        kind = type(loader).__name__
        raise ConfigError(f"loader: received {kind}; expected batches, as a list or a DataLoader")

    new = _submodule(model, layers)
    roles = find_roles_for(DT_FIXUP, new, where=where)
    layer_stacks = find_layer_stacks(roles)
    if len(layer_stacks) != 1 or layer_stacks[0].has_cross_attention:
        raise ConfigError(
            "DT-Fixup is for one stack of self-attention layers; name it with layers='path';"
            " found:\n" + listed([*map(str, layer_stacks)])
        )

    (only,) = layer_stacks
    check_blocks(new, roles)
    excluded = patterns_of("exclude", exclude)
    steps = plan(
        new,
        roles,
        dict.fromkeys((part.path for part in only.parts), 1.0),
        draw="xavier_normal",
        embeddings=None,
        exclude=excluded,
        path=layers or "",
        verb=DT_FIXUP,
    )
    gone = check_norms(new, excluded, roles.norms)
    first = only.layer_paths[0]
    inside = tuple(f"{path}." for path in only.layer_paths)
    skipped = [new.get_submodule(path) for path in gone if not path.startswith(inside)]
    norms = _entering_norms(model, new.get_submodule(first), loader, skipped)
    mu = norms.max().item()
    factor = dt_fixup_factor(only.layers, mu)
    for index, step in enumerate(steps):
        if step.draw != "kept" and step.role in SCALED_ROLES:
            steps[index] = replace(step, factor=factor)

    generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else seed)
    with undoing() as undo:
        rows = carry_out(steps, undo, generator)
        removed = take_out(new, gone, undo)
        undo.forget()

    prefix = f"{layers}." if layers else ""
    report = InitializationReport(
        title=f"DT-Fixup of {layers or type(model).__name__}",
        rows=tuple(replace(row, name=prefix + row.name) for row in rows),
        norms_removed=tuple(prefix + path for path in removed),
        factors={"new layers": factor},
        mu=mu,
        tokens=norms.numel(),
    )

    return reported(report)


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


def _entering_norms(
    model: nn.Module, first: nn.Module, batches: Iterable[Any], skipped: Sequence[nn.Module]
) -> Tensor:
    """Return the norm of every real token that enters ``first``, on the CPU, past ``skipped``."""
    entering: list[Tensor] = []
    masks: list[Tensor | None] = []

    def entered(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden = first_tensor([*arguments, *keywords.values()])
        if hidden is None:
            return

        norms = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).norm(dim=-1)
        real = masks.pop(0) if len(masks) > 1 else masks[0]
        if real is not None and real.shape == norms.shape:
            norms = norms[real.to(norms.device)]

        infinite = int((~norms.isfinite()).sum())
        if infinite:
            raise ConvergenceError(
                f"input of the new layers: {infinite} of {norms.numel()} token norms are not finite"
                f" (dtype {hidden.dtype}); the signal overflows before them: use bf16 or float32"
            )
        entering.append(norms.flatten().double().cpu())

    with undoing() as undo, quiet_run(model):
        for norm in skipped:
            undo.hook(norm.register_forward_hook, lambda _, arguments, __: arguments[0])
        undo.hook(first.register_forward_pre_hook, entered, with_kwargs=True)
        for batch in batches:
            masks = [real_tokens(batch, None, ())]
            if isinstance(batch, Mapping) and "attention_mask_pair" in batch:
                masks.append(batch["attention_mask_pair"].bool())  # of the second call of one stack
            call_model(model, batch)
    norms = torch.cat(entering) if entering else torch.empty(0)
    if not norms.numel():
        raise DataError(
            "dt_fixup_: no token entered the new layers; the loader is empty, or the model bypasses"
            " them"
        )
    return norms
