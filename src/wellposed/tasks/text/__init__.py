"""From text to token ids and back: vocabularies of our own, tokenizers of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence

from wellposed.errors import ConfigError
from wellposed.tasks.text.tokenizers import ByteEncoder, CharacterEncoder, TextEncoder, WordEncoder


def build_encoder(tokenizer: str, train_texts: Sequence[str], *, max_words: int) -> TextEncoder:
    """Build ``byte``, ``character``, ``word`` or ``hf:NAME_OR_PATH``; vocabularies come from the
    train texts alone."""
    if tokenizer == "byte":
        return ByteEncoder()
    if tokenizer == "character":
        return CharacterEncoder(set().union(*map(set, train_texts)))
    if tokenizer == "word":
        return WordEncoder.from_texts(train_texts, max_words=max_words)
    if tokenizer.startswith("hf:") and tokenizer != "hf:":
        from wellposed.tasks.text.pretrained import PretrainedEncoder

        return PretrainedEncoder(tokenizer.removeprefix("hf:"))
    raise ConfigError(
        f"tokenizer = {tokenizer!r}, expected byte, character, word or hf:NAME_OR_PATH"
    )
