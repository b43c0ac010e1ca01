"""Affinities of a penalty: hooks that note attention calls, and how far they are from orthogonal."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellposed import hooks
from wellposed.errors import ConfigError, listed
from wellposed.interrupts import all_or_nothing, run_all
from wellposed.linalg import in_stacks
from wellposed.penalize._affinity_form import AffinityForm
from wellposed.penalize._terms import Part
from wellposed.roles import AttentionRole, distinct_paths

# Largest number of affinity entries computed at once for several layers; a CPU's caches hold less.
_ENTRIES = 1 << 25
_ENTRIES_CPU = 1 << 19

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
            self._watcher = hooks.AttentionWatcher(
                model, attention, self._receive, wanted=self._is_wanted
            )
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
    form: AffinityForm,
) -> Iterator[Part]:
    """Yield ``strength`` times |A^T A - I|_F^2: sum over heads, mean over the batch. Raise if
    affinities carry no gradient, or if tensor parallelism leaves a rank some heads alone."""
    read = [_Read.from_call(call, form) for _, call in calls]
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
    def from_call(cls, call: hooks.AttentionCall, form: AffinityForm) -> _Read:
        if isinstance(call, hooks.SoftmaxCall):
            # The logits are in memory already, so probes would save nothing.
            return cls((call.scores,), None, (), form.of_logits)
        if isinstance(call, hooks.ScaledDotProductCall):
            rule = partial(form.of_vectors, is_causal=call.is_causal, scale=call.scale)
            return cls((call.query, call.key), call.attn_mask, (call.is_causal, call.scale), rule)
        assert isinstance(call, hooks.MultiheadCall)
        query, key, mask, padding = call.projected()
        shared = (_identity(call.named.get("key_padding_mask")),)
        return cls((query, key), mask, shared, partial(form.of_vectors, key_padding_mask=padding))

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
