"""Arguments of the models' forward calls, and the base class of all models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.utils.generic import can_return_tuple

from wellposed.call_checks import known_fields
from wellposed.errors import ConfigError, ShapeError
from wellposed.models._config import CheckedConfig
from wellposed.nn import INTEGERS, check_length, on_host


@dataclass
class SequenceInputs:
    """One sequence for each row of a batch."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    _: KW_ONLY
    inputs_embeds: Tensor | None = None
    output_hidden_states: bool | None = None
    output_attentions: bool | None = None


@dataclass(kw_only=True)
class ModelInputs(SequenceInputs):
    """Inputs of a body: a sequence, and the cache of earlier tokens."""

    past_key_values: Any = None
    use_cache: bool | None = None
    names: ClassVar = ("input_ids", "inputs_embeds")
    """Names of tokens and of vectors in messages."""


@dataclass(kw_only=True)
class DecoderInputs(ModelInputs):
    """Inputs of a decoder: its own sequence, and the encoder's states."""

    encoder_hidden_states: Tensor
    encoder_attention_mask: Tensor | None = None
    token_embedding: torch.nn.Module | None = None
    names: ClassVar = ("decoder_input_ids", "decoder_inputs_embeds")


@dataclass
class Seq2SeqInputs:
    """A source and a target for each row of a batch."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    decoder_input_ids: Tensor | None = None
    decoder_attention_mask: Tensor | None = None
    _: KW_ONLY
    position_ids: Tensor | None = None
    decoder_position_ids: Tensor | None = None
    encoder_outputs: ModelOutput | tuple[Tensor, ...] | None = None
    past_key_values: Cache | None = None
    inputs_embeds: Tensor | None = None
    decoder_inputs_embeds: Tensor | None = None
    use_cache: bool | None = None
    output_hidden_states: bool | None = None
    output_attentions: bool | None = None


@dataclass(kw_only=True)
class LabelInputs:
    """Arguments that a head reads and its body does not, labels first."""

    labels: Tensor | None = None
    head_only: ClassVar = ("labels", "logits_to_keep", "num_items_in_batch")

    def of_body(self) -> dict[str, Any]:
        """Return the arguments of the body."""
        return {name: value for name, value in self.__dict__.items() if name not in self.head_only}


@dataclass(kw_only=True)
class TokenLabelInputs(LabelInputs):
    """Further arguments of a model with a label for each token."""

    logits_to_keep: int | Tensor = 0
    num_items_in_batch: Tensor | int | None = None


@dataclass(kw_only=True)
class TokenInputs(TokenLabelInputs, SequenceInputs):
    """Inputs of an encoder with a label for each token."""


@dataclass(kw_only=True)
class CausalLMInputs(TokenLabelInputs, ModelInputs):
    """Inputs of a language model."""


@dataclass(kw_only=True)
class Seq2SeqLMInputs(TokenLabelInputs, Seq2SeqInputs):
    """Inputs of an encoder-decoder with an output layer."""


@dataclass(kw_only=True)
class ClassifierInputs(LabelInputs, SequenceInputs):
    """Inputs of a classifier of one sequence."""


@dataclass
class PairInputs:
    """Inputs of a classifier of two sequences."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    input_ids_pair: Tensor | None = None
    attention_mask_pair: Tensor | None = None
    _: KW_ONLY
    inputs_embeds: Tensor | None = None
    inputs_embeds_pair: Tensor | None = None
    labels: Tensor | None = None


def takes(inputs: type[Any]) -> Callable[[Callable[[Any, Any], Any]], Callable[..., Any]]:
    """Return a decorator of `forward(self, inputs)` that takes the fields of ``inputs``."""
    return lambda forward: can_return_tuple(known_fields(inputs)(forward))


class Tokens(NamedTuple):
    """The checked inputs of a body."""

    length: int
    num_keys: int
    """Cached tokens included."""
    padding: Tensor | None
    """(batch, keys), True = padding; None if all tokens are real."""
    positions: Tensor


