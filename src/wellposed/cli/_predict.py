"""``wellposed predict MODEL``: continue a text, or label every line of one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from wellposed.errors import ConfigError, DataError, ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class PredictArguments:
    """Continue a text with a language model, or label each line with a classifier."""

    model: Annotated[str, tyro.conf.Positional]
    """A run folder or a saved model folder."""
    text: str | None = None
    """The text; use --input for a file."""
    input: Path | None = None
    """Read the text (one item per line for a classifier) from this UTF-8 file; - reads standard input."""
    output: Path | None = None
    """Write here instead of standard output; one line per input line, in order."""
    max_new_tokens: int = 200
    """How many tokens a language model adds; past its positions it goes on from the last half of them."""
    temperature: float = 0.8
    """Sampling temperature; 0 takes the most probable token."""
    seed: int = 0
    """Seed of the sampling."""
    batch_size: int = 32
    """Lines a classifier labels at a time."""


def run(words: Sequence[str]) -> int:
    """Predict and return the exit status."""
    options = tyro.cli(PredictArguments, args=list(words), prog="wellposed predict")
    text = _text(options)

    from wellposed.cli._load import load_model, load_tokenizer

    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    if model.can_generate():
        lines: Iterable[str] = [_continuation(model, tokenizer, text, options)]
    else:
        lines = _labels(model, tokenizer, text.splitlines(), options.batch_size)
    if options.output is None:
        for line in lines:
            print(line)
        return 0
    options.output.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"written: {options.output}", file=sys.stderr)
    return 0


def _text(options: PredictArguments) -> str:
    if (options.text is None) == (options.input is None):
        raise ConfigError("wellposed predict: give the text with --text, or a file with --input (exactly one of them)")
    if options.text is not None:
        return options.text
    path = options.input
    assert path is not None
    if str(path) == "-":
        return sys.stdin.read()
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; convert it, for example with iconv") from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty; expected at least one line of text")
    return text


def _continuation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, options: PredictArguments
) -> str:
    import torch

    if not text:
        raise ConfigError(
            "wellposed predict: --text is empty; a language model needs at least one character to continue"
        )
    torch.manual_seed(options.seed)
    ids = tokenizer([text], return_tensors="pt", add_special_tokens=False)["input_ids"]
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": options.temperature} if options.temperature > 0 else {"do_sample": False}
    )
    positions = int(getattr(model.config, "max_position_embeddings", 0) or 0) or ids.shape[1] + options.max_new_tokens
    wanted = ids.shape[1] + options.max_new_tokens
    while ids.shape[1] < wanted:
        # The model sees at most `positions` tokens: past them it goes on from the last half of what it can see.
        window = ids if ids.shape[1] < positions else ids[:, -max(1, positions // 2) :]
        count = min(wanted - ids.shape[1], positions - window.shape[1])
        with torch.inference_mode():
            out = model.generate(  # type: ignore[operator]
                input_ids=window, attention_mask=torch.ones_like(window), max_new_tokens=count, **sampling
            )
        added = out[:, window.shape[1] :]
        ids = torch.cat([ids, added], dim=1)
        if added.shape[1] < count:  # an end-of-text token
            break
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def _labels(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lines: Sequence[str], batch_size: int
) -> Iterable[str]:
    import torch

    limit = int(model.config.max_position_embeddings)
    names: dict[int, str] = dict(model.config.id2label or {})  # type: ignore[arg-type]
    for start in range(0, len(lines), batch_size):
        rows = lines[start : start + batch_size]
        encoded = tokenizer(list(rows), padding=True, return_tensors="pt")
        for offset, row in enumerate(encoded["attention_mask"]):
            length = int(row.sum())
            if length == 0 or length > limit:
                raise ShapeError(
                    f"line {start + offset + 1}: {length} tokens, expected 1 to {limit} (the positions of the model)"
                )
        with torch.inference_mode():
            logits = model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
        for probabilities in logits.float().softmax(-1):
            best = int(probabilities.argmax())
            yield f"{names.get(best, best)}\t{float(probabilities[best]):.4f}"
