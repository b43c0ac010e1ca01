"""Which folders hold a Hugging Face tokenizer."""

from __future__ import annotations

from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a tokenizer was saved in ``folder``."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)
