"""``wellposed certify MODEL``: bound how far the output can move, and certify accuracy."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wellposed.errors import ConfigError
from wellposed.options import Count, Positive, Size
from wellposed.text_table import aligned, printable
from wellposed_lab.cli.parser import ModelArguments, parse_with_model
from wellposed_lab.training.folder.atomic import replace_files

if TYPE_CHECKING:
    from wellposed.certification import Certificate
    from wellposed.linalg import Norm
    from wellposed.words import WordCertificate
    from wellposed_lab.tasks.task import Task

_LOSSES = 6
_SHOWN = 8


def counts_of(name: str, text: str | None) -> list[int]:
    """Return the numbers of ``--NAME 1,2,3``.

    >>> counts_of("words", "1,2,5"), counts_of("words", None)
    ([1, 2, 5], [])
    """
    parts = [] if text is None else text.split(",")
    counts = [int(part) if part.strip().isdecimal() else 0 for part in parts]
    if counts != sorted(set(counts)) or any(number < 1 for number in counts):
        raise ConfigError(
            f"--{name} {text}: expected whole numbers of 1 or more, increasing, with commas between"
        )
    return counts


@dataclass(frozen=True)
class CertifyArguments(ModelArguments):
    """Certified Lipschitz bound of every layer, and certified accuracy of a run on texts."""

    seq_len: Size | None = None
    """The bound covers at most this many tokens (default: the model's positions)."""
    min_tokens: Size = 1
    """The bound covers no shorter input. In norm 2, mean pooling of n tokens divides by sqrt(n)."""
    norm: Literal["tok", "2", "inf"] = "tok"
    """tok (largest 2-norm of a token), 2 (Frobenius) or inf (largest entry)."""
    radius: Positive | None = None
    """Certify for embedded tokens of 2-norm at most this; dot-product attention needs it."""
    data: str | None = None
    """Data of the run's task, if it has moved since training."""
    split: Literal["valid", "test"] = "test"
    """Split on which certified accuracy is measured."""
    examples: Count = 256
    """First examples (or next tokens) of the split, for certified accuracy; 0: skip it."""
    radii: str | None = None
    """Comma-separated sizes of the perturbation (default: 0.01 to 0.5 of the median token norm)."""
    attack_steps: Count = 20
    """Gradient steps of the attack for each size."""
    restarts: Size = 1
    """Starts of the attack for each size; with --words, texts kept in each round of the search."""
    words: str | None = None
    """Comma-separated numbers k: certified and attacked accuracy when any k words are replaced."""
    text: str | None = None
    """Certify this text: how many replaced words leave its answer, and which words matter."""
    batch_size: Size = 32
    """Examples in one batch."""
    out: Path | None = None
    """Folder for certificate.json and, for a classifier, certified_accuracy.csv."""
    require: bool = False
    """Exit with status 1 if a layer has no bound."""


def run(words: Sequence[str]) -> int:
    """Print the certificate, and the certified accuracy of a classifier; return the exit status."""
    options = parse_with_model(CertifyArguments, "certify", words)
    try:
        radii = None if options.radii is None else list(map(float, options.radii.split(",")))
    except ValueError:
        raise ConfigError(
            f"--radii {options.radii!r}: expected comma-separated numbers, for instance 0,0.1,0.2"
        ) from None

    from wellposed.certification import certify
    from wellposed_lab.cli.load import load_model_or_draw

    model = load_model_or_draw(options.model)
    if options.text is not None or options.words is not None:
        return _words(model, options)
    norm: Norm = 2 if options.norm == "2" else options.norm
    length = options.seq_len or _positions(model, options.model)
    ask = partial(certify, model, seq_len=length, norm=norm, min_tokens=options.min_tokens)
    certificate = ask(radius=options.radius)
    # Skip everything slow if the bound is vacuous.
    useless = bool(certificate.reason) or math.isinf(certificate.total)
    if useless:
        skipped = "" if radii else "; no attack and no words (--radii runs them)"
        print(f"vacuous: L = {certificate.total:.3g}, the reason is below{skipped}")
    print(certificate.table())
    print(f"tested: {certificate.cross_check}")
    print_losses(certificate)
    if math.isinf(certificate.total):
        _say_why(certificate, model, ask, options)
    if options.out is not None:
        text = json.dumps(certificate.to_dict(), indent=2) + "\n"
        with replace_files(options.out) as temporary:
            (temporary / "certificate.json").write_text(text, encoding="utf-8")
    task = None if useless and not radii else _certified_task(model, options)
    if task is not None:
        _accuracy(model, task, certificate, radii, options)
    if options.out is not None:
        print(f"written: {options.out}")
    return 1 if options.require and math.isinf(certificate.total) else 0


def print_losses(certificate: Certificate) -> None:
    """Print the modules with the largest factors; one without a bound has none to print."""
    losses = [layer for layer in certificate.losses() if math.isfinite(layer.lipschitz)]
    if losses:
        counts = f"({len(losses)} of {len(certificate.layers)})"
        print(f"modules that enlarge a change, largest first {counts}:")
        for layer in losses[:_LOSSES]:
            print(f"  {layer.lipschitz:>10.4g}  {layer.path or '.'} ({layer.module})")
    elif any(math.isfinite(layer.lipschitz) for layer in certificate.layers):
        bounded = " with a bound" if math.isinf(certificate.total) else ""
        single = "no module" if certificate.total <= 1 or bounded else "no single module"
        print(f"{single}{bounded} enlarges a change of its input")


def _words(model: Any, options: CertifyArguments) -> int:
    from wellposed.words import WordCertificate
    from wellposed_lab.cli.load import load_tokenizer
    from wellposed_lab.training.certified.run import first_batches, keep_words

    counts = counts_of("words", options.words)
    task = _certified_task(model, options) if counts else None
    if counts and task is None:
        raise ConfigError(
            f"--words needs the texts of a run and --examples >= 1, received {options.model}, which"
            f" has no record of its texts; give a run folder, or --text"
        )
    tokenizer = load_tokenizer(options.model) if task is None else task.tokenizer
    certificate = WordCertificate(model, tokenizer, required=False)
    if task is not None:
        batches = first_batches(task, options.split, options.examples, options.batch_size)
        accuracy = certificate.accuracy_of(batches, counts, beam=options.restarts)
        print(f"{task.name}, {options.split}, any words by any words of the vocabulary:")
        print(accuracy.table())
        keep_words(Path(options.model), accuracy, options.split)
    if options.text is not None:
        _print_text(model, certificate, options.text)
    return 0


def _print_text(model: Any, certificate: WordCertificate, text: str) -> None:
    """Print how many words can be replaced without changing the answer, and which ones matter."""
    from wellposed.words import split_words
    from wellposed_lab.cli.prediction.labels import MOST_WORDS
    from wellposed_lab.tasks.text.tokenizers import lacks_blanks

    count = len(split_words(text))
    if not count or "\n" in text:
        raise ConfigError("--text: expected one line of 1 word or more, as `predict` reads them")
    answer = certificate.explain(text, MOST_WORDS)
    cut = ", read to the first {1} of {0} pieces".format(*answer.cut) if answer.cut else ""
    counted = f"{count} word{'s' if count != 1 else ''}{cut}"
    print(f"{printable(text)}\nanswer: {_class_name(model, answer.label)}, {counted}")
    if lacks_blanks(text):
        print(
            "words are separated by blanks, and this text has hardly any: put blanks between its"
            " words or characters, in training and here, so that each one counts"
        )
    swapped = ", ".join(printable(f"{name} -> {new}") for name, new in answer.swaps)
    attack = f"the attack needs {answer.needed}: {swapped}" if answer.needed else ""
    attack = attack or "the attack finds none"
    if certificate.reason:
        print(f"no certificate: {certificate.reason}; {attack}")
        return
    if answer.replaceable >= answer.words:
        print("no replaced words change it, however many")
    else:
        print(f"no {answer.replaceable} replaced words change it; {attack}")
    rows = [(printable(name), f"{share:.3f}") for name, share in answer.shares[:_SHOWN]]
    print(
        f"words that matter most against {_class_name(model, answer.against)}: the share of the margin"
        " that replacing each can take:"
    )
    print(aligned([("word", "share"), *rows], "l"))


def _class_name(model: Any, label: int) -> str:
    return printable(str(dict(model.config.id2label or {}).get(label, label)))


def _accuracy(
    model: Any,
    task: Task,
    certificate: Certificate,
    radii: list[float] | None,
    options: CertifyArguments,
) -> None:
    from wellposed_lab.training.certified.accuracy import certified_accuracy
    from wellposed_lab.training.certified.record import NAME, TOKEN_SHARES
    from wellposed_lab.training.certified.run import first_batches, keep, key

    batches = first_batches(task, options.split, options.examples, options.batch_size)
    attack: Any = {"attack_steps": options.attack_steps, "restarts": options.restarts}
    requested: Any = {"radii": TOKEN_SHARES if radii is None else radii, "in_tokens": radii is None}
    curve = certified_accuracy(model, batches, certificate, **requested, **attack)
    print(
        f"\ncertified accuracy on {options.split} of {task.name}, |delta| <= radius on the embedded"
        f" input:\n{curve.table()}"
    )
    if options.out is not None:
        with replace_files(options.out) as temporary:
            curve.to_csv(temporary / "certified_accuracy.csv")
    if radii is None and options.norm == "tok":
        folder = Path(options.model)
        asked = {name: getattr(options, name) for name in ("seq_len", "min_tokens", "radius")}
        counted = {"split": options.split, "examples": options.examples, **attack}
        keep(folder, curve, TOKEN_SHARES, key(folder, task, **counted, certificate=asked))
        print(f"kept for `wellposed report`: {folder / NAME}")


def _certified_task(model: Any, options: CertifyArguments) -> Task | None:
    """Return the task of a run folder, or None if certified accuracy is not defined for it."""
    from wellposed_lab.cli.load import load_tokenizer
    from wellposed_lab.tasks.task import build_task
    from wellposed_lab.training.certified.run import has_certified_accuracy
    from wellposed_lab.training.folder.run_folder import CONFIG, read_config

    folder = Path(options.model)
    is_run = (folder / CONFIG).is_file() and options.examples >= 1
    if not (is_run and has_certified_accuracy(model)):
        if options.data is None:
            return None
        raise ConfigError(
            f"--data {options.data}: certified accuracy needs the run folder of a classifier or language"
            f" model and --examples >= 1, received {folder}, a {type(model).__name__}, and"
            f" --examples {options.examples}"
        )
    config = read_config(folder)
    named = [v for v in config.task_options.values() if isinstance(v, str) and v[:3] == "hf:"]
    remote = [name for name in named if not Path(name[3:]).is_dir()]
    if remote and options.data is None:
        print(
            f"certified accuracy skipped: the run read {', '.join(remote)}, and only data that you"
            f" name is downloaded; to measure it, give --data {remote[0]}",
            file=sys.stderr,
        )
        return None
    if options.data is not None:
        config = replace(config, task_options={**config.task_options, "data": options.data})
    task = build_task(config.task, config.task_options)
    if load_tokenizer(options.model).get_vocab() != task.tokenizer.get_vocab():
        raise ConfigError(
            f"{options.data or 'the data of the run'}: its vocabulary differs from the one the model"
            " was trained with; give --data with the training data of the run"
        )
    return task


def _positions(model: Any, name: str) -> int:
    length = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ConfigError(f"{name}: the model has no maximum number of tokens; give --seq-len")
    return length


def _say_why(
    certificate: Certificate, model: Any, ask: Callable[..., Certificate], options: CertifyArguments
) -> None:
    where = ", ".join(layer.path or "the model" for layer in certificate.uncertified[:5])
    print(f"no bound: {where}", file=sys.stderr)
    if options.radius is not None or getattr(model.get_input_embeddings(), "weight", None) is None:
        return
    from wellposed.models import embedding_radius

    largest = embedding_radius(model)
    on_a_ball = ask(radius=1.1 * largest, cross_check=False)
    without = next(iter(on_a_ball.uncertified), None)
    if without is None and math.isfinite(on_a_ball.total):
        advice = (
            f"there is a bound on a ball: try --radius {1.1 * largest:.3g} (longest embedded token:"
        )
        advice += f" {largest:.4g})"
    else:
        # The table has the reasons without a ball.
        reasons = {layer.reason for layer in certificate.uncertified}
        why = ""
        if without is not None and without.reason not in reasons:
            why = f": {without.path or '.'} ({without.module}): {without.reason}"
        advice = f"there is no bound on a ball either{why}"
    print(advice, file=sys.stderr)
