"""What the models of all families share: a checked configuration, recomputed layers, caches, and
the table of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from wellposed.errors import ConfigError
from wellposed.models._config import CheckedConfig
from wellposed.models._inputs import ModelInputs
from wellposed.options import Size, fits


class CheckedPreTrainedModel(PreTrainedModel, ABC):
    """A model whose configuration is checked, whose layers can be recomputed, and whose body has
    `embeddings.token`."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "token"
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)
    is_causal: bool
    cache_class: ClassVar[type[Any]] = Cache
    """What a body keeps of earlier tokens."""

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
        if not fits(every_n_layers, Size):
            raise ConfigError(
                f"every_n_layers: received {every_n_layers!r}; expected an integer >= 1"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
        if enable:
            self._recompute_every(every_n_layers)

    def cache_of(self, given: ModelInputs) -> Any:
        """Return the cache of a call to a body, made where one was asked for and none given; None
        where none is used.

        Raises:
            ConfigError: no cache can be used, or attention weights are asked for.
        """
        refuse_attentions(given.output_attentions)
        cache, expected = given.past_key_values, self.cache_class
        if cache is None and not given.use_cache:
            return None
        reason = None
        if given.use_cache is False:
            reason = "past_key_values were given together with use_cache=False; give one of them"
        elif not self.is_causal:
            reason = (
                "the model is not causal, so earlier tokens change with later ones; call it with"
                " use_cache=False"
            )
        elif not self._has_blocks():
            reason = (
                "the model has no blocks, so nothing would be kept; call it with use_cache=False"
            )
        elif torch.is_grad_enabled() and self._recomputes():
            reason = (
                "recomputed blocks (gradient checkpointing) would fill it twice; use"
                " torch.no_grad() or eval()"
            )
        elif not isinstance(cache, expected | None):
            reason = f"received {type(cache).__name__}; expected {expected.__name__}"
        if reason is not None:
            raise ConfigError(f"{type(self).__name__}: no cache can be used: {reason}")
        return self._new_cache() if cache is None else cache

    def _has_blocks(self) -> bool:
        """Return whether there is a layer that could keep anything."""
        return True

    def _recomputes(self) -> bool:
        """Return whether the backward pass of a call would run layers again."""
        raise NotImplementedError

    def _new_cache(self) -> Any:
        """Return an empty cache."""
        raise NotImplementedError

    def keeps_states(self, given: Any) -> bool:
        """Return whether a call is to return all hidden states."""
        asked = given.output_hidden_states
        return bool(self.config.output_hidden_states if asked is None else asked)


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
