"""``wellposed predict MODEL``: continue, label or translate texts, or label images."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import ConfigError, DataError, ShapeError
from wellposed.options import Seed, Size, Strength
from wellposed_lab.cli.parser import ModelArguments, parse_with_model
from wellposed_lab.cli.prediction.lines import line_writer, lines_of, read_source
from wellposed_lab.tasks.data.files import is_named, missing_file
from wellposed_lab.tasks.data.images import IMAGE_SUFFIXES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_NEW_TOKENS = 200
TEXT_ONLY = ("text", "certified", "max_new_tokens", "temperature", "seed")
TRANSLATION_ONLY = ("beams",)


@dataclass(frozen=True)
class PredictArguments(ModelArguments):
    """Continue a text with a language model, label or translate each line, or label images."""

    text: str | None = None
    """The text; use --input for a file."""
    input: Path | None = None
    """Read the text from this UTF-8 file, one item per line (a language model reads it whole); -
    reads standard input. For a model of images: an image, or a folder of images."""
    output: Path | None = None
    """Write here instead of standard output; one line per input line, in order."""
    certified: bool = False
    """Add a column to labels: how many words can be replaced by any others without changing the label."""
    max_new_tokens: Size | None = None
    """Most tokens to add (default: 200, or 2 x source + 10 for a translation). Past its positions,
    a language model continues from the last half of them."""
    temperature: Strength = 0.8
    """Sampling temperature of a language model; 0 takes the most probable token."""
    seed: Seed = 0
    """Seed of the sampling."""
    batch_size: Size = 32
    """Lines or images in one batch."""
    beams: Size = 4
    """Beams of a translation; 1 is greedy."""

    def problems(self) -> list[str]:
        lines = []
        if (self.text is None) == (self.input is None):
            lines.append("give the text with --text, or a file with --input (exactly one of them)")
        return lines


def run(words: Sequence[str]) -> int:
    """Predict and return the exit status."""
    options = parse_with_model(PredictArguments, "predict", words)
    source = options.input
    output = options.output
    if source and str(source) != "-" and not source.exists():
        raise missing_file(source)
    if source and output and source.exists() and output.exists() and source.samefile(output):
        raise ConfigError(
            f"wellposed predict: --output {output} would overwrite the file of --input; name"
            " another one"
        )

    from wellposed.models import reads_images
    from wellposed_lab.cli.load import load_model, load_tokenizer, trained_logit_scale

    model = load_model(options.model)
    scale = trained_logit_scale(options.model)
    path = options.input
    kind = type(model).__name__
    if reads_images(model):
        from wellposed_lab.cli.load import load_image_processor
        from wellposed_lab.cli.prediction.labels import find_images, label_images

        _refuse_foreign(options, (*TEXT_ONLY, *TRANSLATION_ONLY), "it labels images")
        if path is None:
            raise ConfigError(
                f"wellposed predict: a {kind} reads images; give --input IMAGE or FOLDER"
            )
        images = find_images(path)
        processor = load_image_processor(options.model)
        return _write(label_images(model, processor, images, options.batch_size, scale), options)
    no_lines = (*IMAGE_SUFFIXES, ".csv", ".jsonl", ".parquet")
    if path is not None and (path.is_dir() or is_named(path, *no_lines)):
        what = "a folder" if path.is_dir() else f"a {path.suffix} file"
        raise DataError(f"{path}: is {what}, and a {kind} reads lines of text; give a file of them")
    tokenizer = load_tokenizer(options.model)
    if model.config.is_encoder_decoder or model.can_generate():
        _refuse_foreign(options, ("certified",), "only labels of texts are certified against words")
    if model.config.is_encoder_decoder:
        return _translate(model, tokenizer, options)
    _refuse_foreign(options, TRANSLATION_ONLY, "only an encoder-decoder translates")
    if model.can_generate():
        text = read_source(options.text, path).text
        options = replace(options, temperature=options.temperature / scale)
        return _write([_continued(model, tokenizer, text, options)], options)

    from wellposed_lab.cli.prediction.labels import label_lines

    source = lines_of(read_source(options.text, path))
    settings: dict[str, Any] = {"certified": options.certified, "scale": scale}
    return _write(label_lines(model, tokenizer, source, options.batch_size, **settings), options)


def _write(lines: Iterable[str], options: PredictArguments) -> int:
    with line_writer(options.output) as file:
        file.writelines(f"{line}\n" for line in lines)
    if options.output is not None:
        print(f"written: {options.output}", file=sys.stderr)
    return 0


def _refuse_foreign(options: PredictArguments, names: Sequence[str], reason: str) -> None:
    """Refuse options that have no effect on this kind of model."""
    changed = [name for name in names if getattr(options, name) != getattr(PredictArguments, name)]
    if changed:
        flags = ", ".join("--" + name.replace("_", "-") for name in changed)
        raise ConfigError(
            f"wellposed predict: {flags} has no effect on this model: {reason}; leave it out"
        )


def _translate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: PredictArguments
) -> int:
    from wellposed_lab.cli.prediction.translation import translate_lines
    from wellposed_lab.tasks.kinds.seq2seq import Decoding

    _refuse_foreign(options, ("temperature", "seed"), "a translation is searched for, not sampled")
    decoding = Decoding(options.beams, max_new_tokens=options.max_new_tokens)
    source = read_source(options.text, options.input)
    lines = translate_lines(model, tokenizer, source, decoding, options.batch_size)
    return _write(lines, options)


def _continued(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, options: PredictArguments
) -> str:
    """Return ``text`` with more tokens: sampled, or the most probable ones at temperature 0."""
    import torch

    if not text:
        kind = ConfigError if options.input is None else DataError
        raise kind(
            "predict: the text is empty; a language model needs at least one character to continue"
        )
    torch.manual_seed(options.seed)
    ids = tokenizer([text], return_tensors="pt", add_special_tokens=False)["input_ids"]
    if not ids.numel():
        raise ShapeError(
            f"predict: the tokenizer, a {type(tokenizer).__name__}, makes no token of"
            f" {text[:40]!r}; give another text, or the model's own tokenizer"
        )
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        sampling = {"do_sample": True, "temperature": options.temperature}
    wanted = ids.shape[1] + (options.max_new_tokens or MAX_NEW_TOKENS)
    positions = int(getattr(model.config, "max_position_embeddings", 0) or 0) or wanted
    while ids.shape[1] < wanted:
        # The model reads at most `positions` tokens; past them, continue from the last half.
        window = ids if ids.shape[1] < positions else ids[:, -max(1, positions // 2) :]
        count = min(wanted - ids.shape[1], positions - window.shape[1])
        inputs = {"input_ids": window, "attention_mask": torch.ones_like(window)}
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=count, **sampling)  # type: ignore[operator]
        added = out[:, window.shape[1] :]
        ids = torch.cat([ids, added], dim=1)
        if added.shape[1] < count:  # an end-of-text token
            break
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