def read_inputs(
    inputs: ModelInputs,
    config: Any,
    where: str,
    *,
    cached: int = 0,
    limit: int | None = None,
    note: str = "",
) -> Tokens:
    """Check the inputs of a call of ``where``; return their sizes, padding and positions.

    Args:
        inputs: of the call.
        config: `vocab_size` and `hidden_size` limit tokens and vectors.
        where: class that was called.
        cached: number of earlier tokens.
        limit: positions in the table.
        note: meaning of vectors, for messages.

    Raises:
        ShapeError: not exactly one of tokens and vectors, or arguments that do not fit.
    """
    input_ids = inputs.input_ids
    vectors = inputs.inputs_embeds
    name, other = inputs.names
    received = input_ids if vectors is None else vectors
    if received is None or (input_ids is None) == (vectors is None):
        count = "neither" if received is None else "both"
        raise ShapeError(f"{where}: received {count} of {name} and {other}; give one")

    if vectors is None:
        check_tokens(received, config.vocab_size, name=name)
    elif vectors.dim() != 3 or vectors.shape[-1] != config.hidden_size:
        raise ShapeError(
            f"{other}: received shape {tuple(vectors.shape)}; expected (batch, tokens,"
            f" {config.hidden_size}){note}"
        )
    elif not vectors.is_floating_point():
        raise ShapeError(f"{other}: received {vectors.dtype}; expected floating vectors{note}")

    batch, length = received.shape[:2]
    num_keys = length + cached
    padding = padding_of(inputs.attention_mask, batch, num_keys)
    positions = inputs.position_ids
    if positions is None:
        positions = positions_of(padding, length, num_keys, received.device)
        # The number of keys bounds all positions: only beyond the limit are values read.
        if limit is not None and num_keys > limit:
            compiling = torch.compiler.is_compiling()
            check_length(num_keys if compiling else int(positions.max()) + 1, limit, where)
    else:
        check_positions(positions, (batch, length), limit, where)

    return Tokens(length, num_keys, padding, positions)


def check_tokens(input_ids: Tensor, vocab_size: int, *, name: str = "input_ids") -> None:
    """Raise `ShapeError` unless ids are integers (batch, tokens), on the CPU in the vocabulary."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ShapeError(f"{name}: received shape {(*input_ids.shape,)}; expected (batch, tokens)")
    if input_ids.dtype not in INTEGERS:
        raise ShapeError(f"{name}: received {input_ids.dtype}; expected torch.int64 or torch.int32")
    index = first_outside(input_ids, vocab_size)
    if index is not None:
        row, column = index
        raise ShapeError(
            f"{name}: received token {int(input_ids[index])} at row {row}, position {column};"
            f" expected tokens in [0, {vocab_size}); use the tokenizer that the model was built"
            " for, or call model.resize_token_embeddings"
        )


def first_outside(ids: Tensor, size: int) -> tuple[int, ...] | None:
    """Return the index of the first number outside [0, size); not checked on accelerators."""
    if not on_host(ids) or not ids.numel():
        return None
    smallest, largest = torch.aminmax(ids)
    if smallest >= 0 and largest < size:
        return None
    return tuple(((ids < 0) | (ids >= size)).nonzero()[0].tolist())


def padding_of(attention_mask: Tensor | None, batch: int, num_keys: int) -> Tensor | None:
    """Return the key padding mask, True = padding; None if all tokens are real.

    On an accelerator a mask is always made, as looking for padding would synchronise.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch, num_keys):
        raise ShapeError(
            f"attention_mask: received shape {tuple(attention_mask.shape)}; expected"
            f" {(batch, num_keys)}: one entry per token, cached tokens included, 1 = real and 0 ="
            " padding"
        )
    if on_host(attention_mask) and bool(attention_mask.all()):
        return None
    return attention_mask == 0


