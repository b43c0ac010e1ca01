"""A classifier of windows of words: whatever reads a window, the mean of its votes is the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from wellposed.errors import ConfigError
from wellposed.models._build import AUTO_CLASSES

SHARPNESS = 10.0
"""Of mean votes, which lie between 0 and 1, as logits: a softmax of them alone is nearly even."""
_AT_ONCE = 8192
"""Windows that are read in one call."""
_HIDDEN, _DROPPED = 256, 0.1
"""Units between what a frozen model makes of a window and its vote, and the share left out in training."""
_MOST_KEPT = 2**18
"""Windows of which is kept what a frozen model makes of them: .8 GB of one that is 384 wide."""


class WindowConfig(PreTrainedConfig):
    """What reads a window, and how windows are made of words."""

    model_type = "wellposed_windows"
    keys_to_ignore_at_inference: ClassVar = ["votes"]  # whose number differs from text to text
    inner: dict[str, Any] | None = None
    """Configuration of the classifier that reads one window."""
    window_words: int | str = 1
    """Words of a window; a text alone in models of an earlier version, which are refused."""
    word_tokens: int = 8
    """Tokens that a word is cut or padded to."""
    frame: list[list[int]] | None = None
    """Special tokens before and behind the words of a window."""
    frozen: bool = False
    """Whether the classifier's body stays as it is, and two layers of our own learn to read it."""


@dataclass
class WindowOutput(SequenceClassifierOutput):
    """Logits, and the votes whose mean they are a multiple of."""

    votes: Tensor | None = None
    """(batch, windows, classes), 0 behind the end of a text."""


