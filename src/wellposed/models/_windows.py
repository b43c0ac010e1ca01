"""A classifier of windows of words: its answer is the mean vote of a classifier on each window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from wellposed.errors import ConfigError, listed
from wellposed.interrupts import all_or_nothing
from wellposed.models._build import AUTO_CLASSES
from wellposed.models._frozen_features import FrozenFeatures
from wellposed.options import Count, Size, fits

LOGIT_SCALE = 10.0
"""Factor from mean votes (between 0 and 1) to logits: without it softmax is nearly even."""
_ENCODE = (
    "train and answer on the ids of wellposed.words.WordCertificate(model, tokenizer).encode(texts)"
)
_AT_ONCE = 8192
"""Most windows per call of the classifier."""
_HIDDEN = 256
_DROPPED = 0.1
"""Hidden units, and dropout in training, of the layers on a frozen classifier."""


class WindowConfig(PreTrainedConfig):
    """The classifier of a window, and how words form windows."""

    model_type = "wellposed_windows"
    keys_to_ignore_at_inference: ClassVar = ["votes"]  # their number differs by text
    inner: dict[str, Any] | None = None
    """Configuration of the classifier of one window."""
    window_words: int | str = 1
    """Words per window; a str in models of earlier versions, which are refused."""
    word_tokens: int = 8
    """Tokens to which a word is cut or padded."""
    word_mark: int | None = None
    """Negative number before the ids of each word, so that ids of another encoding are refused; None
    in models of version 0.4 and before."""
    frame: list[list[int]] | None = None
    """Special tokens before and after the words of a window."""
    frozen: bool = False
    """Whether only two layers on top of the classifier's body are trained."""


@dataclass
class WindowOutput(SequenceClassifierOutput):
    """Logits, and the votes of which they are the scaled mean."""

    votes: Tensor | None = None
    """(batch, windows, classes), 0 after the end of a text."""


