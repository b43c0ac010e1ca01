"""A trial whether logits follow the rows of query and key that QK-clip scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from wellposed.constrain.logits._capped import CappedAttention
from wellposed.constrain.logits._rows import heads_and_powers, scale_, scaled_parameters
from wellposed.errors import ConfigError, is_about_resources, listed
from wellposed.hooks import (
    PAST_HOOKS,
    AttentionCall,
    AttentionWatcher,
    MultiheadCall,
    call_model,
    is_fsdp_module,
    own_batch,
    quiet_run,
)
from wellposed.interrupts import Undo, undoing
from wellposed.roles import AttentionRole

_PLAIN = (Tensor, int, float, str, type(None), torch.dtype, torch.device)
"""Arguments that a call does not change; a cache of keys is none."""


def tried_attention(
    roles: Sequence[AttentionRole],
    model: nn.Module,
    owners: Mapping[Any, Optimizer],
    bound: float,
    batch: Any,
) -> list[CappedAttention]:
    """Return the modules to scale; raise `ConfigError` if their logits do not follow the rows.

    To test that, the heads of each are scaled by 1/16 and 1/256 once and restored.

    Cost: one pass of the model, and two calls of each attention. A pass for each under FSDP2, as a
    part cannot run by itself, and for an attention that does not repeat itself.
    """
    batch = own_batch(model) if batch is None else batch
    if batch is None:
        raise ConfigError(
            f"constrain_: to='logits' runs {type(model).__name__} once to check that logits follow"
            " the rows that are scaled; give batch=, the input of the model"
        )

    weights = [CappedAttention(role, model, owners, bound) for role in roles]
    stored = tuple(model.parameters())  # scaled, then restored bit for bit
    with (
        undoing() as undo,
        quiet_run(model),
        torch.autograd._unsafe_preserve_version_counter(stored),
    ):
        passes = _Passes(model, weights, batch, undo)
        problems = [_problem(weight, passes) for weight in weights]

    wrong = [
        f"{weight.path}: {problem}"
        for weight, problem in zip(weights, problems, strict=True)
        if problem is not None
    ]
    if wrong:
        raise ConfigError(
            "constrain_: to='logits' needs softmax(s q k^T) with q and k linear in their weights: no"
            " L2, cosine or capped attention, normalised queries or keys, position biases or adapters."
            f" Leave these modules out with where=, or merge adapters first:\n{listed(wrong)}"
        )

    return weights


class _Passes:
    """Logits of attention modules in one pass of the model, and in a later call of one of them."""

    def __init__(
        self, model: nn.Module, modules: Sequence[CappedAttention], batch: Any, undo: Undo
    ) -> None:
        self._model = model
        self._batch = batch
        self._logits: dict[str, Tensor] = {}
        self._inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.called: set[str] = set()
        # A part of a sharded model has no weights outside of a pass of the whole.
        self._can_repeat = not any(map(is_fsdp_module, model.modules()))
        undo.hook(AttentionWatcher, model, [attention.role for attention in modules], self._see)
        for attention in modules:
            undo.hook(attention.module.register_forward_hook, self._call(attention))

        for attention in modules if self._can_repeat else ():
            # Before others, which may change what it is called with: they will again.
            undo.hook(
                attention.module.register_forward_pre_hook,
                self._note(attention),
                with_kwargs=True,
                prepend=True,
            )
        self._run()
        self.first = self._logits.copy()

    def again(self, weight: CappedAttention) -> Tensor | None:
        """Return the logits of a module in another call, or None if there were none."""
        if not self._repeats(weight):
            self._logits.clear()
            self._run()
        return self._logits.get(weight.role.path)

    def try_alone(self, weight: CappedAttention) -> None:
        """Call a module alone; unless that has the logits of the pass, it is never done again."""
        first = self.first.get(weight.role.path)
        now = self._logits.get(weight.role.path) if self._repeats(weight) else None
        is_alike = (
            first is not None
            and now is not None
            and first.shape == now.shape
            and torch.allclose(first, now, rtol=1e-4, atol=1e-6)
        )
        if not is_alike:
            self._inputs.pop(weight.role.path, None)

    def _run(self) -> None:
        """Call the model, then drop gathered weights: they would not follow their shards."""
        call_model(self._model, self._batch)
        sharded: list[Any] = list(filter(is_fsdp_module, self._model.modules()))
        for module in sharded:
            module.reshard()

    def _repeats(self, weight: CappedAttention) -> bool:
        """Call a module alone on the inputs that it had; return whether it could be."""
        if weight.role.path not in self._inputs:
            return False
        args, kwargs = self._inputs[weight.role.path]
        self._logits.clear()
        try:
            weight.module(*args, **kwargs)
        except Exception as error:  # anybody's module, which may need what a pass sets
            if is_about_resources(error):
                raise
            del self._inputs[weight.role.path]
            return False
        return True

    def _call(self, weight: CappedAttention) -> Any:
        return lambda *_: self.called.add(weight.role.path)

    def _note(self, weight: CappedAttention) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs.setdefault(weight.role.path, tree_map(_unchanging, (args, kwargs)))

        return note

    def _see(self, role: AttentionRole, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        # All calls: the module may contain another attention.
        every: list[Tensor] = []
        for call, _ in calls:
            if not isinstance(call, MultiheadCall) or call.readable:
                every.append(call.logits().double().transpose(0, 1).flatten(1))
        if every:
            self._logits.setdefault(role.path, torch.cat(every, 1))


def _unchanging(value: Any) -> Any:
    """Return an argument, or None for one that a call may change."""
    return value if isinstance(value, _PLAIN) else None


def _problem(weight: CappedAttention, passes: _Passes) -> str | None:
    """Return why the logits of a module do not follow the rows, or None."""
    passes.try_alone(weight)
    heads = torch.arange(weight.num_heads, device=weight.parameter.device)
    factors = 16.0 ** -(1.0 + heads % 2)
    before = passes.first.get(weight.role.path)
    after = _scaled_logits(weight, factors, passes)
    if before is None or after is None or len(before) != len(factors):
        past = f": {PAST_HOOKS}" if weight.role.path not in passes.called else ""
        return f"no logits of {len(factors)} heads were seen{past}"

    # Scaling may bring a key near enough to the others to be open, or the reverse.
    closed = before.isneginf() | after.isneginf()
    expected = before * factors.to(before)[:, None]
    off = (after - expected).masked_fill_(closed, 0.0).abs().amax(1)
    expected.masked_fill_(closed, 0.0)
    follows = not bool((off > 1e-3 * expected.abs().amax(1)).any())
    return None if follows else "scaling rows of its heads does not scale its logits"


def _scaled_logits(weight: CappedAttention, factors: Tensor, passes: _Passes) -> Tensor | None:
    """Return the logits with heads scaled by the factors, which are taken back."""
    # Not powers of 1/2: with those the term |k|^2 of L2 attention would follow.
    parts = [
        replace(part, powers=part.powers.where(part.powers != 0.5, power))
        for part, power in zip(weight.parts, (0.75, 0.25), strict=False)
    ]
    scaled = scaled_parameters(parts, len(factors))
    saved = [(part.local, part.local.clone()) for part in weight.scaled]
    with undoing() as restoring:
        for local, value in saved:
            restoring.later(local.copy_, value)
        scale_([scaled], heads_and_powers([scaled], len(factors)), factors[None])
        return passes.again(weight)
