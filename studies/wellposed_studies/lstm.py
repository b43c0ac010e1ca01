"""LSTM language model, the baseline of Kim et al. (2021), figure 4."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.generic import can_return_tuple

from wellposed.errors import ShapeError
from wellposed.model_options import HeadOptions, options_read
from wellposed.models import Architecture, WellposedConfig, register_family
from wellposed.options import Ge, Lt

_ABSENT = options_read("architecture", "wellposed") | {"cross_attention"}
_ABSENT -= {"scale_embeddings", *(item.name for item in fields(HeadOptions))}
"""Options of a Transformer that an LSTM lacks."""


class LSTMConfig(WellposedConfig):
    """Sizes of an LSTM, named as in a Transformer: hidden_size is that of cell and state.

    Heads and feed-forward width are ignored; other options that an LSTM lacks must stay at their
    default.

    Raises:
        ConfigError: an option that an LSTM does not support, or a value out of range.

    >>> LSTMConfig(hidden_size=16, num_attention_heads=4).model_type
    'wellposed_lstm'
    """

    model_type = "wellposed_lstm"

    @classmethod
    def hints(cls) -> dict[str, Any]:
        return {**super().hints(), "num_hidden_layers": Annotated[int, Ge(1), Lt(1_000_000)]}

    def check(self, problems: list[str] | None = None) -> None:
        """Raise `ConfigError` naming every unsupported value."""
        options = {**type(self).__dataclass_fields__, **self.part_options()}
        refused = [
            f"{name}: received {getattr(self, name)!r}; an LSTM has none, leave"
            f" {options[name].default!r}"
            for name in sorted(_ABSENT)
            if getattr(self, name) != options[name].default
        ]
        super().check([*(problems or []), *refused])


class LSTMForCausalLM(PreTrainedModel):
    """`logits_i = W h_i` with `h` the states of an LSTM over token embeddings; exactly causal.

    Source: Hochreiter and Schmidhuber (1997); dropout between layers. No cache for generation.
    `tie_word_embeddings` shares the embedding with the output.

    >>> import torch
    >>> model = LSTMForCausalLM(LSTMConfig(vocab_size=7, hidden_size=8, num_attention_heads=2))
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 7])
    """

    config_class = LSTMConfig
    base_model_prefix = "lstm"
    _input_embed_layer = "token"
    _tied_weights_keys = {"lm_head.weight": "token.weight"}  # noqa: RUF012 (Hugging Face's rule)

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        between = config.dropout if config.num_hidden_layers > 1 else 0.0
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        width = config.hidden_size
        depth = config.num_hidden_layers
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(config.dropout)
        self.loss_type = "ForCausalLM"
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise embeddings by N(0, 1/D), other matrices by Glorot's uniform, biases by zero."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, (nn.Linear, nn.LSTM)):
            for name, parameter in module.named_parameters():
                nn.init.zeros_(parameter) if "bias" in name else nn.init.xavier_uniform_(parameter)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutput:
        """Return next-token logits and, with labels, their mean cross-entropy in nats.

        Args:
            input_ids: int (batch, tokens).
            attention_mask: 1 = real token. Padding must be on the right; real tokens do not see it.
            labels: int (batch, tokens), shifted inside; -100 is ignored.
            num_items_in_batch: divide the summed loss by this instead of the number of labels.
        """
        mask = attention_mask
        if mask is not None and bool(((mask[:, :-1] == 0) & (mask[:, 1:] != 0)).any()):
            raise ShapeError("LSTMForCausalLM: padding before a token; expected it on the right")

        states, _ = self.lstm(self.dropout(self.token(input_ids)))
        logits = self.lm_head(self.dropout(states))
        if labels is None:
            return CausalLMOutput(logits=logits)

        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        loss = self.loss_function(
            logits=logits,
            labels=targets,
            shift_labels=targets,
            vocab_size=self.config.vocab_size,
            num_items_in_batch=num_items_in_batch,
        )

        return CausalLMOutput(loss=loss, logits=logits)


register_family("lstm", Architecture(LSTMConfig, {"causal_lm": LSTMForCausalLM}))
