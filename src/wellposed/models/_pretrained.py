"""What the models of all families share: a checked configuration, recomputed layers, and the table
of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from wellposed.errors import ConfigError
from wellposed.models._checked_config import CheckedConfig


class CheckedPreTrainedModel(PreTrainedModel, ABC):
    """A model whose configuration is checked, whose layers can be recomputed, and whose body has
    `embeddings.token`."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)

    def __init__(self, config: CheckedConfig) -> None:
        self.check_config(config)
        super().__init__(config)

    def check_config(self, config: Any) -> None:
        """Raise `ConfigError` where no model can be built."""
        config.check()
        refuse_attentions(config.output_attentions)

    @abstractmethod
    def _recompute_every(self, every_n_layers: int) -> None:
        """Set every n-th layer, counted over the model, to be recomputed in the backward pass."""

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Recompute every n-th layer, counted over the model; transformers counts layers of its own
        class only."""
        if (
            isinstance(every_n_layers, bool)
            or not isinstance(every_n_layers, int)
            or every_n_layers < 1
        ):
            raise ConfigError(
                f"every_n_layers: received {every_n_layers!r}; expected an integer >= 1"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
        if enable:
            self._recompute_every(every_n_layers)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return cast(Any, self.base_model).embeddings.token

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        cast(Any, self.base_model).embeddings.token = value


def check_cache(
    where: str,
    past_key_values: object,
    use_cache: bool | None,
    *,
    is_causal: bool,
    recomputes: Callable[[], bool],
    has_blocks: bool = True,
) -> bool:
    """Return whether a cache is used; raise `ConfigError` where one was asked for that cannot be.

    Args:
        where: class that was called.
        past_key_values: the cache that was given.
        use_cache: whether one was asked for.
        is_causal: whether tokens are kept from later ones.
        recomputes: whether the backward pass of this call would run layers again.
        has_blocks: whether there is a layer that could keep anything.
    """
    if past_key_values is None and not use_cache:
        return False
    reason = None
    if use_cache is False:
        reason = "past_key_values were given together with use_cache=False; give one of them"
    elif not is_causal:
        reason = (
            "the model is not causal, so earlier tokens change with later ones; call it with"
            " use_cache=False"
        )
    elif not has_blocks:
        reason = "the model has no blocks, so nothing would be kept; call it with use_cache=False"
    elif torch.is_grad_enabled() and recomputes():
        reason = (
            "recomputed blocks (gradient checkpointing) would fill it twice; use torch.no_grad() or"
            " eval()"
        )
    if reason is not None:
        raise ConfigError(f"{where}: no cache can be used: {reason}")
    return True


def refuse_attentions(output_attentions: bool | None) -> None:
    """Raise `ConfigError` where attention weights are asked for.

    >>> refuse_attentions(True)
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: output_attentions=True: the attention kernels never form the
    weights, so none can be \
returned; leave it False, and use wellposed.measure(model, batch) for attention statistics
    """
    if output_attentions:
        raise ConfigError(
            "output_attentions=True: the attention kernels never form the weights, so none can be"
            " returned; leave it False, and use wellposed.measure(model, batch) for attention"
            " statistics"
        )
