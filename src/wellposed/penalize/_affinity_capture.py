"""Keep what the last forward pass showed of its affinities until the penalty asks for it, and their penalty."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, listed
from wellposed.functional import affinity_penalty_from_logits
from wellposed.roles import AttentionRole
from wellposed.watch import (
    AttentionCall,
    AttentionWatcher,
    MultiheadCall,
    ObservingHook,
    ScaledDotProductCall,
    SoftmaxCall,
)

_KEPT_IN_GRAPH = "wellposed.affinity"


class AffinityCapture:
    """Hooks on a model and its self-attention modules that note the attention calls of the last
    forward pass.

    A note is owned by the attention's own autograd node: when the graph is freed, so is the note.

    ``step`` tells the number of the next penalty call, or None if that call will not ask for
    affinities. Sampled layers depend on it and on torch's initial seed alone, so a resumed run
    draws the same ones.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Sequence[AttentionRole],
        *,
        step: Callable[[], int | None],
        layers_per_step: int | None,
    ) -> None:
        self.attention = {role.path: role for role in attention}
        self.layers_per_step = len(self.attention) if layers_per_step is None else layers_per_step
        self._step = step
        self._seed = torch.initial_seed()
        self._ran = False
        self._chosen: Sequence[str] = ()
        self._entered: set[str] = set()
        self._skipped: set[str] = set()
        self._seen: dict[str, list[Callable[[], AttentionCall | None]]] = {}
        self._handles = [
            model.register_forward_pre_hook(ObservingHook(self._begin)),
            model.register_forward_hook(ObservingHook(self._end), always_call=True),
        ]
        self._watcher = AttentionWatcher(model, attention, self._found, wanted=self._is_wanted)

    @property
    def scale(self) -> float:
        """Factor that makes a sum over the watched layers an unbiased sum over all of them."""
        return len(self.attention) / self.layers_per_step

    def take(self) -> list[tuple[AttentionRole, AttentionCall]]:
        """Hand over, once, what the last forward pass showed.

        Raises:
            ConfigError: no forward pass was seen since the last call, or attention ran that could
            not be seen.
        """
        if not self._ran:
            raise ConfigError(
                "the affinity penalty needs one forward pass of the model before each call, and"
                " none was seen: run model(...) first, on the module given to OrthogonalityPenalty"
                " (a wrapper around it is fine, a part of it is not)"
            )
        seen = {
            path: [note for ref in refs if (note := ref()) is not None]
            for path, refs in self._seen.items()
        }
        hidden = sorted(self._entered - seen.keys() - self._skipped)
        self._entered, self._seen, self._ran = set(), {}, False
        if hidden:
            raise ConfigError(
                "affinities cannot be seen in attention that runs neither scaled_dot_product_attention,"
                " nor a softmax over square logits, nor multi_head_attention_forward without bias_k"
                f" and add_zero_attn:\n{listed(hidden)}\nFor Hugging Face models run"
                " model.set_attn_implementation('sdpa'); otherwise set affinity=0"
            )
        freed = sorted(path for path, notes in seen.items() if not notes)
        if freed:
            raise ConfigError(
                "the outputs of the last forward pass were freed before the affinity penalty was"
                " called; call it before backward() and while the outputs or the loss are alive"
            )
        if not seen:
            raise ConfigError(
                "no self-attention ran over plain tensors and its own tokens in the last forward pass"
                " (torch.nn.TransformerEncoder in evaluation may use nested tensors; build it with"
                " enable_nested_tensor=False)"
            )
        return [(self.attention[path], note) for path, notes in seen.items() for note in notes]

    def remove(self) -> None:
        """Take every hook off the model and forget what was seen."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watcher.remove()
        self._seen.clear()
        self._chosen, self._ran = (), False

    def _begin(self, *_: Any) -> None:
        self._watcher.forget()
        self._seen, self._entered, self._skipped = {}, set(), set()
        step = self._step()
        self._chosen, self._ran = () if step is None else self._draw(step), step is not None

    def _draw(self, step: int) -> Sequence[str]:
        paths = list(self.attention)
        if self.layers_per_step == len(paths):
            return paths
        generator = torch.Generator().manual_seed((self._seed + step) % 2**63)
        order = torch.randperm(len(paths), generator=generator).tolist()
        return [paths[index] for index in order[: self.layers_per_step]]

    def _end(self, *_: Any) -> None:
        self._chosen = ()

    def _is_wanted(self, role: AttentionRole) -> bool:
        return role.path in self._chosen

    def _found(self, role: AttentionRole, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        self._entered.add(role.path)
        for call, output in calls:
            if call.attends_to_itself and _can_be_penalised(call):
                self._note(role.path, call, output)
            elif not (call.attends_to_itself or isinstance(call, SoftmaxCall)):
                self._skipped.add(role.path)  # a cache, or another sequence

    def _note(self, path: str, call: AttentionCall, output: Tensor) -> None:
        """Keep ``call`` for as long as the graph of ``output`` lives; without a graph, until the
        next forward pass."""
        notes = self._seen.setdefault(path, [])
        if output.grad_fn is None:
            notes.append(lambda: call)
            return
        metadata: Any = output.grad_fn.metadata
        metadata.setdefault(_KEPT_IN_GRAPH, []).append(call)
        notes.append(weakref.ref(call))


def penalty_of_call(call: AttentionCall, estimate: Callable[..., Tensor]) -> Tensor:
    """Return |A^T A - I|_F^2 of a call, shape (batch, heads), by ``estimate`` of query and key."""
    if isinstance(call, SoftmaxCall):
        # The logits are there already, so probes would save nothing.
        return affinity_penalty_from_logits(call.given)
    if isinstance(call, ScaledDotProductCall):
        masks = {"attn_mask": call.attn_mask, "is_causal": call.is_causal, "scale": call.scale}
        return estimate(call.query, call.key, **masks)
    assert isinstance(call, MultiheadCall)
    query, key, mask, padding = call.projected()
    return estimate(query, key, attn_mask=mask, key_padding_mask=padding)


def _can_be_penalised(call: AttentionCall) -> bool:
    """Tell whether query and key of a call that attends to itself can be read."""
    return not isinstance(call, MultiheadCall) or call.readable
