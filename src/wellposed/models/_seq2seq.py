"""Encoder-decoder: a target sequence from a source sequence, one token after the other, and its
generation with the length penalty of GNMT."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    ModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)

from wellposed.errors import ConfigError
from wellposed.models import _inputs
from wellposed.models._config import WellposedConfig
from wellposed.models._heads import IGNORED_LABEL, LanguageHead
from wellposed.models._inputs import padding_of, takes
from wellposed.models._wellposed import (
    Embeddings,
    MemoryView,
    WellposedBody,
    WellposedModel,
    WellposedPreTrainedModel,
)
from wellposed.nn import DecoderBlock, memory_mask


class GNMTLengthPenalty(float):
    """A length penalty a with which beam search divides log-probabilities by ((5 + n) / 6)^a, n the
    new tokens.

    Exact. Wu et al. (2016), "Google's Neural Machine Translation System", eq. 14 without coverage;
    Vaswani et al. (2017) take a = 0.6 with it. transformers (and fairseq) divide by n^a. Both are 1
    at n = 1 and grow like n^a, but GNMT's is flatter for short outputs: from 5 to 10 tokens with a
    = 0.6 the divisor grows by 1.28 instead of 1.52, so an a tuned for one is wrong for the other. n
    counts the end token and not the start token, in both.

    transformers' beam search computes ``n ** length_penalty``, here and in its stopping rule, and
    nothing else from it: a number that answers ``n ** self`` with GNMT's divisor is all that it
    takes. Give it as ``model.generate(..., num_beams=4, length_penalty=GNMTLengthPenalty(0.6))`` to
    any model of transformers, or to ours. A saved generation configuration keeps the bare number.

    Raises:
        ConfigError: not a finite number.

    >>> round(10 ** GNMTLengthPenalty(0.6), 4), round(10 ** 0.6, 4)
    (1.7329, 3.9811)
    """

    def __new__(cls, value: float) -> GNMTLengthPenalty:
        if not math.isfinite(value):
            raise ConfigError(f"GNMTLengthPenalty: received {value!r}; expected a finite number")
        return super().__new__(cls, value)

    def __rpow__(self, length: Any, mod: None = None) -> Any:
        return ((5.0 + length) / 6.0) ** float(self)

    def __repr__(self) -> str:
        return f"GNMTLengthPenalty({float(self)!r})"


class WellposedDecoder(WellposedBody):
    """The causal half: blocks of self-attention, cross-attention to the encoder's states, and
    feed-forward.

    Its token embedding is its own, or, with `config.share_embeddings`, the encoder's, handed to
    every call.

    Args:
        config: what the model is made of; it has `config.decoder_depth` blocks.
    """

    cache_class = EncoderDecoderCache

    def __init__(self, config: WellposedConfig) -> None:
        how = {"stack": "decoder", "is_causal": True, "is_part": True}
        super().__init__(config, DecoderBlock, config.decoder_depth, **how)

    @takes(_inputs.DecoderInputs)
    def forward(self, given: _inputs.DecoderInputs) -> BaseModelOutputWithPast:
        """Return the hidden states of every target token; arguments as `WellposedModel.forward`,
        and the memory's.

        Args:
            encoder_hidden_states: (batch, source tokens, D).
            encoder_attention_mask: (batch, source tokens), 1 = real.
            token_embedding: the table of tokens, where the decoder has none.
        """
        cache, memory = self.cache_of(given), given.encoder_hidden_states
        mask = memory_mask(padding_of(given.encoder_attention_mask, *memory.shape[:2]), memory)
        return self.run(
            given,
            cache,
            memory,
            reading=lambda index: {
                "memory_mask": mask,
                "memory_cache": None if cache is None else MemoryView(cache, index),
            },
            table=given.token_embedding,
        )

    def _new_cache(self) -> EncoderDecoderCache:
        return EncoderDecoderCache(super()._new_cache(), super()._new_cache())


class WellposedSeq2SeqModel(WellposedPreTrainedModel):
    """`E = encoder(source)`, then `decoder(target, E)`: the hidden states of every target token.

    Padding of either side changes nothing for real tokens. No target token depends on a later one.

    Args:
        config: what the model is made of; `num_hidden_layers` blocks in the encoder,
            `decoder_depth` in the decoder.
        is_part: whether a larger model holds this one, and initialises it as a whole.
    """

    def __init__(self, config: WellposedConfig, *, is_part: bool = False) -> None:
        config = as_encoder_decoder(config, type(self).__name__)
        super().__init__(config)
        self._is_part = is_part
        self.encoder = WellposedModel(config, is_part=True)
        self.decoder = WellposedDecoder(config)
        self.post_init()

    @property
    def embeddings(self) -> Embeddings:
        """The embeddings of the source, whose tokens are the target's where they are shared."""
        return self.encoder.embeddings

    @takes(_inputs.Seq2SeqInputs)
    def forward(self, given: _inputs.Seq2SeqInputs) -> Seq2SeqModelOutput:
        """Return the hidden states of every target token; arguments as
        `WellposedForSeq2SeqLM.forward`."""
        read = _as_output(given.encoder_outputs) or self.encoder(
            given.input_ids,
            given.attention_mask,
            given.position_ids,
            inputs_embeds=given.inputs_embeds,
            output_hidden_states=given.output_hidden_states,
            return_dict=True,
        )
        memory = cast(Tensor, read.last_hidden_state)
        output = self.decoder(
            given.decoder_input_ids,
            given.decoder_attention_mask,
            given.decoder_position_ids,
            encoder_hidden_states=memory,
            encoder_attention_mask=given.attention_mask,
            token_embedding=self.embeddings.token if self.config.share_embeddings else None,
            past_key_values=given.past_key_values,
            inputs_embeds=given.decoder_inputs_embeds,
            use_cache=given.use_cache,
            output_hidden_states=given.output_hidden_states,
            output_attentions=given.output_attentions,
            return_dict=True,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=output.last_hidden_state,
            past_key_values=output.past_key_values,
            decoder_hidden_states=output.hidden_states,
            encoder_last_hidden_state=cast(Any, memory),
            encoder_hidden_states=read.hidden_states,
        )


