"""A classifier of windows of words: whatever reads a window, the mean of its votes is the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from wellposed.errors import ConfigError
from wellposed.models._build import AUTO_CLASSES


class WindowConfig(PreTrainedConfig):
    """What reads a window, and how long windows are."""

    model_type = "wellposed_windows"
    inner: dict[str, Any] | None = None
    """Configuration of the classifier that reads one window."""
    window_words: int = 1
    """Words of a window."""
    window_tokens: int = 8
    """Tokens that a window is cut or padded to."""


@dataclass
class WindowOutput(SequenceClassifierOutput):
    """Logits, and the votes that they are the mean of."""

    votes: Tensor | None = None
    """(batch, windows, classes), 0 behind the end of a text."""


class WindowsForSequenceClassification(PreTrainedModel):
    r"""``logits = log mean_j v_j``, with ``v_j`` the softmax of a classifier that reads window j alone.

    Exact: k words replaced by any words change at most k votes, each a point of the simplex
    (theory note B15), so that the answer has a certificate in words whatever the classifier is.

    Args:
        config: see `WindowConfig`.

    Raises:
        ConfigError: called with vectors in the place of token ids.

    Cost: the classifier on each distinct window of a batch. When not to use: where an answer hangs
    on words that stand far apart, or on the order of windows.
    """

    config: WindowConfig
    config_class = WindowConfig
    base_model_prefix = "model"

    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config)
        inner = transformers.AutoConfig.for_model(**(config.inner or {}))
        auto = AUTO_CLASSES["sequence_classification"]
        self.model: nn.Module = auto.from_config(inner)
        self.post_init()

    @classmethod
    def around(
        cls, model: Any, words: int, tokens: int, pad: int
    ) -> WindowsForSequenceClassification:
        """Return the votes of a classifier on windows of ``words`` words, with its own weights.

        Args:
            model: a classifier of sequences.
            words, tokens: of a window.
            pad: token that fills a window.
        """
        config = model.config
        labels = {"id2label": config.id2label, "label2id": config.label2id}
        sizes: Any = {"window_words": words, "window_tokens": tokens, "pad_token_id": pad}
        made = cls(WindowConfig(inner=config.to_dict(), **sizes, **labels))
        made.model = model
        return made.train(model.training)

    def votes(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the vote of every window, (batch, windows, classes), 0 behind the end of a text.

        Args:
            input_ids: (batch, windows x window_tokens), each window padded to its length.
            attention_mask: 0 on the windows behind the end of a text; None where there are none.
        """
        tokens, batch = self.config.window_tokens, len(input_ids)
        if input_ids.shape[1] % tokens:
            raise ConfigError(
                f"a text of {input_ids.shape[1]} tokens is not made of windows of {tokens}; read it"
                " by the tokenizer and windows that the model was trained with"
            )
        windows = input_ids.reshape(-1, tokens)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        real = mask.reshape(-1, tokens)[:, 0].bool()
        distinct, places = windows[real].unique(dim=0, return_inverse=True)
        seen = distinct != self.config.pad_token_id
        seen[:, 0] = True  # a window counts, whatever words it holds
        logits = self.model(input_ids=distinct, attention_mask=seen.long()).logits
        votes = logits.new_zeros(len(windows), logits.shape[-1])
        votes[real] = logits.softmax(-1)[places]
        return votes.unflatten(0, (batch, -1))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> WindowOutput:
        """Return the logarithm of the mean vote and, with labels, its cross entropy."""
        if input_ids is None or inputs_embeds is not None:
            raise ConfigError(
                "windows of words are read as token ids alone: what they hold against is counted in"
                " words (wellposed certify RUN --words), not in distances of vectors"
            )
        votes = self.votes(input_ids, attention_mask)
        windows = (votes.sum(-1) > 0).sum(1)[:, None]
        logits = (votes.sum(1) / windows).clamp_min(torch.finfo(votes.dtype).tiny).log()
        loss = None if labels is None else nn.functional.nll_loss(logits, labels)
        return WindowOutput(loss=loss, logits=logits, votes=votes)


transformers.AutoConfig.register(WindowConfig.model_type, WindowConfig)
AUTO_CLASSES["sequence_classification"].register(WindowConfig, WindowsForSequenceClassification)
