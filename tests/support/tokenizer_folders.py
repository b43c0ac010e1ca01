"""Tokenizers of the kinds that Hugging Face models come with, trained on a few lines."""

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers


def byte_level_bpe(lines, *, size=300):
    """As that of GPT-2: byte-level merges, one special token, no padding token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    options = {"vocab_size": size, "special_tokens": ["<|endoftext|>"], "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(lines, trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    special = dict.fromkeys(("eos_token", "bos_token", "unk_token"), "<|endoftext|>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def word_level(words, single, pair=None, **special):
    """A vocabulary of words and of the special tokens, with the templates ``single`` and ``pair``
    around texts."""
    tokens = list(dict.fromkeys(special.values()))
    vocabulary = {word: index for index, word in enumerate([*tokens, *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, special["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = [(token, vocabulary[token]) for token in tokens]
    around = {"single": single, "pair": pair, "special_tokens": marks}
    inner.post_processor = processors.TemplateProcessing(**around)
    names = ["input_ids", *(["token_type_ids"] if pair and ":1" in pair else []), "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_input_names=names, **special
    )


def bert_words(words):
    """As that of BERT: pairs with token types."""
    return word_level(
        words, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1",
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
    )  # fmt: skip
