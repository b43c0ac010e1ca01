"""Encoder-decoder models, and the length penalty of GNMT for their beam search."""

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
    """A length penalty a: beam search divides log-probabilities by ((5 + n) / 6)^a, n the new
    tokens.

    Exact. Wu et al. (2016), "Google's Neural Machine Translation System", eq. 14 without coverage;
    Vaswani et al. (2017) use it with a = 0.6. Transformers divides by n^a: from 5 to 10 tokens the
    divisor grows by 1.52, here by 1.28, so an a tuned for one is wrong for the other. n counts the
    end token and not the start token, in both.

    Pass it as ``model.generate(..., num_beams=4, length_penalty=GNMTLengthPenalty(0.6))`` to any
    model of transformers: beam search uses it only in ``n ** length_penalty``. A saved generation
    configuration keeps the bare number. Anything but a finite number is a `ConfigError`.

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
    """The causal half: self-attention, cross-attention to the encoder's states, and feed-forward.

    With `config.share_embeddings`, each call passes it the encoder's token embedding.
    """

    cache_class = EncoderDecoderCache

    def __init__(self, config: WellposedConfig) -> None:
        options = {"stack": "decoder", "is_causal": True, "is_part": True}
        super().__init__(config, DecoderBlock, config.decoder_depth, **options)

    @takes(_inputs.DecoderInputs)
    def forward(self, inputs: _inputs.DecoderInputs) -> BaseModelOutputWithPast:
        """Return the hidden states of every target token; other arguments as
        `WellposedModel.forward`.

        Keyword Args:
            encoder_hidden_states (Tensor): (batch, source tokens, D).
            encoder_attention_mask (Tensor): (batch, source tokens), 1 = real.
            token_embedding (Module): the table of tokens, if the decoder has none.
        """
        cache = self.cache_of(inputs)
        memory = inputs.encoder_hidden_states
        mask = memory_mask(padding_of(inputs.encoder_attention_mask, *memory.shape[:2]), memory)
        return self.run(
            inputs,
            cache,
            memory,
            reading=lambda index: {
                "memory_mask": mask,
                "memory_cache": None if cache is None else MemoryView(cache, index),
            },
            table=inputs.token_embedding,
        )

    def _new_cache(self) -> EncoderDecoderCache:
        return EncoderDecoderCache(super()._new_cache(), super()._new_cache())


class WellposedSeq2SeqModel(WellposedPreTrainedModel):
    """`E = encoder(source)`, then `decoder(target, E)`: the hidden states of every target token.

    Padding of either side changes nothing for real tokens. No target token depends on a later one.
    Set `is_part` if a larger model initialises it.
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
        """The embeddings of the source; the target may share their tokens."""
        return self.encoder.embeddings

    @takes(_inputs.Seq2SeqInputs)
    def forward(self, inputs: _inputs.Seq2SeqInputs) -> Seq2SeqModelOutput:
        """Return the states of every target token; arguments as `WellposedForSeq2SeqLM.forward`."""
        read = _as_output(inputs.encoder_outputs) or self.encoder(
            inputs.input_ids,
            inputs.attention_mask,
            inputs.position_ids,
            inputs_embeds=inputs.inputs_embeds,
            output_hidden_states=inputs.output_hidden_states,
            return_dict=True,
        )
        memory = cast(Tensor, read.last_hidden_state)
        output = self.decoder(
            inputs.decoder_input_ids,
            inputs.decoder_attention_mask,
            inputs.decoder_position_ids,
            encoder_hidden_states=memory,
            encoder_attention_mask=inputs.attention_mask,
            token_embedding=self.embeddings.token if self.config.share_embeddings else None,
            past_key_values=inputs.past_key_values,
            inputs_embeds=inputs.decoder_inputs_embeds,
            use_cache=inputs.use_cache,
            output_hidden_states=inputs.output_hidden_states,
            output_attentions=inputs.output_attentions,
            return_dict=True,
        )

        return Seq2SeqModelOutput(
            last_hidden_state=output.last_hidden_state,
            past_key_values=output.past_key_values,
            decoder_hidden_states=output.hidden_states,
            encoder_last_hidden_state=cast(Any, memory),
            encoder_hidden_states=read.hidden_states,
        )


def _as_output(output: ModelOutput | tuple[Tensor, ...] | None) -> BaseModelOutput | None:
    """Return an encoder's output by the names of its entries."""
    if not isinstance(output, tuple):
        return cast("BaseModelOutput | None", output)
    last, *states = cast("tuple[Any, ...]", output)
    return BaseModelOutput(last_hidden_state=last, hidden_states=states[0] if states else None)


