"""A joint tokenizer of source and target, determined by the train texts: merges or characters.

``</s>`` ends every text. It decodes back to the text with runs of white space as one space.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wellposed.errors import ConfigError
from wellposed_lab.tasks.batches import Ragged
from wellposed_lab.tasks.text.tokenizers import (
    PretrainedPairEncoder,
    TextEncoder,
    symbol_tokenizer,
    tokenizers_library,
    wrap_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
UNK = "<unk>"
BOS = "<s>"
EOS = "</s>"
SPECIAL = (PAD, UNK, BOS, EOS)
PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)
SPACE_MARK = "\u2581"
# A word with the mark of the space before it. Entities of Moses-tokenised text are not split, and
# marks and signs are separate.
PIECES = (
    rf"{SPACE_MARK}?(?:&[a-z0-9#]+;|[^\s{SPACE_MARK}\p{{P}}\p{{S}}]+"
    rf"|[\p{{P}}\p{{S}}&&[^{SPACE_MARK}]]+)|{SPACE_MARK}"
)


class PairEncoder(TextEncoder):
    """A tokenizer of both languages with its bulk encoder; ``</s>`` ends every text."""

    bos_id = BOS_ID
    eos_id = EOS_ID
    start_id = BOS_ID

    def __init__(self, kind: str, inner: Any, characters: frozenset[str]) -> None:
        self.kind = kind
        self.inner = inner
        self.characters = characters
        """Characters that have an id; others become the unknown token."""

    @property
    def vocab_size(self) -> int:
        return int(self.inner.get_vocab_size())

    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, Mapping[str, int]]:
        ids = Ragged.from_lists([row.ids for row in self.inner.encode_batch_fast(list(texts))])
        counts = Counter(itertools.chain.from_iterable(texts))
        return ids, {char: counts[char] for char in counts.keys() - self.characters}

    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        names = ["input_ids", "attention_mask"]
        special = {"bos_token": BOS, "eos_token": EOS, "model_input_names": names}
        return wrap_tokenizer(self.inner, max_length, pad=PAD, unk=UNK, **special)


def build_pair_encoder(kind: str, texts: Sequence[str], *, vocab_size: int) -> TextEncoder:
    """Return the joint tokenizer ``bpe`` or ``char`` of the train texts, or ``hf:NAME_OR_PATH``."""
    if kind.startswith("hf:") and kind != "hf:":
        return PretrainedPairEncoder(kind.removeprefix("hf:"))
    if kind not in BUILDERS:
        raise ConfigError(f"tokenizer = {kind!r}, expected {', '.join(BUILDERS)} or hf:NAME")
    characters = frozenset(set().union(*map(set, texts)))
    inner = BUILDERS[kind](texts, characters, vocab_size)
    inner.post_processor = tokenizers_library().processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, EOS_ID)]
    )
    inner.encode_special_tokens = True  # "</s>" in a text is four characters
    return PairEncoder(kind, inner, characters | {" "})


def _build_bpe(texts: Sequence[str], characters: frozenset[str], vocab_size: int) -> Any:
    tokenizers = tokenizers_library()
    needed = len(SPECIAL) + len({*characters, SPACE_MARK} - set(" \t\r\n"))
    if vocab_size < needed:
        raise ConfigError(
            f"vocab_size = {vocab_size}, but the texts have {needed - len(SPECIAL)} characters;"
            f" expected at least {needed} (with {len(SPECIAL)} special tokens), or tokenizer 'char'"
        )

    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=UNK))
    inner.normalizer = _white_space(tokenizers)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="always", split=False),
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated"),
        ]
    )
    inner.decoder = tokenizers.decoders.Metaspace(SPACE_MARK, prepend_scheme="always", split=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False
    )
    inner.train_from_iterator(texts, trainer)

    return inner


def _build_characters(texts: Sequence[str], characters: frozenset[str], vocab_size: int) -> Any:
    del texts, vocab_size
    tokenizers = tokenizers_library()
    symbols = sorted({*characters, " "} - set("\t\r\n"))
    inner = symbol_tokenizer(symbols, special=SPECIAL)
    inner.add_special_tokens(list(SPECIAL))
    inner.normalizer = _white_space(tokenizers)
    inner.decoder = tokenizers.decoders.Fuse()
    return inner


def _white_space(tokenizers: Any) -> Any:
    """Return the normaliser that strips texts and makes runs of white space one space."""
    normalizers = tokenizers.normalizers
    one_space = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    return normalizers.Sequence([one_space, normalizers.Strip()])


BUILDERS = {"bpe": _build_bpe, "char": _build_characters}
