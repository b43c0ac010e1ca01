"""Find the query, key, value, output, feed-forward and embedding weights of any Transformer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

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
from wellposed.roles._families import (
    FAMILIES,
    LocatedModule,
    OtherAttentionError,
    Reader,
    Role,
    UnknownHeadsError,
    first_of,
)
from wellposed.roles._live import wrapped_by
from wellposed.roles._notes import log_notes, unread_parts
from wellposed.roles._patterns import Patterns, with_patterns
from wellposed.roles._registered import registered_weights
from wellposed.roles._roles import (
    AttentionRole,
    EmbeddingRole,
    FeedForwardRole,
    Roles,
    RoleWeight,
    Stack,
    views_of,
    weight_key,
)
from wellposed.roles._stand_ins import stand_ins
from wellposed.roles._views import (
    WeightView,
    is_linear,
    is_table,
    layer_index,
    shown_spans,
    spans_of,
)

if TYPE_CHECKING:
    from wellposed.roles._pass import Trace

Kind: TypeAlias = Literal["token", "position"]
_NOT_TOKENS = ("type", "segment", "relative", "rel_", "class", "label")
_KINDS = {AttentionRole: "attention", FeedForwardRole: "feed-forward"}
_POSITION_TABLE = re.compile(r"pos(ition(al)?)?_embed(ding)?s?")


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
    notes: list[str] = []
    problems: dict[str, WellposedError] = {}
    roles = _by_name(model, problems)
    other_kinds = _other_kinds_taken(problems)
    try:
        traced = _traced(model, batch, check=check) if run else "run=False"
    except ConfigError as error:
        if batch is not None:
            raise
        traced = f"the model fails on a batch made from its configuration ({error})"
    if not isinstance(traced, str):
        roles = _combined(model, roles, traced)
        traced_paths = {part.path for part in (*roles.attention, *roles.feedforward)}
        unread = (str(error) for path, error in problems.items() if path not in traced_paths)
        notes += [f"names alone do not tell the roles: {error}" for error in unread]
    else:
        notes.append(f"found by name; nothing was run: {traced}")
        notes += _unread_by_name(problems)
    ran = not isinstance(traced, str)
    visible = {part.path for part in roles.attention}
    left = [error for path, error in other_kinds.items() if path not in visible]
    if left:
        notes.append(f"no role, as names do not tell its heads: {'; '.join(left)}")
    roles = replace(
        roles,
        feedforward=tuple(_in_stacks(roles.feedforward, roles.attention)),
        embeddings=_embedding_roles(model, roles.embeddings),
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
        for problem in problems.values():
            if isinstance(problem, ConfigError) or not ran:
                by_batch = "" if ran or not verb.batch else f". Give a batch: {verb.batch}"
                kind = ConfigError if isinstance(problem, ConfigError) else ShapeError
                raise kind(f"{verb.name}: {problem}{by_batch}") from problem
        raise _nothing_found(verb, model, roles.notes, ran=ran)
    return replace(roles, unnamed=_without_role(model, roles))


def _traced(model: nn.Module, batch: Any, *, check: bool) -> Trace | str:
    from wellposed.roles._pass import trace  # not loaded if nothing runs

    return trace(model, batch, check=check)


def _by_name(model: nn.Module, problems: dict[str, WellposedError]) -> Roles:
    """Return roles found by names; ``problems`` gets why a module cannot be read, by path."""
    families = [FAMILIES.get(name) for name in FAMILIES]
    attention_of = first_of(*(family.attention for family in families))
    network_of = first_of(*(family.feedforward for family in families))

    loose: list[RoleWeight] = []
    paths = dict(model.named_modules(remove_duplicate=False))

    def are_inside(views: Iterable[WeightView]) -> bool:
        # PEFT's models pass on every attribute of the model inside, which is read by itself.
        return all(paths.get(view.owner_path) is view.owner for view in views)

    def read(reader: Reader[Role], located: LocatedModule) -> Role | None:
        try:
            role = reader(located)
        except WellposedError as error:
            if isinstance(error, UnknownHeadsError):
                loose.extend(weight for weight in error.weights if are_inside([weight.view]))
            problems[located.path] = error
            return None
        return role if role is None or are_inside(views_of(role).values()) else None

    # A wrapper passes on the attributes of its module, and would be read as that a second time.
    named = ((path, part) for path, part in model.named_modules() if wrapped_by(part) is None)
    modules = [LocatedModule(path, module, model) for path, module in named]
    attention: dict[str, AttentionRole] = {}
    for located in modules:
        inside = not attention.keys().isdisjoint(_prefixes(located.path))
        if not inside and (role := read(attention_of, located)):
            attention[role.path] = role
    around = attention.keys() | {weight.path for weight in loose}
    outside = (located for located in modules if around.isdisjoint(_prefixes(located.path)))
    networks = (network for located in outside if (network := read(network_of, located)))
    return Roles(tuple(attention.values()), tuple(networks), loose=tuple(loose))


def _other_kinds_taken(problems: dict[str, WellposedError]) -> dict[str, str]:
    """Take attention of another kind out of the problems, as the rest of the model is known."""
    others = {path: e for path, e in problems.items() if isinstance(e, OtherAttentionError)}
    for path in others:
        del problems[path]
    return {path: str(error) for path, error in others.items()}


def _unread_by_name(problems: dict[str, WellposedError]) -> list[str]:
    """Return a note on each module whose heads the names do not tell; raise what else is wrong."""
    for problem in problems.values():
        if not isinstance(problem, ShapeError):
            raise problem
    return [
        f"{'no heads' if isinstance(problem, UnknownHeadsError) else 'no role'}: {problem}"
        for problem in problems.values()
    ]


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _combined(model: nn.Module, named: Roles, traced: Trace) -> Roles:
    """Return the roles of the pass, and those found by name in modules that it did not show."""
    unseen: list[str] = []
    unconfirmed: list[str] = []
    clashes: list[str] = []
    order = {path: index for index, (path, _) in enumerate(model.named_modules())}
    read = _names_read(traced)
    refused = {
        (type(part), weight_key(v)) for part, _ in traced.refused for v in views_of(part).values()
    }

    def both(named: Sequence[Role], by_pass: Sequence[Role]) -> tuple[Role, ...]:
        by_id: dict[int, Role] = {id(role): role for role in by_pass}
        last_first = [
            (view, role) for role in reversed(by_pass) for view in views_of(role).values()
        ]
        holders = {weight_key(view): role for view, role in last_first}
        for role in named:
            views = views_of(role)
            weights = [weight_key(view) for view in views.values()]
            rival = next(filter(None, map(holders.get, weights)), None)
            if rival is None and any((type(role), weight) in refused for weight in weights):
                continue
            if rival is None or not {view.parameter_name for view in views.values()} <= read:
                # a weight that enters in a form computed from several is known by name alone
                by_id.pop(id(rival), None)
                by_id[id(role)] = role
                reached = any(traced.reached(view.parameter) for view in views.values())
                (unconfirmed if reached else unseen).append(role.path)
                continue
            others = views_of(rival)
            differ = [
                f"{role.path}: {name} is {view.label} by name, {others[name].label} in the pass"
                for name, view in views.items()
                if name in others and view.key != others[name].key
            ]
            clashes.extend(differ)
            if not differ:
                # a module that sits in two places has the name that a reader would give it
                by_id.pop(id(rival), None)
                by_id[id(role)] = replace(rival, path=role.path, **views)
        return tuple(sorted(by_id.values(), key=lambda role: order[role.path]))

    attention = both(named.attention, traced.roles.attention)
    feedforward = both(named.feedforward, traced.roles.feedforward)
    notes = [
        f"{_KINDS[type(part)]} {part.path or class_name(model)}: refused. The pass shows"
        f" {', '.join(f'{n} {v.label}' for n, v in views_of(part).items())}, but {why}"
        for part, why in traced.refused
    ]
    if unseen:
        notes.append(f"not reached by this batch, found by name: {', '.join(unseen)}")
    if unconfirmed:
        notes.append(f"found by name; the pass does not show it: {', '.join(unconfirmed)}")
    if clashes:
        sure = "its check confirms" if not traced.unchecked else "nothing checked"
        notes.append(
            f"names say otherwise than the pass, which {sure} and which is taken: {'; '.join(clashes)}"
        )
    if traced.unchecked not in {"", "check=False"}:
        notes.append(f"the roles were not checked: {traced.unchecked}")
    combined = replace(traced.roles, attention=attention, feedforward=feedforward)
    notes += unread_parts(model, combined, traced)
    with_role = {(id(weight.view.owner), weight.view.attribute) for weight in combined.weights()}
    open_calls = {
        note: weights
        for note, weights in traced.incomplete.items()
        if not any((id(w.view.owner), w.view.attribute) in with_role for w in weights)
        and (weights or not named.attention)
    }
    loose = {(w.role, w.view.key): w for weights in open_calls.values() for w in weights}
    return replace(combined, loose=tuple(loose.values()), notes=(*notes, *open_calls))


def _names_read(traced: Trace) -> set[str]:
    from wellposed.roles._record import Product

    return {product.view.parameter_name for product in traced.record.of_kind(Product)}


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
        for prefix in _prefixes(other.path):
            stacks.setdefault(prefix, other.stack)
    for role in feedforward:
        around = (stacks[prefix] for prefix in _prefixes(role.path) if prefix in stacks)
        first = attention[0].stack if attention else role.stack
        yield replace(role, stack=next(around, first))


def _embedding_roles(
    model: nn.Module, by_pass: Sequence[EmbeddingRole]
) -> tuple[EmbeddingRole, ...]:
    """Return the tables of the pass or of names; only names tell segments from tokens."""
    kinds: dict[int, Kind] = {id(table.weight.parameter): table.kind for table in by_pass}
    with suppress(AttributeError, NotImplementedError):  # not every model names its table
        input_table = cast(Any, model).get_input_embeddings()
        if is_table(input_table):
            kinds[id(input_table.weight)] = "token"
    tables: dict[int, EmbeddingRole] = {}
    for path, module in model.named_modules():
        looked_up = is_table(module)
        names = [] if looked_up else [name for name, _ in module.named_parameters(recurse=False)]
        for name in ["weight"] if looked_up else names:
            view = WeightView(path, module, name)
            key = id(view.parameter)
            kind = kinds.get(key)
            named_kind = _named_kind(path, name, looked_up=looked_up)
            kind = named_kind if named_kind and kind != "position" else kind
            if kind is not None and kind != "none":
                tables.setdefault(key, EmbeddingRole(path, kind, view))
    return tuple(tables.values())


def _named_kind(path: str, name: str, *, looked_up: bool) -> Kind | Literal["none"] | None:
    """Return the kind that a name implies: None if none, ``"none"`` for other tables."""
    if not looked_up:
        return "position" if _POSITION_TABLE.fullmatch(name) else None
    name = path.rpartition(".")[2].lower()
    if any(word in name for word in _NOT_TOKENS):
        return "none"
    return "position" if "pos" in name or name == "wpe" else "token"


def _nothing_found(
    verb: Verb, model: nn.Module, notes: Sequence[str], *, ran: bool
) -> RoleNotFoundError:
    problem = f"no attention or feed-forward weight was recognised in {class_name(model)}"
    lines = [f"{verb.name}: {problem}", *notes, advice(verb, model, ran=ran)]
    return RoleNotFoundError("\n".join(lines))
