"""The terms of a penalty: weights and affinities, and how far they are from orthogonal."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wellposed import hooks
from wellposed.errors import ConfigError, RoleNotFoundError, ShapeError, listed, unknown_name
from wellposed.functional import affinity_penalty_from_logits, check_weights
from wellposed.interrupts import all_or_nothing, run_all
from wellposed.linalg import in_stacks
from wellposed.registry import Registry
from wellposed.roles import (
    ATTENTION,
    FEEDFORWARD,
    AttentionRole,
    Roles,
    RoleWeight,
    Verb,
    WeightView,
    batch_advice,
    distinct_paths,
    joined_views,
)

PENALTY = Verb.by_role("OrthogonalityPenalty", "model, ...")
Labelled: TypeAlias = tuple[str, tuple[WeightView, ...]]
_OURS = ("paper", "gram_squared", "gram", "qr")
Form: TypeAlias = Literal["paper", "gram_squared", "gram", "qr"] | str
FORMS: Registry[Callable[[Tensor], Tensor]] = Registry(
    "form", entry_points="wellposed.penalties", taken=_OURS
)
"""Registered forms: ``form(weight) -> scalar`` with gradient, of a matrix (out, in)."""
PAPER_FORMS: dict[str, str] = dict.fromkeys(("attention", "feedforward"), "gram_squared")
PAPER_FORMS |= dict.fromkeys(("query", "key", "value", "embedding"), "gram")
"""Form of each strength on weights in its paper: Zhang et al. (2021), McGrath (2024)."""
_SINGLE_ROLES = ("query", "key", "value")
# Largest number of affinity entries computed at once for several layers; a CPU's caches hold less.
_ENTRIES = 1 << 25
_ENTRIES_CPU = 1 << 19
Part = tuple[list[str], Tensor]
"""Names of terms, and a number for each."""


@dataclass(frozen=True)
class Term:
    """One number of the penalty: a weight, or a stack of weights along outputs, of one layer."""

    strength: str  # the keyword whose strength it carries
    label: str
    views: tuple[WeightView, ...]
    form: str  # gram_squared, gram, qr or one of FORMS
    qr_method: Any
    gram_dtype: torch.dtype | None


def chosen_forms(form: Form | Mapping[str, Form], strengths: Sequence[str]) -> dict[str, str]:
    """Return the form of each strength: as asked for, or that of its paper."""
    if not isinstance(form, (str, Mapping)):
        raise ConfigError(f"form = {form!r}, expected a form or a mapping from strength to form")
    asked = dict.fromkeys(strengths, form) if isinstance(form, str) else form
    for strength, name in asked.items():
        if name not in (known := (*_OURS, *FORMS)):
            raise unknown_name("form", str(name), known)
        if strength not in PAPER_FORMS:
            raise unknown_name("strength in form", strength, PAPER_FORMS)
    chosen = {name: asked.get(name, "paper") for name in strengths}
    return {name: PAPER_FORMS[name] if form == "paper" else form for name, form in chosen.items()}


def weight_terms(
    model: nn.Module,
    roles: Roles,
    forms: Mapping[str, str],
    *,
    joint: bool,
    cross_attention: bool,
    **options: Any,
) -> list[Term]:
    """Return the terms of the strengths in use, before `distinct_terms`."""
    terms = []
    for strength, form in forms.items():
        labelled = _weights_of(strength, roles, cross_attention=cross_attention, joint=joint)
        terms += [Term(strength, label, views, form, **options) for label, views in labelled]
    present = {term.strength for term in terms}
    missing = [f"{name}: the model has no such weight" for name in forms if name not in present]
    if missing:
        problem = f"OrthogonalityPenalty: there is nothing to penalise:\n{listed(missing)}"
        choice = batch_advice(PENALTY, model, roles)
        raise RoleNotFoundError(f"{problem}\n{choice}\nRoles found:\n{roles}")
    return terms


def distinct_terms(terms: Iterable[Term]) -> tuple[list[Term], list[str]]:
    """Return checked terms that count each weight once, and one line for each shared weight."""
    terms, notes = _counted_once(terms)
    _check(terms)
    return terms, notes


_ADAPTERS = ("merged", "disable_adapters", "active_adapters")


def bound_state(terms: Iterable[Term], adapted: Iterable[Term]) -> tuple[list[Any], list[str]]:
    """Return the shape, storage and sharing of each weight, and the active adapters."""
    weights: list[Any] = []
    first: dict[object, int] = {}
    for number, view in enumerate(view for term in terms for view in term.views):
        stored = view.owner._parameters.get(view.attribute)
        kind = None
        shape = None
        if stored is not None:  # otherwise a parametrization or a hook computes it
            kind = type(stored), stored.dtype, stored.device
            shape = stored.shape if view.spans or view.expert is not None else None
        shared = first.setdefault(view.owner if stored is None else id(stored), number)
        weights.append((shape, kind, shared))
    layers = (getattr(view, "layer", None) for term in adapted for view in term.views)
    return weights, [str(getattr(layer, name, None)) for layer in layers for name in _ADAPTERS]


def frozen_weights(terms: Sequence[Term]) -> list[str]:
    """Name the terms without a trained weight; ConfigError if a strength has no other."""
    frozen = [term for term in terms if not any(view.trainable for view in term.views)]
    trained = {term.strength for term in terms if term not in frozen}
    useless = [line for term in frozen if term.strength not in trained for line in _lines(term)]
    if useless:
        raise ConfigError(
            "these weights are frozen (requires_grad=False), so their penalty would train nothing:\n"
            f"{listed(useless)}\nLeave their strength out, train them, or make the penalty after the"
            " adapters that train them. To look at the value alone, call it under torch.no_grad()"
        )
    return [line for term in frozen for line in _lines(term)]


def _weights_of(
    strength: str, roles: Roles, *, cross_attention: bool, joint: bool
) -> Iterator[Labelled]:
    """Yield the label and the weights of each term of one strength."""
    attention = [role for role in roles.attention if cross_attention or role.kind == "self"]
    if strength == "embedding":
        tables = (table for table in roles.embeddings if table.kind == "token")
        yield from ((table.path or "token", (table.weight,)) for table in tables)
        return
    if strength == "feedforward":
        for network in roles.feedforward:
            views = ((name, getattr(network, name)) for name in FEEDFORWARD.values())
            label = f"{network.stack}.{network.layer}"
            yield from ((f"{label}.{name}", (view,)) for name, view in views if view is not None)
        attention = []
    for role in attention:
        label = f"{role.stack}.{role.layer}{'.cross' if role.kind == 'cross' else ''}"
        if strength != "attention":
            yield label, (getattr(role, strength),)
        elif joint:
            yield label, tuple(getattr(role, name) for name in ATTENTION)
        else:
            yield from ((f"{label}.{name}", (getattr(role, name),)) for name in ATTENTION)
        for name, view in role.extra_projections:
            if strength in (name, "attention"):
                yield f"{label}.{name} {view.parameter_name}", (view,)
    if strength == "attention":
        yield from _terms_without_heads(roles, joint=joint, cross_attention=cross_attention)
    loose = (weight.view for weight in roles.loose if weight.role.startswith(strength))
    yield from ((view.parameter_name, (view,)) for view in loose)


def _terms_without_heads(roles: Roles, *, joint: bool, cross_attention: bool) -> Iterator[Labelled]:
    """Yield the terms of attention whose four weights are known, and whose heads are not."""
    blocks: dict[str, dict[str, RoleWeight]] = {}
    for weight in roles.loose:
        if weight.role in ATTENTION and (cross_attention or weight.kind != "cross"):
            blocks.setdefault(weight.path, {})[weight.role] = weight
    for block in blocks.values():
        if block.keys() != {*ATTENTION}:
            continue
        first = block["query"]
        label = f"{first.stack}.{first.layer}{'.cross' if first.kind == 'cross' else ''}"
        views = {role: block[role].view for role in ATTENTION}
        if joint:
            yield label, tuple(views.values())
        else:
            yield from ((f"{label}.{role}", (view,)) for role, view in views.items())


def _counted_once(terms: Iterable[Term]) -> tuple[list[Term], list[str]]:
    """Drop weights that an earlier term of the same kind has; note each of them."""
    first: dict[tuple[object, ...], str] = {}
    distinct: list[Term] = []
    notes: list[str] = []
    for term in terms:
        name = f"{term.strength} of {term.label}"
        group = "single" if term.strength in _SINGLE_ROLES else term.strength
        fresh: list[WeightView] = []
        for view in term.views:
            key = (group, *view.key)
            if key in first:
                notes.append(f"{view.parameter_name}: also {name}, counted once as {first[key]}")
                continue
            first[key] = name
            fresh.append(view)
        if fresh:
            distinct.append(replace(term, views=joined_views(fresh)))
    return distinct, notes


def _check(terms: Sequence[Term]) -> None:
    offenders: list[str] = []
    uneven: list[str] = []
    for term in terms:
        if len({view.shape[1] for view in term.views}) > 1:
            uneven.append(f"{term.label}: {', '.join(str(view.shape) for view in term.views)}")
        for view in term.views:
            if view.deviation is not None and not view.is_computed:
                offenders.append(
                    f"{view.deviation}, which is no product with one matrix; remove that, or leave"
                    f" {view.parameter_name} out (where=)"
                )
                continue
            try:
                with torch.no_grad():  # a layer that is called shows whether it is linear
                    check_weights([_like(view)])
            except (ConfigError, ShapeError) as error:
                offenders.append(f"{view.parameter_name}: {error}")
    if uneven:
        raise ShapeError(
            "attention_mode='joint' stacks query, key, value and output along outputs, which needs"
            " one input width; use attention_mode='separate':\n" + listed(uneven)
        )
    unique = list(dict.fromkeys(offenders))
    if unique:
        raise ConfigError(f"these weights cannot be penalised:\n{listed(unique)}")


def _like(view: WeightView) -> Tensor:
    """Return the weight, or a stand-in of its kind and shape if it would be gathered for a look."""
    if not view.crosses_shards:
        return view.tensor()
    stored: Any = view.parameter
    return stored.to_local().new_empty(1, 1).expand(view.shape)


def _lines(term: Term) -> list[str]:
    return [f"{view.parameter_name}: {term.strength} of {term.label}" for view in term.views]


_KEPT_IN_GRAPH = "wellposed.affinity"


class AffinityCapture:
    """Hooks that note the self-attention calls of the last forward pass; a note lives as long as
    the graph of its attention. ``is_due`` tells whether the next penalty call needs affinities."""

    def __init__(
        self, model: nn.Module, attention: Sequence[AttentionRole], is_due: Callable[[], bool]
    ) -> None:
        self.attention = distinct_paths(attention)
        self._names = {id(role): path for path, role in self.attention.items()}
        self._is_due = is_due
        self._ran = False
        self._is_watching = False
        self._entered: set[str] = set()
        self._skipped: set[str] = set()
        self._inside: set[str] = set()
        self._seen: dict[str, list[Callable[[], hooks.AttentionCall | None]]] = {}
        self._handles: list[Any] = []
        with all_or_nothing() as undo:
            undo.later(self.remove)
            begin = hooks.ObservingHook(self._begin)
            end = hooks.ObservingHook(self._end)
            self._handles.append(hooks.register(model.register_forward_pre_hook, begin))
            self._handles.append(hooks.register(model.register_forward_hook, end, always_call=True))
            watched = (model, attention, self._receive)
            self._watcher = hooks.AttentionWatcher(*watched, wanted=self._is_wanted)
            self._handles.append(self._watcher)
            for path in self.attention:
                self._watch_inside(model, path)

    def take(self) -> list[tuple[AttentionRole, hooks.AttentionCall]]:
        """Return, once, the calls of the last forward pass; raise if none ran or some were
        hidden."""
        if not self._ran:
            raise ConfigError(
                "the affinity penalty needs one forward pass of the model before each call, and"
                " none was seen. Run model(...) first, on the module given to OrthogonalityPenalty"
                " (a wrapper around it is fine, a part of it is not)"
            )
        noted = {path: [ref() for ref in refs] for path, refs in self._seen.items()}
        hidden = sorted(self._entered - noted.keys() - self._skipped)
        past = hooks.run_past_hooks(self._names.values(), self._entered | self._inside)
        self._entered = set()
        self._seen = {}
        self._ran = False
        if noted and past:
            raise ConfigError(
                f"the affinity penalty did not see {listed(sorted(past))}\n{hooks.PAST_HOOKS}"
            )
        if hidden:
            raise ConfigError(
                "affinities cannot be seen in attention that runs neither scaled_dot_product_attention,"
                " nor a softmax over square logits, nor multi_head_attention_forward without bias_k"
                f" and add_zero_attn:\n{listed(hidden)}\nFor Hugging Face models run"
                " model.set_attn_implementation('sdpa'); otherwise set affinity=0"
            )
        pairs = ((self.attention[path], note) for path, notes in noted.items() for note in notes)
        calls = [(role, note) for role, note in pairs if note is not None]
        if len({id(role) for role, _ in calls}) < len(noted):
            raise ConfigError(
                "the outputs of the last forward pass were freed before the affinity penalty was"
                " called; call it before backward() and while the outputs or the loss are alive"
            )
        if not noted:
            raise ConfigError(
                "no self-attention was seen over plain tensors and its own tokens in the last forward"
                f" pass: {hooks.PAST_HOOKS} (torch.nn.TransformerEncoder in evaluation may use nested"
                " tensors; build it with enable_nested_tensor=False)"
            )
        return calls

    def remove(self) -> None:
        """Remove every hook from the model and forget all calls."""
        self._is_watching = self._ran = False
        removals = [handle.remove for handle in self._handles]
        run_all(*removals, self._seen.clear, self._handles.clear)

    def _begin(self, *_: Any) -> None:
        self._watcher.forget()
        self._seen = {}
        self._entered = set()
        self._skipped = set()
        self._inside = set()
        self._is_watching = self._ran = self._is_due()

    def _watch_inside(self, model: nn.Module, path: str) -> None:
        """Note that a part of an attention ran: it should be seen itself, then."""
        module = model.get_submodule(self.attention[path].path)
        weighted = (name for name, part in module.named_modules() if name and [*part.parameters()])
        name = next(weighted, None)
        if name is not None:
            hook = hooks.ObservingHook(self._ran_inside, f"{path}.{name}")
            part = module.get_submodule(name)
            self._handles.append(hooks.register(part.register_forward_hook, hook))

    def _ran_inside(self, path: str, *_: Any) -> None:
        if self._is_watching:
            self._inside.add(path)

    def _end(self, *_: Any) -> None:
        self._is_watching = False

    def _is_wanted(self, _: AttentionRole) -> bool:
        return self._is_watching

    def _receive(
        self, role: AttentionRole, calls: Sequence[tuple[hooks.AttentionCall, Tensor]]
    ) -> None:
        name = self._names[id(role)]
        self._entered.add(name)
        for call, output in calls:
            if call.attends_to_itself and getattr(call, "readable", True):
                self._note(name, call, output)
            elif not (call.attends_to_itself or isinstance(call, hooks.SoftmaxCall)):
                self._skipped.add(name)  # a cache, or another sequence

    def _note(self, path: str, call: hooks.AttentionCall, output: Tensor) -> None:
        """Keep ``call`` while the graph of ``output`` lives; without one, until the next pass."""
        notes = self._seen.setdefault(path, [])
        if torch.compiler.is_compiling() or output.grad_fn is None:  # compiled graphs have no node
            notes.append(lambda: call)
            return
        metadata: Any = output.grad_fn.metadata
        metadata.setdefault(_KEPT_IN_GRAPH, []).append(call)
        notes.append(weakref.ref(call))


def affinity_parts(
    calls: Sequence[tuple[AttentionRole, hooks.AttentionCall]],
    strength: float,
    estimate: Callable[..., Tensor],
) -> Iterator[Part]:
    """Yield ``strength`` times |A^T A - I|_F^2: sum over heads, mean over the batch. Raise if
    affinities carry no gradient, or if tensor parallelism leaves a rank some heads alone."""
    read = [_Read.of(call, estimate) for _, call in calls]
    heads = [(role, r.joined[0].shape[-3]) for (role, _), r in zip(calls, read, strict=True)]
    cut = [f"{role.path}: {n} of {role.num_heads}" for role, n in heads if n < role.num_heads]
    if cut:
        raise ConfigError(
            "the affinity penalty needs all heads of an attention on each rank, and tensor parallelism"
            f" leaves some:\n{listed(cut)}\nPenalise weights there, or attach it to a model under FSDP2"
        )
    if torch.is_grad_enabled():
        _check_gradients([role for role, _ in calls], read)

    def size(index: int) -> int:
        first = read[index].joined[0]
        most = _ENTRIES_CPU if first.device.type == "cpu" else _ENTRIES
        return most // max(1, math.prod(first.shape[:3]) * first.shape[2])

    for some in in_stacks(range(len(read)), lambda index: read[index].kind(), size):
        values = _together([read[index] for index in some]).mean(dim=0)
        names = [f"affinity.{role.stack}.{role.layer}" for role, _ in map(calls.__getitem__, some)]
        yield names, strength * values.unflatten(0, (len(some), -1)).sum(dim=1)


@dataclass(frozen=True)
class _Read:
    """An attention call for a penalty; calls with equal ``shared`` values can be joined."""

    joined: tuple[Tensor, ...]
    mask: Tensor | None
    shared: tuple[Any, ...]
    penalty: Callable[..., Tensor]

    @classmethod
    def of(cls, call: hooks.AttentionCall, estimate: Callable[..., Tensor]) -> _Read:
        if isinstance(call, hooks.SoftmaxCall):
            # The logits are in memory already, so probes would save nothing.
            return cls((call.scores,), None, (), affinity_penalty_from_logits)
        if isinstance(call, hooks.ScaledDotProductCall):
            rule = partial(estimate, is_causal=call.is_causal, scale=call.scale)
            return cls((call.query, call.key), call.attn_mask, (call.is_causal, call.scale), rule)
        assert isinstance(call, hooks.MultiheadCall)
        query, key, mask, padding = call.projected()
        shared = (_identity(call.named.get("key_padding_mask")),)
        return cls((query, key), mask, shared, partial(estimate, key_padding_mask=padding))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.joined if self.mask is None else (*self.joined, self.mask)

    def kind(self) -> tuple[Any, ...]:
        """Return a key that is equal for calls that can be joined."""
        return *self.shared, *((x.shape, x.dtype, x.device) for x in self.tensors)


def _together(read: Sequence[_Read]) -> Tensor:
    """Return the penalties (batch, heads of all) of calls of one kind, joined as one attention."""
    heads = read[0].joined[0].shape[1]
    mask = read[0].mask
    masks = [call.mask for call in read if call.mask is not None]
    by_head = mask is not None and mask.ndim > 2 and mask.shape[-3] > 1
    if mask is not None and (by_head or len(set(map(_identity, masks))) > 1):
        shape = (*mask.shape[:-3], heads, *(1, *mask.shape)[-2:])
        mask = torch.cat([mask.expand(shape) for mask in masks], dim=-3)
    parts = zip(*(call.joined for call in read), strict=True)
    keywords = {} if mask is None else {"attn_mask": mask}
    return read[0].penalty(*(torch.cat(part, dim=1) for part in parts), **keywords)


def _identity(mask: Tensor | None) -> Any:
    """Return a key that is equal for two views of one mask, such as slices by layer."""
    if mask is None:
        return None
    if torch.compiler.is_compiling():  # no storages exist yet; a mask sliced twice counts as two
        return id(mask)
    return mask.untyped_storage()._cdata, mask.storage_offset(), mask.shape, mask.stride()


def _check_gradients(roles: Sequence[AttentionRole], read: Sequence[_Read]) -> None:
    pairs = zip(roles, read, strict=True)
    without = [role for role, call in pairs if not any(x.requires_grad for x in call.tensors)]
    lost = [role.path for role in without if len(without) == len(roles) or role.query.trainable]
    if lost:
        raise ConfigError(
            "the forward pass left no gradient in these attention modules, so their affinity penalty"
            f" would train nothing:\n{listed(lost)}\nRun it outside torch.no_grad(), or call the"
            " penalty inside it. With gradient checkpointing pass use_reentrant=False; in a frozen"
            " model train something that they depend on"
        )