class WindowsForSequenceClassification(PreTrainedModel):
    r"""``logits = 10 mean_j v_j``, v_j the sigmoid scores of a classifier on window j alone.

    Exact: replacing k words changes only the votes of their windows, each between 0 and 1 (theory
    note B15). So the answer has a certificate in words for any classifier. A window may vote for
    several classes, or for none.

    Raises:
        ConfigError: called with vectors in place of token ids, or saved with windows of tokens or
            pairs of words by an earlier version.

    Cost: the classifier on each distinct window of a batch. When not to use: if the answer depends
    on words far apart, or on the order of windows.
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
                " whose windows are no longer supported; train it again with --certified-windows 1"
            )

        _check_windows(config)
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
            **windows: ``window_words``, ``word_tokens``, ``word_mark``, ``frame``, ``frozen`` of
                `WindowConfig`.
        """
        config = model.config
        labels = {"id2label": config.id2label, "label2id": config.label2id}
        options: Any = {"inner": config.to_dict(), "pad_token_id": pad, **windows, **labels}
        made = cls(WindowConfig(**options))
        with all_or_nothing() as undo:
            for part in model.modules():
                undo.later(setattr, part, "training", part.training)
            for weight in model.parameters():
                undo.later(weight.requires_grad_, weight.requires_grad)
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
        self._remembered = FrozenFeatures()

    def train(self, mode: bool = True) -> Any:
        """Train or evaluate; a frozen classifier never applies dropout."""
        super().train(mode)
        if self.config.frozen:
            self.model.eval()
        return self

    def votes(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the vote of every window, (batch, windows, classes), 0 after the end of a text.

        Args:
            input_ids: As `wellposed.words.WordCertificate.encode` returns them: each word padded to
                its length, after its mark.
            attention_mask: 0 on the words after the end of a text; None: all words are real.

        Raises:
            ConfigError: the ids are not words that were encoded for these windows.
        """
        words: Any = self.config.window_words
        real, marks, tokens = self._split(input_ids, attention_mask)
        batch, count = real.shape
        is_word = real & (marks == self.config.word_mark) if marks is not None else real
        read = tokens[is_word]
        kinds, numbers = read.unique(dim=0, return_inverse=True)
        # Padding may come before a text.
        in_front = real.sort(dim=1, descending=True).values
        filled = in_front.nonzero(as_tuple=True)
        if marks is not None and len(read) < len(filled[0]):
            raise self._not_encoded(marks, real & ~is_word)

        # Blank words after the end of a text fill its last window.
        blank = kinds.new_full((1, self.config.word_tokens), self.config.pad_token_id)
        padded = numbers.new_full((batch, count + words), len(kinds))
        padded[filled] = numbers
        starts = torch.arange(0, count, words, device=real.device)
        places = starts[:, None] + torch.arange(words, device=real.device)
        nonempty = in_front[:, starts]
        distinct, which = padded[:, places][nonempty].unique(dim=0, return_inverse=True)
        windows = torch.cat([kinds, blank])[distinct].flatten(1)
        logits = self.head(self._made(windows)) if self.config.frozen else self._read(windows)
        votes = logits.new_zeros(batch, len(places), logits.shape[-1])
        votes[nonempty] = logits.sigmoid().clamp_min(torch.finfo(logits.dtype).tiny)[which]

        return votes

    def _split(
        self, input_ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return which words are real and their marks, (batch, words), and their ids."""
        mark = self.config.word_mark
        size = self.config.word_tokens + (mark is not None)
        if input_ids.shape[1] % size:
            raise ConfigError(
                f"received texts of {input_ids.shape[1]} tokens, expected a multiple of {size}: these"
                f" ids were not encoded for this model's windows; {_ENCODE}"
            )

        words = input_ids.unflatten(1, (-1, size))
        if attention_mask is not None:
            real = attention_mask.bool().unflatten(1, (-1, size))[..., 0]
        elif mark is not None:
            real = (words != self.config.pad_token_id).any(-1)
        else:
            real = torch.ones_like(words[..., 0], dtype=torch.bool)

        return (real, None, words) if mark is None else (real, words[..., 0], words[..., 1:])

    def _not_encoded(self, marks: Tensor, wrong: Tensor) -> ConfigError:
        """Build the error for words without their mark; it names the first."""
        text, word = wrong.nonzero()[0].tolist()
        return ConfigError(
            f"word {word} of text {text} begins with {int(marks[text, word])}, expected the mark"
            f" {self.config.word_mark}: these ids were not encoded for this model's windows; {_ENCODE}"
        )

    def _made(self, windows: Tensor) -> Tensor:
        """Return frozen features of windows: mean last state, and mean vector of its tokens."""
        like: Any = self.head[1].weight
        keys = [row.tobytes() for row in windows.cpu().numpy()]
        remembered = self._remembered.features_of(self.model, like)
        new = [index for index, key in enumerate(keys) if key not in remembered]
        if new:
            with torch.no_grad():
                fresh = windows[new]
                real = fresh != self.config.pad_token_id
                parts = self._read(fresh), _mean(self.model.get_input_embeddings()(fresh), real)
                norm = nn.functional.layer_norm
                features = torch.cat([norm(part, part.shape[1:]) for part in parts], 1).to(like)
            remembered.update(zip((keys[index] for index in new), features, strict=True))

        return torch.stack([remembered[key] for key in keys])

    def _read(self, windows: Tensor) -> Tensor:
        """Return the logits of windows without padding; if frozen, the mean last states."""
        frame = self.config.frame or ([], [])
        before, behind = (windows.new_tensor(part).expand(len(windows), -1) for part in frame)
        around = before.shape[1], behind.shape[1]
        real = nn.functional.pad(windows != self.config.pad_token_id, around, value=True)
        order = (~real).long().argsort(dim=1, stable=True)
        ids = torch.cat([before, windows, behind], 1).gather(1, order)
        lengths = real.sum(1).clamp_min(1)  # a window counts even without words
        # In evaluation, windows of one length form a batch: without padding, a vote depends on
        # nothing but its own window.
        sizes = lengths.amax().expand_as(lengths) if self.model.training else lengths
        parts = []
        by_size = sizes.argsort(stable=True)
        for same in by_size.split(sizes.unique(return_counts=True)[1].tolist()):
            for some in same.split(_AT_ONCE):
                places = torch.arange(int(sizes[some[0]]), device=ids.device)
                real = places < lengths[some, None]
                inputs = {"input_ids": ids[some][:, places], "attention_mask": real.long()}
                if self.config.frozen:
                    parts.append(_mean(self.model.base_model(**inputs).last_hidden_state, real))
                else:
                    parts.append(self.model(**inputs).logits)

        return torch.cat(parts)[by_size.argsort()]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> WindowOutput:
        """Return `LOGIT_SCALE` times the mean vote and, with labels, its cross entropy."""
        if input_ids is None or inputs_embeds is not None:
            raise ConfigError(
                "a model of windows takes token ids, not vectors: its certificate counts words"
                " (wellposed certify RUN --words), not distances of vectors"
            )
        votes = self.votes(input_ids, attention_mask)
        windows = (votes.sum(-1) != 0).sum(1)[:, None]
        logits = LOGIT_SCALE * votes.sum(1) / windows
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return WindowOutput(loss=loss, logits=logits, votes=votes)


def _check_windows(config: WindowConfig) -> None:
    """Refuse sizes and special tokens that a window cannot have."""
    hints: dict[str, Any] = {"window_words": Size, "word_tokens": Size, "inner": dict | None}
    hints |= {"frozen": bool, "word_mark": int | None}
    wrong = [name for name, hint in hints.items() if not fits(getattr(config, name), hint)]
    frame: Any = config.frame
    sides = frame if isinstance(frame, (list, tuple)) and len(frame) == 2 else [None]
    are_ids = (
        isinstance(side, (list, tuple)) and all(fits(token, Count) for token in side)
        for side in sides
    )
    if frame is not None and not all(are_ids):
        wrong.append("frame")

    if wrong:
        received = [f"{name}: {str(getattr(config, name))[:80]}" for name in wrong]
        raise ConfigError(
            "WindowConfig: expected counts of words and tokens >= 1, and as frame two lists of token"
            f" ids; received\n{listed(received)}\nCopy config.json again from an intact checkpoint"
        )


def _mean(vectors: Tensor, real: Tensor) -> Tensor:
    """Return the mean vector of the tokens in a mask; 0 without any."""
    counted = real.sum(1, keepdim=True).clamp_min(1)
    return (vectors * real[..., None]).sum(1) / counted


transformers.AutoConfig.register(WindowConfig.model_type, WindowConfig)
AUTO_CLASSES["sequence_classification"].register(WindowConfig, WindowsForSequenceClassification)
