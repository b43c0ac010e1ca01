"""The models of the families with a head: language models, and classifiers of one sequence or of
two; and the LSTM language model, the baseline of Kim et al. (2021), figure 4."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any

from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers import modeling_outputs as outputs

from wellposed.errors import ShapeError
from wellposed.model_options import options_read
from wellposed.models import _heads as heads
from wellposed.models._build import Architecture, register_family
from wellposed.models._config import Depth, TransJectConfig, WellposedConfig
from wellposed.models._inputs import ModelInputs, TokenLabelInputs, read_inputs, takes
from wellposed.models._seq2seq import WellposedForSeq2SeqLM
from wellposed.models._transject import TransJectModel, TransJectPreTrainedModel
from wellposed.models._wellposed import WellposedModel, WellposedPreTrainedModel
from wellposed.nn import TransJectCache
from wellposed.options import Ge

# A bare partial would bind, from 3.14 on.
_BODY = staticmethod(partial(WellposedModel, is_part=True))


class WellposedForCausalLM(
    heads.CausalLM[outputs.CausalLMOutputWithPast, Cache], WellposedPreTrainedModel, GenerationMixin
):
    """`logits_i = W x_i`, where `x_i` depends on tokens 1..i only; `W` is the token embedding where
    tied.

    Causality is exact: later tokens have weight 0, not a small one.

    Args:
        config: what the model is made of. The model keeps a copy with `is_causal=True`.

    Raises:
        ConfigError: the configuration is not usable, or says `is_causal=False`.

    >>> import torch
    >>> model = WellposedForCausalLM(WellposedConfig(hidden_size=8, num_attention_heads=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """

    output_class = outputs.CausalLMOutputWithPast
    body = _BODY
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.token.weight"}  # noqa: RUF012 (Hugging Face's rule)


class WellposedForSequenceClassification(
    heads.SequenceClassifier[outputs.SequenceClassifierOutput], WellposedPreTrainedModel
):
    """`logits = W pool_i(x_i) + b`, pooled over real tokens only, so padding never changes a logit.

    Args:
        config: what the model is made of; `num_labels` (or `id2label`) sets the number of logits,
            `pooling` the pool.

    Raises:
        ConfigError: the configuration is not usable.

    >>> import torch
    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, num_labels=3)
    >>> WellposedForSequenceClassification(config)(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """

    output_class = outputs.SequenceClassifierOutput
    body = _BODY

    def add_classifier(self, config: Any) -> None:
        """Make the linear map to logits, behind dropout."""
        self.dropout = nn.Dropout(config.dropout)
        super().add_classifier(config)

    def logits_of(self, pooled: Tensor) -> Tensor:
        """Map vectors (batch, width), some entries of which dropout sets to zero, to logits."""
        return super().logits_of(self.dropout(pooled))


class WellposedForSequencePairClassification(
    heads.SequencePairClassifier[outputs.SequenceClassifierOutput], WellposedPreTrainedModel
):
    """`logits = head(pool(f(x)), pool(f(y)))`: both sequences through the same encoder f, then
    `PairHead`.

    Sequences meet in the head only, so the states of one do not depend on the other; padding
    changes no logit.

    Args:
        config: what the model is made of; `num_labels` sets the number of logits, `pooling` the
            pool, `intermediate_size` the width of the head's hidden layer. With
            `feedforward="maxmin"` the head is 1-Lipschitz in both texts for weights of norm 1
            (`PairHead`, `unit_lipschitz`).

    Raises:
        ConfigError: the configuration is not usable.

    When not to use it: for pairs whose words have to be compared one by one; join them to one
    sequence instead.

    >>> config = WellposedConfig(hidden_size=8, num_attention_heads=2, num_labels=2)
    >>> import torch
    >>> model = WellposedForSequencePairClassification(config)
    >>> model(input_ids=torch.tensor([[1, 2, 3]]), input_ids_pair=torch.tensor([[4, 5]])).logits.shape
    torch.Size([1, 2])
    """

    output_class = outputs.SequenceClassifierOutput
    body = _BODY

    def add_classifier(self, config: Any) -> None:
        """Make the head of both vectors."""
        self.classifier = heads.PairHead(
            config.hidden_size,
            config.intermediate_size,
            self.num_labels,
            dropout=config.dropout,
            unit_lipschitz=config.feedforward == "maxmin",
        )


@dataclass
class TransJectHeadOutput(outputs.ModelOutput):
    """What a TransJect model with a head returns; the fields are those of `TransJectModelOutput`
    and these."""

    loss: Tensor | None = None
    """Where labels are given; in training with the auxiliary loss in it."""
    logits: Tensor | None = None
    past_key_values: TransJectCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    sigma: Tensor | None = None
    gates: tuple[Tensor, ...] | None = None
    auxiliary_loss: Tensor | None = None


class TransJectForSequenceClassification(
    heads.SequenceClassifier[TransJectHeadOutput], TransJectPreTrainedModel
):
    """`logits = W pool_i(x_i^L) + b`, pooled over real tokens only, so padding never changes a
    logit.

    Args:
        config: what the model is made of; `num_labels` (or `id2label`) sets the number of logits,
            `pooling` the pool.

    Raises:
        ConfigError: the configuration is not usable.

    >>> import torch
    >>> model = TransJectForSequenceClassification(TransJectConfig(hidden_size=8, num_labels=3))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3])
    """

    output_class = TransJectHeadOutput
    body = TransJectModel


class TransJectForSequencePairClassification(
    heads.SequencePairClassifier[TransJectHeadOutput], TransJectPreTrainedModel
):
    """`logits = head(pool(f(x)), pool(f(y)))`: both sequences through the same TransJect f, then
    `PairHead`.

    Sequences meet in the head only: each has a spectrum and gates of its own. Padding changes no
    logit.

    Args:
        config: what the model is made of; `num_labels` sets the number of logits, `pooling` the
            pool.

    Raises:
        ConfigError: the configuration is not usable.

    >>> import torch
    >>> model = TransJectForSequencePairClassification(TransJectConfig(hidden_size=8, num_labels=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]]), input_ids_pair=torch.tensor([[4, 5]])).logits.shape
    torch.Size([1, 2])
    """

    output_class = TransJectHeadOutput
    body = TransJectModel

    def add_classifier(self, config: Any) -> None:
        """Make the head of both vectors."""
        self.classifier = heads.PairHead(config.hidden_size, config.hidden_size, self.num_labels)


class TransJectForCausalLM(
    heads.CausalLM[TransJectHeadOutput, TransJectCache], TransJectPreTrainedModel, GenerationMixin
):
    """`logits_i = W x_i^L`, where `x_i^L` depends on tokens 1..i only: sigma and gates are those of
    the prefix.

    Causality is exact: the running sums of token i hold no later token. What token i knows of the
    prefix is d numbers
    of the spectrum and the E gates of each layer, no more: it cannot look up or copy a particular
    token. `generate()` keeps these sums, whose size does not grow with the text.

    Args:
        config: what the model is made of. The model keeps a copy with `is_causal=True`.

    Raises:
        ConfigError: the configuration is not usable, or says `is_causal=False`.

    >>> import torch
    >>> model = TransJectForCausalLM(TransJectConfig(hidden_size=8))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """

    output_class = TransJectHeadOutput
    body = TransJectModel
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.token.weight"}  # noqa: RUF012 (Hugging Face's rule)
    _is_stateful = (
        True  # running sums cannot go back to fewer tokens, as assisted generation would ask
    )

    def add_output(self, config: Any) -> None:
        """Make the output layer, and the projection to its width where it is the embedding."""
        tied = config.tie_word_embeddings
        width = config.hidden_size // 2 if tied else config.hidden_size
        self.projection = OutputProjection(config.hidden_size, width) if tied else nn.Identity()
        self.add_head(width, config.vocab_size)

    def logits_of(self, states: Tensor) -> Tensor:
        """Map states (batch, tokens, d) to logits; where the embedding is the output layer,
        projected to its width."""
        return super().logits_of(self.projection(states))

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the model makes its own cache, which holds no keys and values."""
        return False

    @staticmethod
    def _reorder_cache(past_key_values: TransJectCache, beam_idx: Tensor) -> TransJectCache:
        """Return the cache of the beams that `generate` chose."""
        return past_key_values.reorder_(beam_idx)


