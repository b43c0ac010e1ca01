#!/usr/bin/env bash
# Guess: the offsets of an encoding cut the text into pieces: each character belongs to one token, offsets rise, and
# each word that was given has a token.
# Fact: of a text that is given as words, offsets begin at 0 again in each word. Several tokens of a byte-level
# vocabulary have the same offsets (all four bytes of an emoji). A word that the normaliser takes away, such as an
# accent alone, has no token, and word numbers jump over it. A blank before a word belongs to its offsets or not,
# depending on one option of the post-processor.
# Bites: whoever maps attributions, replaced words or labels of entities from tokens to a text.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet tokenizers==0.23.3 numpy==2.4.6

"$folder/venv/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

print("tokenizers", tokenizers.__version__)
vocabulary = {word: number for number, word in enumerate("[UNK] don ' t fix cafe".split())}
bert = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
bert.normalizer = normalizers.BertNormalizer(lowercase=True)
bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
text = bert.encode("don't fix")
words = bert.encode(["don't", "fix"], is_pretokenized=True)
print("a text:  ", text.tokens, text.offsets, text.word_ids)
print("as words:", words.tokens, words.offsets, words.word_ids)
assert text.offsets == [(0, 3), (3, 4), (4, 5), (6, 9)] and text.word_ids == [0, 1, 2, 3]
assert words.offsets == [(0, 3), (3, 4), (4, 5), (0, 3)] and words.word_ids == [0, 0, 0, 1]

gone = bert.encode(["fix", "\u0301", "fix"], is_pretokenized=True)
print("with an accent as a word:", gone.tokens, gone.word_ids)
assert gone.word_ids == [0, 2]

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
bytes_alone = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
emoji = bytes_alone.encode("a\U0001f642b")
print("an emoji in bytes:", emoji.offsets)
assert emoji.offsets == [(0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3)]

starts = {}
for trim in (True, False):
    bytes_alone.post_processor = processors.ByteLevel(trim_offsets=trim)
    starts[trim] = bytes_alone.encode("a b").offsets
    print(f"a blank, trim_offsets={trim}:", starts[trim])
assert starts[True] != starts[False]
PYTHON