def positions_of(
    key_padding_mask: Tensor | None, num_queries: int, num_keys: int, device: torch.device
) -> Tensor:
    """Return the positions of the last `num_queries` tokens, counted over real tokens only."""
    if key_padding_mask is None:
        return torch.arange(num_keys - num_queries, num_keys, device=device)[None]
    counted = (~key_padding_mask).cumsum(dim=1)[:, num_keys - num_queries :]
    return (counted - 1).clamp(min=0)


def check_positions(
    positions: Tensor, tokens: tuple[int, int], limit: int | None, where: str
) -> None:
    """Raise `ShapeError` unless positions are integers (batch | 1, tokens) within the table."""
    batch, length = tokens
    if positions.dtype not in INTEGERS or positions.shape not in (tokens, (1, length)):
        raise ShapeError(
            f"{where}: received position_ids in {positions.dtype} of shape"
            f" {tuple(positions.shape)}; expected torch.int64 or torch.int32, ({batch} or 1,"
            f" {length})"
        )
    if limit is None or not on_host(positions) or not positions.numel():
        return
    if int(positions.min()) < 0:
        raise ShapeError(f"{where}: received position_ids below 0; expected those in [0, {limit})")
    check_length(int(positions.max()) + 1, limit, where)


class CheckedPreTrainedModel(PreTrainedModel):
    """A model with a checked configuration, recomputable layers, and `embeddings.token`."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "token"
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)
    is_causal: bool
    cache_class: ClassVar[type[Any]] = Cache
    """Type of a body's cache."""

    def __init__(self, config: CheckedConfig) -> None:
        self.check_config(config)
        super().__init__(config)

    def check_config(self, config: Any) -> None:
        """Raise `ConfigError` if no model can be built."""
        config.check()
        refuse_attentions(config.output_attentions)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Recompute every layer; transformers counts layers of its own class only."""
        if every_n_layers != 1:
            raise ConfigError(
                f"every_n_layers: received {every_n_layers!r}; expected 1: each layer is recomputed"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)

    def cache_of(self, inputs: ModelInputs) -> Any:
        """Return the cache of a call, made if the call asks for one; raise if none can be used."""
        refuse_attentions(inputs.output_attentions)
        cache = inputs.past_key_values
        expected = self.cache_class
        if cache is None and not inputs.use_cache:
            return None

        off = "call it with use_cache=False"
        recomputed = torch.is_grad_enabled() and self._recomputes()
        reasons = {
            "past_key_values were given with use_cache=False; give one": inputs.use_cache is False,
            f"the model is not causal: later tokens change earlier ones; {off}": not self.is_causal,
            f"the model has no blocks, so none fills it; {off}": not self._has_blocks(),
            "recomputed blocks would fill it twice; use torch.no_grad() or eval()": recomputed,
            f"received {type(cache).__name__}; expected {expected.__name__}": (
                not isinstance(cache, expected | None)
            ),
        }
        reason = next((why for why, holds in reasons.items() if holds), None)
        if reason is not None:
            raise ConfigError(f"{type(self).__name__}: no cache can be used: {reason}")

        return self._new_cache() if cache is None else cache

    def _has_blocks(self) -> bool:
        """Return whether any layer could fill a cache."""
        return True

    def _recomputes(self) -> bool:
        """Return whether the backward pass of a call would run layers again."""
        raise NotImplementedError

    def _new_cache(self) -> Any:
        """Return an empty cache."""
        raise NotImplementedError

    def keeps_states(self, inputs: Any) -> bool:
        """Return whether a call must return all hidden states."""
        asked = inputs.output_hidden_states
        return bool(self.config.output_hidden_states if asked is None else asked)


def refuse_attentions(output_attentions: bool | None) -> None:
    """Raise `ConfigError` if a call asks for attention weights."""
    if output_attentions:
        raise ConfigError(
            "output_attentions=True: the attention kernels never form the weights, so none can be"
            " returned; leave it False, and use wellposed.measure(model, batch) for attention"
            " statistics"
        )
