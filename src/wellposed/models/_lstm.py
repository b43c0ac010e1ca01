"""LSTM language model: the baseline of Kim et al. (2021), figure 4."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from wellposed.errors import ShapeError
from wellposed.model_options import options_read
from wellposed.models._build import Architecture, register_family
from wellposed.models._config import Depth, WellposedConfig
from wellposed.models._heads import LanguageHead, following
from wellposed.models._inputs import ModelInputs, TokenLabelInputs, read_inputs, takes
from wellposed.options import Ge

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
    """What an LSTM is given."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    _: KW_ONLY
    inputs_embeds: Tensor | None = None


class LSTMForCausalLM(LanguageHead[CausalLMOutput], PreTrainedModel):
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

    output_class = CausalLMOutput
    config_class = LSTMConfig
    base_model_prefix = "lstm"
    _input_embed_layer = "token"
    _tied_weights_keys = {"lm_head.weight": "token.weight"}  # noqa: RUF012 (Hugging Face's rule)

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        between = config.dropout if config.num_hidden_layers > 1 else 0.0
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lstm = nn.LSTM(
            config.hidden_size,
            config.hidden_size,
            config.num_hidden_layers,
            batch_first=True,
            dropout=between,
        )
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
    def forward(self, given: LSTMInputs) -> CausalLMOutput:
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
            raise ShapeError(
                "LSTMForCausalLM: received padding before a real token; expected padding on the"
                " right only"
            )
        states, _ = self.lstm(self.dropout(self.token(ids) if vectors is None else vectors))
        output = BaseModelOutput(last_hidden_state=self.dropout(states))
        return self.answer(output, given, following(given.labels))


register_family("lstm", Architecture(LSTMConfig, {"causal_lm": LSTMForCausalLM}))
