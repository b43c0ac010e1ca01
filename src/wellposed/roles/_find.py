"""Find the query, key, value, output, feed-forward and embedding weights of any Transformer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from wellposed.call_checks import known_keywords
from wellposed.errors import (
    ConfigError,
    RoleNotFoundError,
    ShapeError,
    WellposedError,
)
from wellposed.hooks import class_name, evaluating
from wellposed.model_checks import require_module
from wellposed.removed_names import removed_keywords
from wellposed.roles._adapters import effective_roles, has_lora
from wellposed.roles._advice import FIND_ROLES, Verb, advice
from wellposed.roles._by_name import other_kinds_taken, prefixes, roles_by_name, unread_by_name
from wellposed.roles._combined import combined_roles
from wellposed.roles._embedding_tables import embedding_roles
from wellposed.roles._families import (
    UnknownHeadsError,
)
from wellposed.roles._notes import log_notes
from wellposed.roles._patterns import Patterns, with_patterns
from wellposed.roles._registered import registered_weights
from wellposed.roles._roles import (
    AttentionRole,
    FeedForwardRole,
    Roles,
    RoleWeight,
    Stack,
)
from wellposed.roles._stand_ins import stand_ins
from wellposed.roles._views import (
    WeightView,
    is_linear,
    layer_index,
    shown_spans,
    spans_of,
)

if TYPE_CHECKING:
    from wellposed.roles._pass import Trace


@removed_keywords(patterns="where")
@known_keywords
def find_roles(
    model: nn.Module,
    batch: Any = None,
    *,
    where: Patterns | None = None,
    check: bool = True,
    run: bool = True,
) -> Roles:
    """Return a view W for each weight with a role, such that the model's layer computes ``W x``.

    One forward pass in evaluation mode shows, by gradients, which rows of which weight reach each
    query, key and value, by head. Products that read the result are output and feed-forward
    weights. Two more passes check this: they change the rows of random heads and hidden units at
    random tokens and compare what moves. Without a batch, a model of transformers runs on one made
    from its configuration. After `fully_shard` it runs on random weights, and nothing is gathered. If
    nothing can run (no batch, meta device, tensor parallelism), modules are recognised by the names of
    their children. This covers `torch.nn` Transformer layers, BERT, DistilBERT, GPT-2, Llama, T5, BART,
    ViT, wellposed's own, and the names of Meta's llama, litgpt, timm, vit-pytorch and
    x-transformers. A view shares storage with its parameter and sends
    gradients to it; rows that are not one block are copied.

    Status: exact for weights that the passes reached. A part that the check contradicts is left out.
    If names and the pass differ, the pass is used. Both are in `Roles.notes`. These notes also list
    roles found by name only, attention without a softmax, and calls that are only partly visible.
    The log gets them too: as a warning once per model, then as INFO.

    Args:
        model: any module; parameters, buffers, gradients and random state do not change.
        batch: two or more tokens: a tensor, a tuple of arguments, or a mapping of keywords.
        where: role name -> shell-style pattern(s) on parameter names, such as ``{"query":
            "*.attn.wq.weight", "feedforward_in": "*.mlp.w1.weight"}``. A role named here is found
            only by its patterns. Query, key, value and output of one module form an attention role,
            in and out a feed-forward role.
        check: False skips the two passes of the check.
        run: False runs nothing; modules are recognised by names only.

    Returns:
        `Roles` in model order; printing it shows a table.

    Raises:
        RoleNotFoundError: no role is found, or a pattern matches no parameter.
        ConfigError: ``model`` is not a module, or fails on the batch; a weight is quantised; a
            pattern matches a parameter that is not a matrix, such as a bias; unknown role name.
        ShapeError: heads do not divide the weights, and names tell no other role. If nothing tells
            the number of heads, the weights of an attention are ``loose``, without heads.

    Cost: three forward passes that keep activations (one more if the model switches gradients off)
    and one backward pass per head through a projection. After `fully_shard` also memory for the whole
    weights: names alone if they take more than half of the device. By name only: one walk.

    >>> from torch import nn
    >>> roles = find_roles(nn.TransformerEncoderLayer(16, 4, 32))
    >>> [weight.role for weight in roles.weights()]
    ['query', 'key', 'value', 'output', 'feedforward_in', 'feedforward_out']
    >>> roles.attention[0].key.parameter_name
    'self_attn.in_proj_weight'
    """
    return find_roles_for(FIND_ROLES, model, batch, where=where, check=check, run=run)


def find_roles_for(
    verb: Verb,
    model: nn.Module,
    batch: Any = None,
    *,
    where: Patterns | None = None,
    check: bool = True,
    run: bool = True,
) -> Roles:
    """Return `find_roles` for another public call, in whose words errors and the log speak."""
    require_module(verb.name, model)
    with evaluating(model):  # or spectral_norm iterates whenever its weight is read
        with stand_ins(model) if run else nullcontext():
            roles = _read_roles(verb, model, batch, where, check=check, run=run)
        roles = effective_roles(model, roles)
    if run:  # in the log of every verb that uses the answer
        log_notes(verb.name, model, roles)
    return roles


def _read_roles(
    verb: Verb, model: nn.Module, batch: Any, patterns: Patterns | None, *, check: bool, run: bool
) -> Roles:
    problems: dict[str, WellposedError] = {}
    roles = roles_by_name(model, problems)
    other_kinds = other_kinds_taken(problems)

    traced = _traced(model, batch, check=check) if run else "run=False"
    ran = not isinstance(traced, str)
    if isinstance(traced, str):
        notes = [f"found by name; nothing was run: {traced}", *unread_by_name(problems)]
    else:
        roles = combined_roles(model, roles, traced)
        traced_paths = {part.path for part in (*roles.attention, *roles.feedforward)}
        unread = (str(error) for path, error in problems.items() if path not in traced_paths)
        notes = [f"names alone do not tell the roles: {error}" for error in unread]

    visible = {part.path for part in roles.attention}
    left = [error for path, error in other_kinds.items() if path not in visible]
    if left:
        notes.append(f"no role, as names do not tell its heads: {'; '.join(left)}")
    roles = replace(
        roles,
        feedforward=tuple(_in_stacks(roles.feedforward, roles.attention)),
        embeddings=embedding_roles(model, roles.embeddings),
        loose=(*roles.loose, *_adapter_factors(model)),
        notes=(*roles.notes, *notes),
        by_pass=ran,
    )
    roles = replace(roles, loose=(*roles.loose, *registered_weights(model, roles)))

    if patterns is not None:
        contradicted = (
            () if ran else [p for p, e in problems.items() if type(e) is not UnknownHeadsError]
        )
        roles = with_patterns(model, patterns, roles, contradicted=contradicted)
    if not (roles.attention or roles.feedforward or roles.loose):
        raise _nothing_found(verb, model, roles.notes, problems.values(), ran=ran)
    return replace(roles, unnamed=_without_role(model, roles))


def _traced(model: nn.Module, batch: Any, *, check: bool) -> Trace | str:
    """Return the pass, or why nothing was run."""
    from wellposed.roles._pass import trace  # not loaded if nothing runs

    try:
        return trace(model, batch, check=check)
    except ConfigError as error:
        if batch is not None:
            raise
        return f"the model fails on a batch made from its configuration ({error})"


def _adapter_factors(model: nn.Module) -> Iterator[RoleWeight]:
    for path, module in model.named_modules():
        if has_lora(module):
            for name, factor in module.named_modules():
                if name.startswith(("lora_A.", "lora_B.")) and is_linear(factor):
                    view = WeightView(f"{path}.{name}", factor, "weight")
                    yield RoleWeight("adapter", None, layer_index(path), path, view)


def _without_role(model: nn.Module, roles: Roles) -> tuple[str, ...]:
    """Return parameters of two or more dimensions without a role, or their rows without one."""
    covered: dict[str, list[WeightView]] = {}
    for weight in roles.weights():
        for name in weight.view.sources:
            covered.setdefault(name, []).append(weight.view)

    result: list[str] = []
    for name, parameter in model.named_parameters():
        views = covered.get(name, [])
        if parameter.ndim < 2:
            continue
        if not views:
            result.append(f"{name} {tuple(parameter.shape)}")
        elif all(view.spans is not None for view in views):
            rows = parameter.shape[-1 if views[0].transposed else -2]
            taken = {row for view in views for span in view.spans or () for row in range(*span)}
            left = spans_of(row for row in range(rows) if row not in taken)
            result += [f"{name}[{shown_spans(left)}]"] if left else []

    return tuple(result)


def _in_stacks(
    feedforward: Iterable[FeedForwardRole], attention: Sequence[AttentionRole]
) -> Iterator[FeedForwardRole]:
    """Give each feed-forward role the stack of the attention with the longest common path."""
    stacks: dict[str, Stack] = {}
    for other in attention:
        for prefix in prefixes(other.path):
            stacks.setdefault(prefix, other.stack)
    for role in feedforward:
        around = (stacks[prefix] for prefix in prefixes(role.path) if prefix in stacks)
        first = attention[0].stack if attention else role.stack
        yield replace(role, stack=next(around, first))


def _nothing_found(
    verb: Verb,
    model: nn.Module,
    notes: Sequence[str],
    problems: Iterable[WellposedError],
    *,
    ran: bool,
) -> WellposedError:
    """Return the first problem of a module whose names were read, or that none was recognised."""
    for problem in problems:
        is_config = isinstance(problem, ConfigError)
        if is_config or not ran:
            by_batch = "" if ran or not verb.batch else f". Give a batch: {verb.batch}"
            error = (ConfigError if is_config else ShapeError)(f"{verb.name}: {problem}{by_batch}")
            error.__cause__ = problem
            return error

    problem = f"no attention or feed-forward weight was recognised in {class_name(model)}"
    lines = [f"{verb.name}: {problem}", *notes, advice(verb, model, ran=ran)]
    return RoleNotFoundError("\n".join(lines))