class WellposedForSeq2SeqLM(LanguageHead, WellposedPreTrainedModel, GenerationMixin):
    """`logits_t = W decoder(target_1..t, encoder(source))`: the next target token.

    Exactly causal in the target, and independent of padding on either side. If tied, `W` is the
    target's token embedding. Vaswani et al. (2017). The model keeps a copy of `config` with
    `is_encoder_decoder=True`. `num_hidden_layers` counts the encoder's blocks, `num_decoder_layers`
    (default the same) the decoder's. A `ConfigError` lists values that are not usable,
    `is_causal=True` among them.

    Cost: that of its blocks; generation encodes the source once. When not to use: for one sequence
    (`WellposedForCausalLM`), or to tag or classify the source.

    >>> sizes = {"hidden_size": 8, "num_attention_heads": 2}
    >>> config = WellposedConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    >>> model, source = WellposedForSeq2SeqLM(config), torch.tensor([[5, 6, 7]])
    >>> model(source, decoder_input_ids=torch.tensor([[1, 8]])).logits.shape
    torch.Size([1, 2, 256])
    >>> model.generate(source, max_new_tokens=3, do_sample=False).shape[0]
    1
    """

    output_class = Seq2SeqLMOutput

    def usable_config(self, config: Any) -> WellposedConfig:
        """Return a copy marked as an encoder-decoder's."""
        return as_encoder_decoder(config, type(self).__name__)

    def build_body(self, config: WellposedConfig) -> WellposedSeq2SeqModel:
        """Return encoder and decoder; name the table that a tied output layer shares."""
        table = "model.encoder" if config.share_embeddings else "model.decoder"
        self._tied_weights_keys = {"lm_head.weight": f"{table}.embeddings.token.weight"}
        return WellposedSeq2SeqModel(config, is_part=True)

    @takes(_inputs.Seq2SeqLMInputs)
    def forward(self, inputs: _inputs.Seq2SeqLMInputs) -> ModelOutput:
        """Return the next-token logits of every position and, with labels, their mean
        cross-entropy.

        Keyword Args:
            input_ids (Tensor): int (batch, source tokens).
            attention_mask (Tensor): (batch, source tokens), 1 = real, 0 = padding on any side; None
                = all real.
            decoder_input_ids (Tensor): int (batch, target tokens); default: start token and shifted
                labels.
            decoder_attention_mask (Tensor): (batch, cached + target tokens), 1 = real. Right
                padding needs none.
            position_ids (Tensor): default: counted over real tokens.
            decoder_position_ids (Tensor): default: counted over real tokens.
            encoder_outputs (ModelOutput): the encoder's output, in place of the source.
            past_key_values (EncoderDecoderCache): of earlier target tokens; extended in place.
            inputs_embeds (Tensor): (batch, tokens, D) in place of `input_ids`, before sqrt(D).
            decoder_inputs_embeds (Tensor): the same in place of `decoder_input_ids`.
            use_cache (bool): make and return a cache; default: only if one is given.
            output_hidden_states (bool): also return the states of both sides.
            output_attentions (bool): must not be True. The fused kernels never form the weights.
            labels (Tensor): int (batch, target tokens), not shifted: label t belongs to logit t;
                -100: ignored.
            logits_to_keep (int | Tensor): only the last so many positions, or the positions in a
                tensor; 0 = all.
            num_items_in_batch (int | Tensor): divide the summed loss by this, not by the number of
                labels.

        Returns:
            `loss` (with labels, in nats), `logits` (batch, kept target tokens, vocab_size),
            `past_key_values`, and states of the encoder and, if asked for, of each layer.

        Raises:
            ShapeError: arguments or (on the CPU) tokens that do not fit.
            ConfigError: attention weights, an unusable cache, or labels without a start token.
        """
        body = inputs.of_body()
        ids = inputs.decoder_input_ids
        target = inputs.decoder_inputs_embeds if ids is None else ids
        if target is None and inputs.labels is not None:
            body["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(inputs.labels)
        return self.answer(inputs, body)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return `[start, labels_1, ..., labels_(T-1)]`, with padding in place of -100."""
        start = self.config.decoder_start_token_id
        padding = self.config.pad_token_id
        start = self.config.bos_token_id if start is None else start
        if start is None:
            raise ConfigError(
                "labels without decoder_input_ids: the configuration has neither"
                " decoder_start_token_id nor bos_token_id; set one, or give decoder_input_ids"
            )
        before = torch.cat((labels.new_full((labels.shape[0], 1), start), labels[:, :-1]), dim=1)
        # Without a padding token any token will do: positions after it are not counted either.
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
        """Change the number of tokens of source and target; arguments as in transformers."""
        source = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        embeddings = self.model.decoder.embeddings
        rows = source.num_embeddings
        if embeddings.token is not None and embeddings.token.num_embeddings != rows:
            embeddings.token = self._get_resized_embeddings(
                embeddings.token, rows, mean_resizing=mean_resizing
            )
            self.tie_weights()
        return cast(nn.Embedding, source)


def as_encoder_decoder(config: WellposedConfig, where: str) -> WellposedConfig:
    """Return a copy marked as an encoder-decoder's; raise `ConfigError` if none can be built."""
    if config.is_causal:
        raise ConfigError(f"{where}: received is_causal=True; leave it None: only the decoder is")
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