class OutputProjection(nn.Linear):
    """`x -> P x` from a token's width d to that of the embedding, which a tied output layer shares.

    At the start it is so small that logits have entries of size one: embeddings have entries of
    size one.

    >>> import torch
    >>> OutputProjection(8, 4)(torch.ones(2, 8)).shape
    torch.Size([2, 4])
    """

    def __init__(self, width: int, embedding_width: int) -> None:
        super().__init__(width, embedding_width, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.weight.numel()))


register_family(
    "wellposed",
    Architecture(
        WellposedConfig,
        {
            "causal_lm": WellposedForCausalLM,
            "sequence_classification": WellposedForSequenceClassification,
            "sequence_pair_classification": WellposedForSequencePairClassification,
            "seq2seq_lm": WellposedForSeq2SeqLM,
        },
    ),
    body=WellposedModel,
)
register_family(
    "transject",
    Architecture(
        TransJectConfig,
        {
            "causal_lm": TransJectForCausalLM,
            "sequence_classification": TransJectForSequenceClassification,
            "sequence_pair_classification": TransJectForSequencePairClassification,
        },
    ),
    body=TransJectModel,
)


_NOT_FOR_LSTM = options_read("architecture", "wellposed") - options_read("architecture", "lstm") - {
    "scale_embeddings"
} | {"cross_attention"}
"""What a Transformer has and an LSTM lacks."""


