"""Similarity of texts by word vectors or any sentence encoder; nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from wellposed.errors import CheckpointError, ConfigError, ShapeError
from wellposed.lazy import ModuleOnFirstUse
from wellposed_lab.tasks.data.files import decode_text, refuse

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors: TypeAlias = NDArray[np.float32]
else:
    np = ModuleOnFirstUse("numpy")


@dataclass(frozen=True)
class WordVectors:
    """Vectors by word, looked up as written."""

    rows: Mapping[str, Vectors]
    width: int

    def lookup(self, words: Sequence[str]) -> Vectors:
        """Return the vectors of the known words, (known words, width) float32."""
        rows = [self.rows[word] for word in words if word in self.rows]
        return np.array(rows, np.float32).reshape(-1, self.width)


def embedding_scores(
    hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]], vectors: WordVectors
) -> tuple[dict[str, float], dict[str, int]]:
    """Return three mean cosines of sentences, in [-1, 1], and counts of unknown words and pairs.

    Average: of the sums of the word vectors. Extrema (Forgues et al. 2014): of the entries of
    greatest magnitude over the words. Greedy matching (Rus & Lintean 2012): the largest of each
    word with the other sentence's, averaged over words and both directions.

    Status: exact for the vectors given, float32; symmetric, 1 for the same words. Words without a
    vector are skipped and counted. A pair with a sentence of only such words counts as 0; Sharma et
    al. (2017) use the mean vector of the file instead.

    >>> vectors = WordVectors({"yes": np.array([1.0, 0.0]), "no": np.array([0.0, 1.0])}, 2)
    >>> scores, counts = embedding_scores([["yes", "no"]], [["yes", "sir"]], vectors)
    >>> {name: round(value, 4) for name, value in scores.items()}, counts["words_without_a_vector"]
    ({'embedding_average': 0.7071, 'vector_extrema': 0.7071, 'greedy_matching': 0.75}, 1)
    """
    measures: dict[str, Callable[[Vectors, Vectors], float]] = {
        "embedding_average": lambda first, second: _cosine(first.sum(0), second.sum(0)),
        "vector_extrema": lambda first, second: _cosine(_extreme(first), _extreme(second)),
        "greedy_matching": _greedy,
    }
    totals = dict.fromkeys(measures, 0.0)
    counts = {"words": 0, "words_without_a_vector": 0, "pairs_without_vectors": 0}
    for spoken, wanted in zip(hypotheses, references, strict=True):
        first = vectors.lookup(spoken)
        second = vectors.lookup(wanted)
        words = len(spoken) + len(wanted)
        with_vector = len(first) + len(second)
        counts["words"] += words
        counts["words_without_a_vector"] += words - with_vector
        if len(first) == 0 or len(second) == 0:
            counts["pairs_without_vectors"] += 1
            continue
        for name, measure in measures.items():
            totals[name] += measure(first, second)
    pairs = max(1, len(hypotheses))

    return {name: total / pairs for name, total in totals.items()}, counts


def _extreme(vectors: Vectors) -> Vectors:
    high = vectors.max(0)
    low = vectors.min(0)
    return np.where(high >= -low, high, low)


def _greedy(first: Vectors, second: Vectors) -> float:
    cosines = _unit(first) @ _unit(second).T
    return float(cosines.max(1).mean() + cosines.max(0).mean()) / 2


def _unit(vectors: NDArray[Any]) -> NDArray[Any]:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    norms[norms == 0] = 1
    return vectors / norms


def _cosine(first: Vectors, second: Vectors) -> float:
    return float(_unit(first) @ _unit(second))


def read_word_vectors(path: Path) -> WordVectors:
    """Read word vectors of GloVe or word2vec (as text; first line: count and width); gzip too.

    A word may have spaces but no part that is a number; a line with too many numbers is an error.
    All malformed lines are listed. Cost: 20 s and 0.5 GB for 400,000 words of width 300.
    """
    rows: dict[str, Vectors] = {}
    problems: list[str] = []
    count = width = None
    for number, line in decode_text(path).lines():
        line = line.rstrip(" ")
        if width is None:
            header = _HEADER.fullmatch(line)
            count, width = map(int, header.groups()) if header else (None, line.count(" "))
            if width < 1:
                break
            if header:
                continue
        fields = line.split(" ")
        word = " ".join(fields[:-width])
        vector = _vector(fields[-width:])
        more = any(map(_is_number, fields[1:-width]))
        if word and vector is not None and not more and word not in rows:
            rows[word] = vector
        else:
            expected = f"expected a word of its own and {width} numbers"
            problems.append(f"{path}:{number}: {expected}, received {line[:60]!r}")

    if not width:
        problems.append(f"{path}:1: expected a word and its numbers separated by spaces")
    elif count not in (None, len(rows)) and not problems:
        problems.append(f"{path}:1: says {count} words, the file holds {len(rows)}; is it cut?")
    refuse("the word vectors cannot be read; correct or remove these lines", problems)
    return WordVectors(rows, width or 0)


_HEADER = re.compile(r"(\d{1,18}) (\d{1,18})", re.ASCII)


def _vector(numbers: Sequence[str]) -> Vectors | None:
    """Return numbers within float32; None if they are not."""
    with suppress(ValueError), np.errstate(over="ignore"):
        vector = np.array(numbers, dtype=np.float32)
        return vector if np.isfinite(vector).all() else None
    return None


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


Encode = Callable[[Sequence[str]], Any]
"""Function from n sentences to an (n, width) array."""


def sentence_cosine(hypotheses: Sequence[str], references: Sequence[str], encode: Encode) -> float:
    """Return the mean over pairs of the cosine of ``encode(hypothesis)`` and ``encode(reference)``.

    Status: exact for the encoder given, a function from n sentences to an (n, width) array. Do not
    compare values of two encoders, nor with the SkipThought column of Zhang et al. (2021, Table 4).
    An empty sentence counts as cosine 0.
    """
    pairs = zip(hypotheses, references, strict=True)
    texts = [text for pair in pairs if all(map(str.strip, pair)) for text in pair]
    if not texts:
        return 0.0
    rows: NDArray[np.float64] = np.asarray(encode(texts), dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(texts):
        raise ShapeError(f"sentence encoder: shape {rows.shape} for {len(texts)} sentences")
    units = _unit(rows)
    return float((units[::2] * units[1::2]).sum(1).clip(-1, 1).sum() / len(hypotheses))


def hf_sentence_encoder(name: str | Path, *, batch_size: int = 64, max_length: int = 128) -> Encode:
    """Return the mean of the last hidden states over real tokens, from a folder or hub name."""
    import torch
    from transformers import AutoModel

    from wellposed.models import load_pretrained_model, text_positions
    from wellposed_lab.tasks.text.tokenizers import load_tokenizer

    name = str(name)
    try:
        tokenizer: Any = load_tokenizer(name)
        # The pooler is not used.
        model: Any = load_pretrained_model(AutoModel, name, unread="pooler.")
    except CheckpointError as error:
        raise ConfigError(
            f"sentence encoder {name!r} cannot be loaded: {error}; give the folder of an encoder"
            " saved with save_pretrained, tokenizer beside it, or a hub name that is cached or"
            " reachable"
        ) from error
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ConfigError(
            f"sentence encoder {name!r}: neither a pad nor an eos token; set pad_token"
        )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    most = min(max_length, text_positions(model.config) or max_length)

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Any:
        rows = []
        for start in range(0, len(texts), batch_size):
            some = list(texts[start : start + batch_size])
            cut = {"padding": True, "truncation": True, "max_length": most}
            batch = tokenizer(some, return_tensors="pt", **cut)
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].to(hidden.dtype)
            rows.append((hidden * mask).sum(1) / mask.sum(1).clamp(min=1))
        return torch.cat(rows).float().numpy()

    return encode