def _as_output(given: ModelOutput | tuple[Tensor, ...] | None) -> BaseModelOutput | None:
    """Return a given encoder output by the names of its entries."""
    if not isinstance(given, tuple):
        return cast("BaseModelOutput | None", given)
    last, *states = cast("tuple[Any, ...]", given)
    return BaseModelOutput(last_hidden_state=last, hidden_states=states[0] if states else None)


class WellposedForSeq2SeqLM(
    LanguageHead[Seq2SeqLMOutput], WellposedPreTrainedModel, GenerationMixin
):
    """`logits_t = W decoder(target_1..t, encoder(source))`: the next target token from the source
    and earlier ones.

    Causality in the target is exact, and so is independence of padding on either side. `W` is the
    target's token embedding where tied. Vaswani et al. (2017).

    Args:
        config: what the model is made of: `num_hidden_layers` blocks in the encoder,
            `num_decoder_layers` in the decoder (as many where None), `share_embeddings`,
            `tie_word_embeddings`, and every other option for both. The model keeps a copy with
            `is_encoder_decoder=True`.

    Raises:
        ConfigError: the configuration is not usable, or says `is_causal=True`.

    Cost: that of its blocks; in generation the source is read once, and its keys and values are
    made once a layer.
    When not to use: one sequence (`WellposedForCausalLM`), or tagging and classifying the source.

    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    >>> model = WellposedForSeq2SeqLM(config)
    >>> model(input_ids=torch.tensor([[5, 6, 7]]), decoder_input_ids=torch.tensor([[1, 8]])).logits.shape
    torch.Size([1, 2, 256])
    >>> model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False).shape[0]
    1
    """

    output_class = Seq2SeqLMOutput

    def __init__(self, config: WellposedConfig) -> None:
        config = as_encoder_decoder(config, type(self).__name__)
        super().__init__(config)
        table = "model.encoder" if config.share_embeddings else "model.decoder"
        self._tied_weights_keys = {"lm_head.weight": f"{table}.embeddings.token.weight"}
        self.model = WellposedSeq2SeqModel(config, is_part=True)
        self.add_head(config.hidden_size, config.vocab_size)
        self.post_init()

    @takes(_inputs.Seq2SeqLMInputs)
    def forward(self, given: _inputs.Seq2SeqLMInputs) -> Seq2SeqLMOutput:
        """Return the logits of the next target token at every position and, with labels, their mean
        cross-entropy.

        Args:
            input_ids: int (batch, source tokens).
            attention_mask: (batch, source tokens), 1 = real, 0 = padding, on any side; None = all
                real.
            decoder_input_ids: int (batch, target tokens), from `decoder_start_token_id` on. Where
                absent and labels are
                given: the labels, shifted to the right by one.
            decoder_attention_mask: (batch, cached + target tokens), 1 = real. Padding on the right
                needs none.
            position_ids, decoder_position_ids: counted over real tokens where None.
            encoder_outputs: the encoder's output, in place of the source, read once.
            past_key_values: an `EncoderDecoderCache` of earlier target tokens; extended in place.
            inputs_embeds, decoder_inputs_embeds: vectors (batch, tokens, D) in place of ids, before
                the factor sqrt(D).
            labels: int (batch, target tokens); labels t belong to logits t, so they are not
                shifted; -100 is not counted.
            use_cache: make and return a cache; only where asked for, or where one is given.
            output_hidden_states: also return the states of both sides.
            output_attentions: must not be True: the fused kernels never form the weights.
            logits_to_keep: only the last so many positions, or the positions in a tensor; 0 = all.
            num_items_in_batch: divide the summed loss by this, in place of the number of labels.

        Returns:
            `loss` where labels are given, in nats; `logits` (batch, kept target tokens,
            vocab_size); `past_key_values`; `encoder_last_hidden_state`; `encoder_hidden_states`,
            `decoder_hidden_states`.

        Raises:
            ShapeError: masks, positions, lengths or (on the CPU) tokens that do not fit.
            ConfigError: attention weights are asked for, a cache that cannot be used, or labels
                without a token to start with.
        """
        body = given.of_body()
        ids = given.decoder_input_ids
        target = given.decoder_inputs_embeds if ids is None else ids
        if target is None and given.labels is not None:
            body["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(given.labels)
        return self.answer(self.run_body(**body), given, given.labels)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return `[start, labels_1, ..., labels_(T-1)]`, with padding in the place of -100.

        Raises:
            ConfigError: the configuration names no token to start with, or no padding where a label
                is -100.
        """
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        start = self.config.bos_token_id if start is None else start
        if start is None:
            raise ConfigError(
                "labels without decoder_input_ids: the configuration has neither"
                " decoder_start_token_id nor bos_token_id; set one, or give decoder_input_ids"
            )
        before = torch.cat((labels.new_full((labels.shape[0], 1), start), labels[:, :-1]), dim=1)
        # where no padding token is named any token serves: what follows it is not counted either
        return before.masked_fill(before == IGNORED_LABEL, start if padding is None else padding)

    @staticmethod
    def _reorder_cache(past_key_values: Any, beam_idx: Tensor) -> EncoderDecoderCache:
        """Reorder the target's keys and values; beams of one sentence read the same source."""
        past_key_values.self_attention_cache.reorder_cache(cast(Any, beam_idx))
        return past_key_values

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Change the number of tokens of source and target alike; arguments as in transformers."""
        source = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        embeddings, rows = self.model.decoder.embeddings, source.num_embeddings
        if embeddings.token is not None and embeddings.token.num_embeddings != rows:
            embeddings.token = self._get_resized_embeddings(
                embeddings.token, rows, mean_resizing=mean_resizing
            )
            self.tie_weights()
        return cast(nn.Embedding, source)


def as_encoder_decoder(config: WellposedConfig, where: str) -> WellposedConfig:
    """Return a copy marked as an encoder-decoder's; raise `ConfigError` where none can be built."""
    if config.is_causal:
        raise ConfigError(f"{where}: received is_causal=True; only its decoder is, leave None")
    if config.decoder_depth < 1:
        raise ConfigError(
            f"{where}: num_hidden_layers=0 without num_decoder_layers: a decoder without blocks"
            " reads no source; give num_decoder_layers >= 1"
        )
    if config.is_encoder_decoder:
        return config
    config = copy.copy(config)
    config.is_encoder_decoder = True
    return config