class LSTMConfig(WellposedConfig):
    """Sizes of an LSTM, in the words of a Transformer: hidden_size is that of cell and state alike.

    The number of heads and the feed-forward width are not read; what else an LSTM lacks must stay
    at its default.

    Raises:
        ConfigError: an option of Transformers that an LSTM cannot follow, or a value out of range.

    >>> LSTMConfig(hidden_size=16, num_attention_heads=4).model_type
    'wellposed_lstm'
    """

    model_type = "wellposed_lstm"

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return what values must be; an LSTM has a layer at least."""
        return {**super().hints(), "num_hidden_layers": Annotated[Depth, Ge(1)]}

    def check(self, problems: list[str] | None = None) -> None:
        """Raise `ConfigError` naming every value that no LSTM can be built from."""
        fields = {**type(self).__dataclass_fields__, **self.part_options()}
        refused = [
            f"{name}: received {getattr(self, name)!r}; an LSTM has none, leave"
            f" {fields[name].default!r}"
            for name in sorted(_NOT_FOR_LSTM)
            if getattr(self, name) != fields[name].default
        ]
        super().check([*(problems or []), *refused])


@dataclass
class LSTMInputs(TokenLabelInputs):
    """Inputs of an LSTM."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    _: KW_ONLY
    inputs_embeds: Tensor | None = None


class LSTMForCausalLM(heads.LanguageHead[outputs.CausalLMOutput], PreTrainedModel):
    """`logits_i = W h_i` with `h` the states of an LSTM over token embeddings: exact causality, no
    attention.

    Hochreiter and Schmidhuber (1997); dropout between layers. No text generation with a kept state:
    it has no cache.

    Args:
        config: sizes; `tie_word_embeddings` shares the embedding with the output.

    >>> import torch
    >>> model = LSTMForCausalLM(LSTMConfig(vocab_size=7, hidden_size=8, num_attention_heads=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 7])
    """

    output_class = outputs.CausalLMOutput
    config_class = LSTMConfig
    base_model_prefix = "lstm"
    _input_embed_layer = "token"
    _tied_weights_keys = {"lm_head.weight": "token.weight"}  # noqa: RUF012 (Hugging Face's rule)

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        between = config.dropout if config.num_hidden_layers > 1 else 0.0
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        width, depth = config.hidden_size, config.num_hidden_layers
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(config.dropout)
        self.add_head(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Give embeddings N(0, 1/D) and all other matrices Glorot's uniform; biases are zero."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, (nn.Linear, nn.LSTM)):
            for name, parameter in module.named_parameters():
                nn.init.zeros_(parameter) if "bias" in name else nn.init.xavier_uniform_(parameter)

    @takes(LSTMInputs)
    def forward(self, given: LSTMInputs) -> outputs.CausalLMOutput:
        """Return the logits of the next token at every position and, with labels, their mean
        cross-entropy in nats.

        Args:
            input_ids: int (batch, tokens).
            attention_mask: 1 = real token; padding must stand on the right, where no real token
                sees it.
            inputs_embeds: (batch, tokens, hidden_size) in place of ids.
            labels: int (batch, tokens), shifted inside; -100 is not counted.
            logits_to_keep: only the last so many positions, or the positions in a tensor; 0 = all.
            num_items_in_batch: divide the summed loss by this, in place of the number of labels.
        """
        ids, vectors = given.input_ids, given.inputs_embeds
        inputs = ModelInputs(ids, given.attention_mask, inputs_embeds=vectors)
        padding = read_inputs(inputs, self.config, type(self).__name__).padding
        if padding is not None and bool((padding[:, :-1] & ~padding[:, 1:]).any()):
            raise ShapeError("LSTMForCausalLM: padding before a token; expected it on the right")
        states, _ = self.lstm(self.dropout(self.token(ids) if vectors is None else vectors))
        output = outputs.BaseModelOutput(last_hidden_state=self.dropout(states))
        return self.answer(output, given, heads.following(given.labels))


register_family("lstm", Architecture(LSTMConfig, {"causal_lm": LSTMForCausalLM}))
