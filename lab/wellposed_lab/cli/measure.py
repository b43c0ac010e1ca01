"""``wellposed measure MODEL``: how well conditioned is every weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wellposed.errors import ConfigError
from wellposed_lab.cli.parser import ModelArguments, parse_with_model


@dataclass(frozen=True)
class MeasureArguments(ModelArguments):
    """Orthogonality error, singular values, condition number and stable rank of every weight, by
    role and layer."""

    text: str | None = None
    """Also run the model on this text: activation norms and attention entropy."""
    image: Path | None = None
    """The same for a model of images: run it on this one."""
    out: Path | None = None
    """Folder for measurement.csv, measurement.json and measurement.svg."""


def run(words: Sequence[str]) -> int:
    """Print the table, write the files and return the exit status."""
    options = parse_with_model(MeasureArguments, "measure", words)

    from wellposed.measurement import measure
    from wellposed.models import reads_images
    from wellposed.words import text_limit
    from wellposed_lab.cli.load import load_image_processor, load_model_or_draw, load_tokenizer
    from wellposed_lab.cli.prediction.labels import encode_lines, read_pixel_values
    from wellposed_lab.cli.prediction.lines import say_long
    from wellposed_lab.training.folder.durable_files import replace_files

    model = load_model_or_draw(options.model)
    batch = None
    if options.text is not None:
        tokenizer = load_tokenizer(options.model)
        limit = text_limit(model, tokenizer)
        batch, cut = encode_lines(model, tokenizer, [options.text], limit)
        say_long(sorted(cut), limit)
    if options.image is not None:
        if not reads_images(model):
            kind = type(model).__name__
            raise ConfigError(f"--image: a {kind} reads no images; give --text TEXT")
        batch = read_pixel_values(load_image_processor(options.model), [options.image])
    measurement = measure(model, batch)
    print(measurement.table())
    if options.out is not None:
        with replace_files(options.out) as there:
            measurement.to_csv(there / "measurement.csv")
            measurement.to_json(there / "measurement.json")
            measurement.plot(there / "measurement.svg")
        print(f"written: {options.out}")
    return 0
