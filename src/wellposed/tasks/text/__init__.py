"""From text to token ids and back: vocabularies of our own, tokenizers of Hugging Face."""