class WindowsForSequenceClassification(PreTrainedModel):
    r"""``logits = 10 mean_j v_j``, with ``v_j`` what a classifier that reads window j alone gives to
    each class, between 0 and 1 (a sigmoid: a window may speak for several classes, or for none).

    Exact: k words replaced by any words change the votes of their own windows, each between 0 and 1
    (theory note B15), so that the answer has a certificate in words whatever the classifier is.

    Args:
        config: see `WindowConfig`.

    Raises:
        ConfigError: called with vectors in the place of token ids; a model that was saved with
            windows of tokens or with pairs of words, by an earlier version.

    Cost: the classifier on each distinct window of a batch. When not to use: where an answer hangs
    on words that stand far apart, or on the order of windows.
    """

    config: WindowConfig
    config_class = WindowConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = False

    def __init__(self, config: WindowConfig) -> None:
        super().__init__(config)
        if hasattr(config, "window_tokens") or not isinstance(config.window_words, int):
            raise ConfigError(
                f"window_words = {config.window_words!r}: this model was saved by an earlier version,"
                " whose windows of tokens or pairs of words are not read any more; train it again with"
                " --certified-windows 1"
            )
        inner = transformers.AutoConfig.for_model(**(config.inner or {}))
        auto = AUTO_CLASSES["sequence_classification"]
        self.model: Any = auto.from_config(inner)
        self.post_init()
        if config.frozen:
            self._freeze()

    @classmethod
    def around(cls, model: Any, pad: int, **windows: Any) -> WindowsForSequenceClassification:
        """Return the votes of a classifier on windows, with its own weights.

        Args:
            model: a classifier of sequences.
            pad: token that fills a word.
            windows: ``window_words``, ``word_tokens``, ``frame`` and ``frozen`` of `WindowConfig`.
        """
        config = model.config
        labels = {"id2label": config.id2label, "label2id": config.label2id}
        given: Any = {"inner": config.to_dict(), "pad_token_id": pad, **windows, **labels}
        made = cls(WindowConfig(**given))
        made.model = model
        if made.config.frozen:
            model.requires_grad_(False)
        return made.train(model.training)

    def _freeze(self) -> None:
        self.model.requires_grad_(False)
        width = self.model.config.hidden_size + self.model.get_input_embeddings().embedding_dim
        self.head = nn.Sequential(
            nn.Dropout(_DROPPED),
            nn.Linear(width, _HIDDEN),
            nn.ReLU(),
            nn.Dropout(_DROPPED),
            nn.Linear(_HIDDEN, self.model.config.num_labels),
        )
        self._kept: dict[bytes, Tensor] = {}

    def train(self, mode: bool = True) -> Any:
        """Train or not; a frozen classifier never drops anything."""
        super().train(mode)
        if self.config.frozen:
            self.model.eval()
        return self

    def votes(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the vote of every window, (batch, windows, classes), 0 behind the end of a text.

        Args:
            input_ids: (batch, words x word_tokens), each word padded to its length.
            attention_mask: 0 on the words behind the end of a text; None where there are none.
        """
        size, batch = self.config.word_tokens, len(input_ids)
        words: Any = self.config.window_words
        if input_ids.shape[1] % size:
            raise ConfigError(
                f"a text of {input_ids.shape[1]} tokens is not made of words of {size}; read it by"
                " the tokenizer and windows that the model was trained with"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        real, each = (x.unflatten(1, (-1, size)) for x in (mask, input_ids))
        real = real[..., 0].bool()
        count = real.shape[1]
        kinds, numbers = each[real].unique(dim=0, return_inverse=True)
        # Padding may stand before a text.
        real = real.sort(dim=1, descending=True).values
        # Behind its end a text goes on with words that nobody sees.
        blank = kinds.new_full((1, size), self.config.pad_token_id)
        padded = numbers.new_full((batch, count + words), len(kinds))
        padded[:, :count][real] = numbers
        starts = torch.arange(0, count, words, device=real.device)
        places = starts[:, None] + torch.arange(words, device=real.device)
        held = real[:, starts]
        distinct, which = padded[:, places][held].unique(dim=0, return_inverse=True)
        windows = torch.cat([kinds, blank])[distinct].flatten(1)
        logits = self.head(self._made(windows)) if self.config.frozen else self._read(windows)
        votes = logits.new_zeros(batch, len(places), logits.shape[-1])
        votes[held] = logits.sigmoid().clamp_min(torch.finfo(logits.dtype).tiny)[which]
        return votes

    def _made(self, windows: Tensor) -> Tensor:
        """Return what the frozen classifier makes of windows: the means of its last states, and of the
        vectors of their own tokens."""
        like: Any = self.head[1].weight
        keys = [row.tobytes() for row in windows.cpu().numpy()]
        kept = next(iter(self._kept.values()), like)
        if len(self._kept) > _MOST_KEPT or (kept.dtype, kept.device) != (like.dtype, like.device):
            self._kept.clear()
        if new := [place for place, key in enumerate(keys) if key not in self._kept]:
            with torch.no_grad():
                own = windows[new]
                seen = own != self.config.pad_token_id
                parts = self._read(own), _mean(self.model.get_input_embeddings()(own), seen)
                norm = nn.functional.layer_norm
                found = torch.cat([norm(part, part.shape[1:]) for part in parts], 1).to(like)
            self._kept.update(zip((keys[place] for place in new), found, strict=True))
        return torch.stack([self._kept[key] for key in keys])

    def _read(self, windows: Tensor) -> Tensor:
        """Return the logits of windows of words, without the padding between these; of a frozen
        classifier the means of its last states."""
        frame = self.config.frame or ([], [])
        before, behind = (windows.new_tensor(part).expand(len(windows), -1) for part in frame)
        around = before.shape[1], behind.shape[1]
        seen = nn.functional.pad(windows != self.config.pad_token_id, around, value=True)
        order = (~seen).long().argsort(dim=1, stable=True)
        ids = torch.cat([before, windows, behind], 1).gather(1, order)
        lengths = seen.sum(1).clamp_min(1)  # a window counts, whatever words it holds
        # In eval mode those of one length are read together: without padding, whatever reads it, a
        # vote hangs on nothing but its own window.
        sizes = lengths.amax().expand_as(lengths) if self.model.training else lengths
        found, by_size = [], sizes.argsort(stable=True)
        for same in by_size.split(sizes.unique(return_counts=True)[1].tolist()):
            for some in same.split(_AT_ONCE):
                shown = torch.arange(int(sizes[some[0]]), device=ids.device)
                seen = shown < lengths[some, None]
                given = {"input_ids": ids[some][:, shown], "attention_mask": seen.long()}
                if self.config.frozen:
                    found.append(_mean(self.model.base_model(**given).last_hidden_state, seen))
                else:
                    found.append(self.model(**given).logits)
        return torch.cat(found)[by_size.argsort()]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> WindowOutput:
        """Return `SHARPNESS` times the mean vote and, with labels, its cross entropy."""
        if input_ids is None or inputs_embeds is not None:
            raise ConfigError(
                "windows of words are read as token ids alone: what they hold against is counted in"
                " words (wellposed certify RUN --words), not in distances of vectors"
            )
        votes = self.votes(input_ids, attention_mask)
        windows = (votes.sum(-1) != 0).sum(1)[:, None]
        logits = SHARPNESS * votes.sum(1) / windows
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return WindowOutput(loss=loss, logits=logits, votes=votes)


def _mean(vectors: Tensor, seen: Tensor) -> Tensor:
    """Return the mean vector of the tokens that are seen; 0 of none."""
    counted = seen.sum(1, keepdim=True).clamp_min(1)
    return (vectors * seen[..., None]).sum(1) / counted


transformers.AutoConfig.register(WindowConfig.model_type, WindowConfig)
AUTO_CLASSES["sequence_classification"].register(WindowConfig, WindowsForSequenceClassification)
