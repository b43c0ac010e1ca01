"""``wellposed predict`` for a classifier: one label per line of text or image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import (
    CheckpointError,
    ConfigError,
    ConvergenceError,
    DataError,
    ShapeError,
    shortened,
)
from wellposed.head_kind import NUMBER, SINGLE, problem_type
from wellposed.text_table import printable
from wellposed.words import encode_words, split_words
from wellposed_lab.cli.prediction.lines import say_blank, say_long
from wellposed_lab.tasks.batches import pad_examples
from wellposed_lab.tasks.data.images import IMAGE_SUFFIXES, read_image_file
from wellposed_lab.tasks.image_classification import pixel_values, stack_values

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

MOST_WORDS = 1000
"""Largest number of replaced words that is certified."""


def label_and_probability(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], kind: str, scale: float
) -> Iterator[str]:
    """Yield the answer of the head for each text or image, tab-separated, by ``problem_type``.

    One label comes with its probability, from ``scale`` times the logits. Several labels: those of
    probability 0.5 or more, most probable first. A regression gives its numbers. A model without a
    label is a `ConfigError`; answers that are not finite are a `ConvergenceError`.
    """
    import torch

    kind_of_head = problem_type(model.config)

    with torch.inference_mode():
        logits = getattr(model(**inputs), "logits", None)
    if logits is None or logits.dim() != 2:
        raise ConfigError(
            f"wellposed predict: a {type(model).__name__} gives no label of a {kind}; train a"
            f" classifier with `wellposed train {kind}_classification --from`"
        )
    if not bool(logits.isfinite().all()):
        weights = model.named_parameters()
        wrong = [name for name, weight in weights if not bool(weight.isfinite().all())]
        raise ConvergenceError(
            f"wellposed predict: the answers are NaN or infinite (weights with such values:"
            f" {shortened(wrong) or 'none'}). Load an earlier checkpoint, or train again at a lower"
            " learning rate"
        )
    names: dict[int, str] = dict(model.config.id2label or {})  # type: ignore[arg-type]
    for row in logits.float():
        if kind_of_head == NUMBER:
            yield "\t".join(f"{float(number):.6g}" for number in row)
            continue
        chosen = (scale * row).softmax(-1) if kind_of_head == SINGLE else (scale * row).sigmoid()
        order = chosen.argsort(descending=True, stable=True).tolist()
        answers = order[:1] if kind_of_head == SINGLE else [k for k in order if chosen[k] >= 0.5]
        labels = [(printable(str(names.get(k, k))), f"{float(chosen[k]):.4f}") for k in answers]
        yield "\t".join(part for label in labels for part in label)


def encode_lines(
    model: Any,
    tokenizer: Any,
    texts: list[str],
    limit: int,
    numbers: Sequence[int],
) -> tuple[dict[str, Tensor], set[int]]:
    """Return inputs for texts cut to ``limit`` tokens (or words), and ``numbers`` of cut lines."""
    from wellposed_lab.training.loop.batches import model_inputs

    of_windows = hasattr(model, "votes")
    unit = "word" if of_windows else "token"
    if of_windows:
        read = list(map(split_words, texts))
    else:
        read = tokenizer(texts, verbose=False)["input_ids"]
    lengths = list(map(len, read))
    cut = {number for number, length in zip(numbers, lengths, strict=True) if length > limit}
    if 0 in lengths:
        empty = numbers[lengths.index(0)]
        raise ShapeError(f"line {empty}: no {unit}, expected a text of 1 {unit} or more")
    if of_windows:
        ids = encode_words(
            tokenizer,
            [line[:limit] for line in read],
            model.config.word_tokens,
            model.config.word_mark,
        )
        return pad_examples([{"input_ids": row} for row in ids], pad_id=tokenizer.pad_token_id), cut
    can_pad = tokenizer.pad_token is not None
    if not can_pad and texts[1:]:
        raise CheckpointError(
            f"{tokenizer.name_or_path}: the tokenizer has no padding token, so lines of different"
            " lengths make no batch; name one as pad_token in its tokenizer_config.json"
        )
    settings = {"truncation": True, "max_length": limit, "padding": can_pad, "return_tensors": "pt"}
    encoded = tokenizer(texts, **settings)
    names = ("input_ids", "attention_mask")
    return model_inputs(model, {name: encoded[name] for name in names if name in encoded}), cut


def label_lines(
    model: PreTrainedModel,
    tokenizer: Any,
    lines: Sequence[str],
    batch_size: int,
    *,
    certified: bool = False,
    scale: float = 1.0,
) -> Iterator[str]:
    """Yield the answer of `label_and_probability` for every line; a blank one stays blank.

    With ``certified``, also yield how many words can be replaced by any others without changing the
    label (B14), then computed in double precision. Texts longer than in training are cut. Standard
    error lists these lines and counts blank ones.

    Raises:
        ConfigError: the model gives no label of a text, or compares pairs of texts.
        NotLipschitzError, ConfigError: ``certified``, but the model has no certificate in words.
        ShapeError: a text without a token.
    """
    from wellposed.words import WordCertificate, text_limit
    from wellposed_lab.tasks.text.tokenizers import PAIRS

    limit = text_limit(model, tokenizer)
    cut = set[int]()
    if type(model).__name__.endswith("PairClassification") or tokenizer.init_kwargs.get(PAIRS):
        raise ConfigError(
            "wellposed predict: the model compares pairs of texts; give them in Python, as in"
            " model(**tokenizer(first, second, return_tensors='pt'))"
        )
    certificate = WordCertificate(model, tokenizer) if certified else None
    filled = [number for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise ShapeError("every line is blank; give at least one line with a word")
    written = 0
    for start in range(0, len(filled), batch_size):
        numbers = filled[start : start + batch_size]
        chosen = [lines[number - 1] for number in numbers]
        inputs, places = encode_lines(model, tokenizer, chosen, limit, numbers)
        cut |= places
        reader = model if certificate is None else certificate.model
        answers = list(label_and_probability(reader, inputs, "text", scale))
        if certificate is not None:
            texts = certificate.hold([inputs], MOST_WORDS)
            most = [max(0, min(text.replaceable, text.words)) for text in texts]
            answers = [f"{line}\t{count}" for line, count in zip(answers, most, strict=True)]
        for number, answer in zip(numbers, answers, strict=True):
            yield from [""] * (number - 1 - written)
            yield answer
            written = number
    yield from [""] * (len(lines) - written)
    say_long(sorted(cut), limit)
    say_blank(len(lines) - len(filled), "left blank in the output")


def find_images(path: Path) -> list[Path]:
    """Return the image ``path``, or all in that folder at any depth; none is a `DataError`."""
    suffixes = ", ".join(IMAGE_SUFFIXES)
    if not path.is_dir():
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            raise DataError(f"{path}: expected an image ({suffixes}) or a folder of images")
        return [path]
    images = sorted(entry for entry in path.rglob("*") if entry.suffix.lower() in IMAGE_SUFFIXES)
    if not images:
        raise DataError(
            f"{path}: no image in the folder; expected files with the suffix {suffixes}"
        )
    return images


def label_images(
    model: PreTrainedModel, processor: Any, images: Sequence[Path], batch_size: int, scale: float
) -> Iterator[str]:
    """Yield the answer of `label_and_probability` for every image, a tab and the path. A model
    without labels of images is a `ConfigError`; images that cannot be decoded are a `DataError`."""
    for start in range(0, len(images), batch_size):
        paths = images[start : start + batch_size]
        values = stack_values([pixel_values(processor, read_image_file(path)) for path in paths])
        labels = label_and_probability(model, {"pixel_values": values}, "image", scale)
        for path, label in zip(paths, labels, strict=True):
            yield f"{label}\t{printable(str(path))}"
