"""A tiny BERT with its tokenizer, and a table of texts that it can learn."""

import random

import torch
import transformers

from .tokenizer_folders import bert_words

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(20)), "good", "bad"]


def make_checkpoint(folder):
    """Save a BERT without a head, and its tokenizer."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    bert_words(WORDS[4:]).save_pretrained(folder)


def make_table(path):
    """Write texts whose label is one of their words."""
    draw = random.Random(0)
    rows = ["label\ttext"]
    for _ in range(200):
        label = draw.choice(["good", "bad"])
        words = [f"w{draw.randrange(20)}" for _ in range(5)]
        words.insert(draw.randrange(6), label)
        rows.append(f"{label}\t{' '.join(words)}")
    path.write_text("\n".join(rows) + "\n")
