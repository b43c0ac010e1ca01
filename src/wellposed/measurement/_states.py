"""Hidden states of any model, layer by layer, and which of their tokens are real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, ConvergenceError, ShapeError, listed
from wellposed.watch import quiet_run

States = Sequence[Tensor] | Any
"""``(x_0, ..., x_L)``, each (batch, tokens, width), or a model output that holds them as
``hidden_states``."""


def hidden_states(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return ``(x_0, x_1, ..., x_L)``: the input of the first layer, then the output of every
    layer.

    Status: exact: one forward pass in evaluation mode, without gradients; the model is left as it
    was (training flags, random state). Source: Hugging Face's ``output_hidden_states``; some
    families put the last norm into ``x_L``.

    Args:
        model: a model whose ``forward`` takes ``output_hidden_states=True``.
        batch: its keyword arguments, such as ``{"input_ids": ..., "attention_mask": ...}``.

    Returns:
        L + 1 tensors (batch, tokens, width); of an encoder-decoder those of the encoder.

    Raises:
        ConfigError: the model does not take the keyword, or its output holds no hidden states.

    Cost: one forward pass; memory for all states. When not to use: on batches whose states do not
    fit in memory; take a part of the batch.

    >>> class Two(nn.Module):
    ...     def forward(self, x, output_hidden_states=False):
    ...         return {"hidden_states": (x, 2 * x)}
    >>> [state.sum().item() for state in hidden_states(Two(), {"x": torch.ones(1, 2, 3)})]
    [6.0, 12.0]
    """
    with quiet_run(model):
        try:
            output = model(**batch, output_hidden_states=True)
        except TypeError as error:
            raise ConfigError(
                f"{type(model).__name__} cannot be asked for its hidden states: {error}. Give the"
                " states themselves, a sequence of tensors (batch, tokens, width) collected by"
                " forward hooks"
            ) from error
    return read_states(output)


def read_states(states: States) -> tuple[Tensor, ...]:
    """Return the states of a sequence or a model output, detached and checked."""
    found = states
    for name in ("hidden_states", "encoder_hidden_states"):
        value = states.get(name) if isinstance(states, Mapping) else getattr(states, name, None)
        if value is not None:
            found = value
            break
    is_sequence = isinstance(found, (tuple, list))
    if not is_sequence or not all(isinstance(state, Tensor) for state in found):
        raise ConfigError(
            f"received {type(states).__name__} without hidden_states; expected a sequence of"
            " tensors (batch, tokens, width), or a model output made with"
            " output_hidden_states=True"
        )
    found = tuple(state.detach() for state in found)
    if len(found) < 2:
        expected = "expected the input of the first layer and its output"
        raise ShapeError(f"received {len(found)} hidden states; {expected}")
    wrong = [
        f"state {index}: {state.dtype} {tuple(state.shape)}"
        for index, state in enumerate(found)
        if state.ndim != 3 or not state.is_floating_point() or state.shape[:2] != found[0].shape[:2]
    ]
    if wrong:
        raise ShapeError(
            "hidden states are floating tensors (batch, tokens, width) with the"
            f" {tuple(found[0].shape[:2])} tokens of state 0:\n{listed(wrong)}"
        )
    return found


def checked_mask(attention_mask: Tensor | None, first: Tensor) -> Tensor:
    """Return the mask as booleans (batch, tokens), True for real tokens; all are real without
    one."""
    if attention_mask is None:
        return torch.ones(first.shape[:2], dtype=torch.bool, device=first.device)
    if attention_mask.shape != first.shape[:2]:
        expected = f"expected {tuple(first.shape[:2])} (batch, tokens), 1 for real tokens"
        raise ShapeError(f"attention_mask has shape {tuple(attention_mask.shape)}, {expected}")
    return attention_mask.to(first.device) != 0


def refuse_non_finite(states: Sequence[Tensor], real: Tensor, what: str) -> None:
    """Raise `ConvergenceError` that names every state in which real tokens hold NaN or infinity,
    and how many."""
    bad = [
        f"state {index}: {int(outside.sum())} of {outside.numel()} values, in"
        f" {int(outside.any(-1).sum())} tokens"
        for index, state in enumerate(states)
        if bool((outside := ~torch.isfinite(state[real])).any())
    ]
    if bad:
        raise ConvergenceError(
            f"{what}: states hold NaN or infinity, so the model has diverged and there is nothing"
            f" to measure:\n{listed(bad)}\nload an earlier checkpoint, or look for the layer at"
            " which it starts"
        )


def sequences(states: Sequence[Tensor], real: Tensor) -> Iterator[list[Tensor]]:
    """Yield, for each sequence of the batch, its real tokens in every state, float64 (float32 on
    MPS)."""
    wide = torch.float32 if real.device.type == "mps" else torch.float64
    for index, keep in enumerate(real):
        yield [state[index][keep].to(wide) for state in states]
