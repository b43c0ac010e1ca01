"""Task ``minbert``: sentiment, paraphrase and similarity at once (McGrath 2024, sec. 4.1).

Sets: Stanford Sentiment, Quora duplicate questions, STS benchmark. Files: tab separated with a
header, quoted as CSV, plain or gzip, named as in the CS224N project (``ids-sst-train.csv``,
``quora-train.csv``, ``sts-dev.csv``), optionally with one more part (``quora-train-15k.csv.gz``).
All train files of a set are joined; dev or valid files are the split valid. ``test-student`` is not read.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from wellposed.errors import ConfigError, DataError, listed
from wellposed_lab.tasks.batches import IGNORED_LABEL, bucketed_batches, pad_examples
from wellposed_lab.tasks.data.files import missing_file, read_table
from wellposed_lab.tasks.task import TASKS, Task, TaskSpec
from wellposed_lab.tasks.text.tokenizers import load_tokenizer, tokenizers_library

if TYPE_CHECKING:
    from torch import Tensor, nn

OUTPUTS = {"sst": slice(0, 5), "para": slice(5, 6), "sts": slice(6, 7), "second": slice(7, 8)}
"""Logits of the head of each set, and of the second sentence of a paraphrase of two passes."""
LABELS = (*(f"sst {stars}" for stars in range(5)), "para", "sts")
ERROR = "err_orth/"
SCALE_FREE = "scale_free_err_orth/"
PROBE_ROWS = 16
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPLIT_WORDS = {"train": "train", "valid": "(?:dev|valid)"}
Rows: TypeAlias = "list[tuple[tuple[str, ...], float]]"
"""One or two sentences and a label in each row."""


@dataclass(frozen=True)
class SetFormat:
    """File format of one set: name of its files, columns, and allowed labels."""

    stem: str
    sentences: tuple[str, ...]
    label: str
    highest: int
    integers: bool
    """Whether labels, 0 to ``highest``, are integers."""


FORMATS = {
    "sst": SetFormat("sst", ("sentence",), "sentiment", 4, True),
    "para": SetFormat("quora", ("sentence1", "sentence2"), "is_duplicate", 1, True),
    "sts": SetFormat("sts", ("sentence1", "sentence2"), "similarity", 5, False),
}
SETS = tuple(FORMATS)


@dataclass(frozen=True)
class MinBertOptions:
    """Options of the task `minbert`."""

    data: str
    """Folder of ids-sst-train.csv, quora-train.csv, sts-train.csv and their dev files, plain or
    gzip."""
    tokenizer: str = "wordpiece"
    """wordpiece, learned from the train rows, or hf:NAME_OR_PATH."""
    vocab_size: int = 4000
    """Number of learned word pieces."""
    max_length: int = 48
    """Longest pass in tokens: pairs together, or each sentence of a paraphrase in two passes. Longer
    ones are cut and counted."""
    limit_train: int | None = None
    """Number of train rows of each set; None uses all."""
    paraphrase: Literal["joint", "two_passes"] = "joint"
    """joint: both sentences of a pair in one pass, with [SEP] between them. two_passes: one pass for
    each sentence, and a linear layer on both [CLS] states, so that neither sentence sees the other."""


class MinBertTask(Task):
    """Seven outputs on one encoder: five classes, a paraphrase or not, a similarity.

    Train batches have as many rows of each set (smaller sets repeat); the loss is the sum of the
    means. *valid* and *test* are the dev rows, as in the paper.
    """

    name: ClassVar = "minbert"
    kind: ClassVar = "sequence_classification"
    headline: ClassVar = "overall"
    higher_is_better: ClassVar = True

    def __init__(self, options: MinBertOptions) -> None:
        self.options = options
        read, self._files = read_minbert(options.data)
        limited = {name: read[name, "train"][: options.limit_train] for name in SETS}
        length = options.max_length
        if options.tokenizer.startswith("hf:"):
            tokenizer = load_tokenizer(options.tokenizer.removeprefix("hf:"))
        else:
            texts = [text for rows in limited.values() for row, _ in rows for text in row]
            tokenizer = train_word_pieces(texts, vocab_size=options.vocab_size, max_length=length)

        self._tokens = tokenizer
        self._sizes = [len(rows) for rows in limited.values()]
        self._cut = dict.fromkeys(SETS, 0)
        self._rows: dict[str, list[dict[str, Any]]] = {"train": [], "valid": []}

        for split, examples in self._rows.items():
            for index, name in enumerate(SETS):
                rows = limited[name] if split == "train" else read[name, split]
                apart = name == "para" and options.paraphrase == "two_passes"
                sides = [[((pair[i],), y) for pair, y in rows] for i in (0, 1)] if apart else [rows]
                coded = [encode_rows(side, tokenizer, max_length=length) for side in sides]
                self._cut[name] += sum(cut for _, cut in coded)
                columns, *second = (side for side, _ in coded)
                for row, other in zip(columns, *second, strict=True) if apart else ():
                    row["second"] = other
                for row, (_, label) in zip(columns, rows, strict=True):
                    labels = [float(IGNORED_LABEL)] * len(SETS)
                    labels[index] = label
                    examples.append({**row, "labels": labels})
        self._rows["test"] = self._rows["valid"]

    def _build_tokenizer(self) -> Any:
        return self._tokens

    def model_kwargs(self) -> dict[str, Any]:
        second = self.options.paraphrase == "two_passes"
        labels = (*LABELS, *("para, second sentence",) * second)
        return {
            "vocab_size": len(self._tokens),
            "max_position_embeddings": self.options.max_length,
            "pad_token_id": self._tokens.pad_token_id,
            "num_labels": len(labels),
            "id2label": dict(enumerate(labels)),
            "label2id": {label: number for number, label in enumerate(labels)},
        }

    def dataset(self, split: str) -> Sequence[Any]:
        return self._rows[split]

    def lengths(self, split: str) -> Sequence[int]:
        return [len(row["input_ids"]) for row in self._rows[split]]

    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        import torch

        rows = [
            {name: row[name] for name in row if name not in ("labels", "second")}
            for row in examples
        ]
        second = [row["second"] for row in examples if "second" in row]
        batch = pad_examples([*rows, *second], pad_id=self._tokens.pad_token_id)
        none = [float(IGNORED_LABEL)] * len(SETS)
        labels = [row["labels"] for row in examples] + [none] * len(second)
        return {**batch, "labels": torch.tensor(labels)}

    def batches(self, split: str, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        if split != "train":
            return bucketed_batches(self.lengths(split), batch_size, shuffle=split)
        per_set = max(1, batch_size // len(SETS))
        count = max(1, max(self._sizes) // per_set)
        drawn = []
        first = 0
        for name, size in zip(SETS, self._sizes, strict=True):
            rows = _passes(size, f"{seed}/{name}", epoch * count * per_set, count * per_set)
            drawn.append([first + row for row in rows])
            first += size
        starts = range(0, count * per_set, per_set)
        return [[row for rows in drawn for row in rows[at : at + per_set]] for at in starts]

    def loss_sum(
        self, logits: Tensor, batch: Mapping[str, Tensor], *, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return three times the summed losses and the rows: for equal sets, the sum of the means.

        Losses: cross entropy (sst), binary cross entropy (para), ``(5 sigmoid(z) - y)^2`` (sts).
        McGrath (2024) prints a "cosine embedding loss"; the cosine of one number has no gradient.
        """
        import torch
        from torch.nn import functional

        by_set = self._by_set(logits.float(), batch["labels"])
        total = logits.new_zeros((), dtype=torch.float32)
        for name, (output, labels) in by_set.items():
            summed: dict[str, Any] = {"reduction": "sum"}
            if name == "sst":
                summed["label_smoothing"] = label_smoothing
                loss = functional.cross_entropy(output, labels.long(), **summed)
            elif name == "para":
                loss = functional.binary_cross_entropy_with_logits(output[:, 0], labels, **summed)
            else:
                loss = functional.mse_loss(5 * output[:, 0].sigmoid(), labels, **summed)
            total = total + loss
        return len(SETS) * total, (batch["labels"] != IGNORED_LABEL).sum().float()

    def metric_sums(
        self, logits: Tensor, batch: Mapping[str, Tensor]
    ) -> dict[str, tuple[float, float]]:
        by_set = self._by_set(logits, batch["labels"])
        names: list[str] = ["sst", "para", *_MOMENTS]
        sums = dict.fromkeys(names, (0.0, 0.0))
        for name, (output, labels) in by_set.items():
            count = float(len(labels))
            if name == "sst":
                sums[name] = float((output.argmax(-1) == labels.long()).sum()), count
            elif name == "para":
                sums[name] = float(((output[:, 0] > 0) == labels.bool()).sum()), count
            else:
                x = output[:, 0].double()
                y = labels.double()
                values = (x, y, x * x, y * y, x * y)
                moments = zip(_MOMENTS, values, strict=True)
                sums |= {moment: (float(value.sum()), count) for moment, value in moments}

        return sums

    def summarize(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        means = {name: total / max(1.0, count) for name, (total, count) in totals.items()}
        x, y, xx, yy, xy = (means[moment] for moment in _MOMENTS)
        spread = (xx - x * x) * (yy - y * y)
        # Pearson's r of a constant output is undefined; 0 is used.
        r = (xy - x * y) / math.sqrt(spread) if spread > 0 else 0.0
        scores = {"sst": means["sst"], "para": means["para"], "sts": r}
        return {**scores, "overall": overall_score(scores)}

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Return err_orth of embeddings, queries, keys, values and affinities, by role and layer."""
        from wellposed.measurement import measure
        from wellposed_lab.training.loop.batches import model_inputs, to_device

        device = next(model.parameters()).device
        probe = [row for row in self._rows["valid"] if row["labels"][-1] != IGNORED_LABEL]
        batch = to_device(self.collate(probe[:PROBE_ROWS]), device)
        measured = measure(model, model_inputs(model, batch), spectra=False)
        errors = {}
        for row in measured.rows:
            if row["role"] in ("query", "key", "value", "token_embedding"):
                name = row["role"] if row["layer"] is None else f"{row['role']}.{row['layer']}"
                errors[ERROR + name] = row["orthogonality_error"]
                errors[SCALE_FREE + name] = row["scale_free_orthogonality_error"]
        for row in measured.activations:
            heads = row["affinity_orthogonality_error"]
            if heads:
                errors[f"{ERROR}affinity.{row['layer']}"] = sum(heads) / len(heads)
        return errors

    def reference(self) -> dict[str, float]:
        labels = [row["labels"] for row in self._rows["valid"]]
        scores = {"sts": 0.0}
        for index, name in enumerate(SETS[:2]):
            mine = [row[index] for row in labels if row[index] != IGNORED_LABEL]
            scores[name] = max(map(mine.count, set(mine))) / len(mine)
        return {"overall": overall_score(scores), **scores}

    def description(self) -> dict[str, Any]:
        rows = dict(zip(SETS, self._sizes, strict=True))
        return {"task": self.name, "files": self._files, "train_rows": rows, "rows_cut": self._cut}

    def _by_set(self, logits: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the outputs and labels of each set that occurs in the batch."""
        outputs = {}
        second = logits[(labels == IGNORED_LABEL).all(1)][:, OUTPUTS["second"]]
        for index, name in enumerate(SETS):
            mine = labels[:, index] != IGNORED_LABEL
            if mine.any():
                # A linear layer on two states is the sum of one layer on each.
                other = second if name == "para" and len(second) else 0.0
                outputs[name] = (logits[mine][:, OUTPUTS[name]] + other, labels[mine, index])
        return outputs


_MOMENTS = ("x", "y", "xx", "yy", "xy")


def _passes(size: int, seed: str, first: int, count: int) -> list[int]:
    """Return ``count`` rows from ``first`` on, of a stream that reshuffles all rows in each pass."""
    rows: list[int] = []
    for number in range(first // size, (first + count - 1) // size + 1):
        order = list(range(size))
        random.Random(f"{seed}/{number}").shuffle(order)
        rows += order
    start = first % size
    return rows[start : start + count]


def overall_score(scores: Mapping[str, float]) -> float:
    """Return ``(sst + para + (sts + 1) / 2) / 3``: the mean score, the correlation mapped to 0..1.

    Status: exact. Source: the CS224N project; gives every row of Table 1 to its last digit.

    >>> round(overall_score({"sst": 0.485, "para": 0.876, "sts": 0.8358}), 4)
    0.7596
    """
    return (scores["sst"] + scores["para"] + (scores["sts"] + 1) / 2) / 3


def read_minbert(
    folder: str | Path,
) -> tuple[dict[tuple[str, str], Rows], dict[str, list[dict[str, Any]]]]:
    """Read rows by set and split, and describe their files; malformed rows are listed."""
    folder = Path(folder)
    if folder.is_file():
        raise DataError(f"{folder}: is a file, expected a folder")
    if not folder.is_dir():
        raise missing_file(folder)

    names = sorted(entry.name for entry in folder.iterdir())
    paths = {}
    missing = []
    for (name, form), split in ((item, split) for item in FORMATS.items() for split in SPLIT_WORDS):
        pattern = rf"(?:ids-)?{form.stem}-{SPLIT_WORDS[split]}(?:-[\w-]+)?\.csv(?:\.gz)?"
        paths[name, split] = [item for item in names if re.fullmatch(pattern, item)]
        wanted = f"a file named like {form.stem}-{split.replace('valid', 'dev')}.csv[.gz]"
        missing += [] if paths[name, split] else [f"{name}, {split}: {wanted}"]

    doubled = [name for item in paths.values() for name in item if f"{name}.gz" in item]
    if missing or doubled:
        what = "both plain and gzip, keep one of each" if doubled else "these files are missing"
        listing = ", ".join(names[:12]) or "nothing"
        raise DataError(f"{folder}: {what}:\n{listed(doubled or missing)}\nit holds: {listing}")

    rows: dict[tuple[str, str], Rows] = {item: [] for item in paths}
    described: dict[str, list[dict[str, Any]]] = {name: [] for name in FORMATS}
    for (name, split), files in paths.items():
        for file in files:
            mine, about = _read(folder / file, FORMATS[name])
            rows[name, split] += mine
            described[name].append(about | {"path": file, "split": split, "rows": len(mine)})

    return rows, described


def _read(path: Path, form: SetFormat) -> tuple[Rows, dict[str, Any]]:
    table, described = read_table(path)
    wanted = (*form.sentences, form.label)
    missing = [name for name in wanted if name not in table.names]
    if missing:
        raise DataError(
            f"{path}:1: the header lacks {', '.join(missing)}; expected tab-separated columns "
            f"index, id, {', '.join(wanted)}, received {', '.join(map(repr, table.names))}"
        )

    columns = [[text.strip() for text in table.texts(table.names.index(n))[0]] for n in wanted]
    rows = list(zip(*columns, strict=True))
    problems = [
        f"{path}:{line}: {problem}"
        for line, row in zip(table.places, rows, strict=True)
        if (problem := _problem(row, form))
    ]
    table.refuse(problems)

    return [(row[:-1], float(row[-1])) for row in rows], described


def _problem(row: Sequence[str], form: SetFormat) -> str | None:
    empty = [name for name, text in zip(form.sentences, row[:-1], strict=True) if not text]
    if empty:
        return f"{' and '.join(empty)} is empty"
    try:
        value = float(row[-1])
    except ValueError:
        value = math.nan
    if 0 <= value <= form.highest and not (form.integers and value % 1):
        return None
    kind = "a whole number" if form.integers else "a number"
    return f"{form.label} is {row[-1]!r}, expected {kind} in 0..{form.highest}"


def train_word_pieces(texts: Sequence[str], *, vocab_size: int, max_length: int) -> Any:
    """Return a lower-casing BERT tokenizer learned from ``texts``; pairs are joined by [SEP]."""
    from transformers import BertTokenizer

    teacher = tokenizers_library().BertWordPieceTokenizer()
    # The trainer numbers continuations in an order that changes with the process, and breaks ties by
    # number. Naming the continuations first makes the result reproducible.
    letters = sorted(set().union(*(teacher.normalize(text) for text in texts)) - set(" "))
    first = [*SPECIAL_TOKENS, *(f"##{letter}" for letter in letters)]
    teacher.train_from_iterator(
        texts,
        vocab_size,
        min_frequency=0,
        limit_alphabet=len(letters),
        special_tokens=first,
        show_progress=False,
    )
    pieces = sorted(set(teacher.get_vocab()) - set(SPECIAL_TOKENS))
    vocabulary = {piece: number for number, piece in enumerate((*SPECIAL_TOKENS, *pieces))}
    return BertTokenizer(vocabulary, model_max_length=max_length)


def encode_rows(rows: Rows, tokenizer: Any, *, max_length: int) -> tuple[list[dict[str, Any]], int]:
    """Return the tokenizer's columns of every row, and the number of rows cut to ``max_length``."""
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            "the tokenizer has no pad token; give an encoder (BERT, RoBERTa, ...) and its tokenizer"
        )
    parts = [list(part) for part in zip(*(sentences for sentences, _ in rows), strict=True)]
    coded = tokenizer(*parts, verbose=False)
    cut = sum(len(row) > max_length for row in coded["input_ids"])
    if cut:
        options: Any = {"truncation": "longest_first", "max_length": max_length, "verbose": False}
        coded = tokenizer(*parts, **options)
    return [dict(zip(coded, row, strict=True)) for row in zip(*coded.values(), strict=True)], cut


TASKS.register("minbert")(
    TaskSpec(
        "minbert",
        MinBertOptions,
        MinBertTask,
        "sentiment, paraphrase and similarity at once, from the files of the minBERT project",
    )
)
