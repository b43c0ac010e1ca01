"""See queries and keys where attention happens, in any model, without editing it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wellposed.errors import ConfigError, listed
from wellposed.penalize._seen import Seen, SeenLogits, SeenMultihead, SeenQueryKey
from wellposed.roles import AttentionRole

_SOFTMAX = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax})
_KEPT_IN_GRAPH = "wellposed.affinity"


class AffinityCapture:
    """Hooks on a model and its self-attention modules that note query and key of the last forward pass.

    A `TorchFunctionMode` is active only while one of the attention modules runs, so every route to
    `scaled_dot_product_attention`, to a softmax over square logits, or to `multi_head_attention_forward` is seen. What
    was seen is owned by the attention's own autograd node: when the graph is freed, so is the note.

    ``step`` tells the number of the next penalty call, or None if that call will not ask for affinities. Sampled layers
    depend on it and on torch's initial seed alone, so a resumed run draws the same ones.
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
        self._armed = False
        self._ran = False
        self._chosen: frozenset[str] = frozenset()
        self._entered: set[str] = set()
        self._skipped: set[str] = set()
        self._seen: dict[str, list[Callable[[], Seen | None]]] = {}
        self._modes: list[_Watch] = []
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._begin)),
            model.register_forward_hook(_Hook(self._end), always_call=True),
        ]
        for path in self.attention:
            module = model.get_submodule(path)
            self._handles += [
                module.register_forward_pre_hook(_Hook(self._enter, path)),
                module.register_forward_hook(_Hook(self._leave, path), always_call=True),
            ]

    @property
    def scale(self) -> float:
        """Factor that makes a sum over the watched layers an unbiased sum over all of them."""
        return len(self.attention) / len(self._chosen)

    def take(self) -> list[tuple[AttentionRole, Seen]]:
        """Hand over, once, what the last forward pass showed.

        Raises:
            ConfigError: no forward pass was seen since the last call, or attention ran that could not be seen.
        """
        if not self._ran:
            raise ConfigError(
                "the affinity penalty needs one forward pass of the model before each call, and none was seen: run "
                "outputs = model(...) first, on the very module given to OrthogonalityPenalty (a wrapper around it is "
                "fine, a part of it is not), then penalty()"
            )
        seen = {path: [note for ref in refs if (note := ref()) is not None] for path, refs in self._seen.items()}
        entered, self._entered, self._seen, self._ran = self._entered, set(), {}, False
        hidden = sorted(entered - seen.keys() - self._skipped)
        if hidden:
            raise ConfigError(
                "affinities cannot be seen in these attention modules, which ran neither scaled_dot_product_attention, "
                "nor a softmax over square logits, nor multi_head_attention_forward without bias_k and add_zero_attn:\n"
                + listed(hidden)
                + "\nFor Hugging Face models run model.set_attn_implementation('sdpa'); otherwise set affinity=0"
            )
        freed = sorted(path for path, notes in seen.items() if not notes)
        if freed or not seen:
            raise ConfigError(
                "the outputs of the last forward pass were freed before the affinity penalty was called; call it "
                "before backward() and while the outputs or the loss are alive"
                if freed
                else "no self-attention module ran over plain tensors and its own tokens in the last forward pass, so "
                "there is no affinity to penalise (torch.nn.TransformerEncoder in evaluation may use nested tensors; "
                "build it with enable_nested_tensor=False)"
            )
        shown: list[tuple[AttentionRole, Seen]] = []
        for path, notes in seen.items():
            by_call = [note for note in notes if not isinstance(note, SeenLogits)]  # their softmax may be seen as well
            shown += [(self.attention[path], note) for note in by_call or notes]
        return shown

    def remove(self) -> None:
        """Take every hook off the model and forget what was seen."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        self._ran = self._armed = False

    def note(self, path: str, seen: Seen, output: Any) -> None:
        """Keep ``seen`` for as long as the graph of ``output`` lives; without a graph, until the next forward pass."""
        notes = self._seen.setdefault(path, [])
        first = output[0] if isinstance(output, tuple) else output
        if first.grad_fn is None:
            notes.append(lambda: seen)
            return
        first.grad_fn.metadata.setdefault(_KEPT_IN_GRAPH, []).append(seen)
        notes.append(weakref.ref(seen))

    def skip(self, path: str) -> None:
        """Note that the module attended to something other than its own tokens: a cache, or another sequence."""
        self._skipped.add(path)

    def _begin(self, *_: Any) -> None:
        for mode in self._modes:  # left behind by an interrupt inside attention: make it inert
            mode.path = None
        self._modes.clear()
        self._seen, self._entered, self._skipped = {}, set(), set()
        step = self._step()
        self._armed = self._ran = step is not None
        if step is not None:
            self._chosen = self._draw(step)

    def _draw(self, step: int) -> frozenset[str]:
        paths = list(self.attention)
        if self.layers_per_step < len(paths):
            generator = torch.Generator().manual_seed((self._seed + step) % 2**63)
            paths = [paths[index] for index in torch.randperm(len(paths), generator=generator).tolist()]
        return frozenset(paths[: self.layers_per_step])

    def _end(self, *_: Any) -> None:
        self._armed = False

    def _enter(self, path: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nested = any(isinstance(item, Tensor) and item.is_nested for item in inputs)  # torch's evaluation fast path
        if self._armed and path in self._chosen and not nested:
            self._entered.add(path)
            mode = _Watch(self, path, module)
            self._modes.append(mode)
            mode.__enter__()

    def _leave(self, path: str, *_: Any) -> None:
        if self._modes and self._modes[-1].path == path:
            self._modes.pop().__exit__(None, None, None)


class _Watch(TorchFunctionMode):
    """Looks at the calls of one attention module while it runs."""

    def __init__(self, capture: AffinityCapture, path: str, module: nn.Module) -> None:
        super().__init__()
        self.capture = capture
        self.path: str | None = path
        self.module = module

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.path is not None:
            self._look(self.path, output, func, args, kwargs)
        return output

    def _look(
        self, path: str, output: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        seen: Seen | None = None
        if func is F.scaled_dot_product_attention:
            seen = SeenQueryKey.read(*args, **kwargs)
            if seen is None:
                self.capture.skip(path)
        elif func is F.multi_head_attention_forward and isinstance(self.module, nn.MultiheadAttention):
            seen = SeenMultihead.read(self.module, *args, **kwargs)
            if args[0] is not args[1]:
                self.capture.skip(path)
        elif func in _SOFTMAX:
            seen = SeenLogits.read(self.capture.attention[path].num_heads, *args, **kwargs)
        if seen is not None:
            self.capture.note(path, seen, output)


class _Hook:
    """A hook that a copied or pickled model does not take along."""

    observes_only = True
    """It returns nothing and changes nothing, so that a certificate need not refuse the module."""

    def __init__(self, call: Callable[..., None], *bound: Any) -> None:
        self._call = call
        self._bound = bound

    def __call__(self, *args: Any) -> None:
        self._call(*self._bound, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Do nothing: what a copy's hook calls."""
