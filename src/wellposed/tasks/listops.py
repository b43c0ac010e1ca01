"""Task ``listops``: the value of a nested list expression, generated or read from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from wellposed.errors import DataError, listed
from wellposed.options import CheckedOptions, Size
from wellposed.tasks.batches import Ragged
from wellposed.tasks.checks import given_options, refuse_options
from wellposed.tasks.data.labelled import LabelledTexts, load_labelled
from wellposed.tasks.data.splits import SPLITS, Split, refuse_split_files
from wellposed.tasks.generators.listops import (
    DIGITS,
    GENERATED_OPERATORS,
    GENERATOR_VERSION,
    PARENTHESES,
    VOCABULARY,
    ListOpsGenerator,
    ListOpsRules,
    evaluate,
)
from wellposed.tasks.kinds.classification import ClassificationTask, LabelledExamples, refuse_longer
from wellposed.tasks.task import register_task
from wellposed.tasks.text.tokenizers import NUM_SPECIAL, WordEncoder

RULES: Mapping[str, ListOpsRules] = {
    "short": ListOpsRules(max_depth=4, max_args=5, min_length=5, max_length=50),
    "lra": ListOpsRules(max_depth=10, max_args=10, min_length=500, max_length=2000),
}
SIZES: Mapping[str, Mapping[Split, int]] = {
    "short": {"train": 20000, "valid": 1000, "test": 1000},
    "lra": {"train": 96000, "valid": 2000, "test": 2000},
}


@dataclass(frozen=True)
class ListOpsOptions(CheckedOptions):
    """Options of the task `listops`."""

    data: str = "builtin"
    """builtin (generated), a tsv, csv or jsonl file of labels and expressions, a folder, or hf:name[:config]."""
    valid: str | None = None
    """File of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """File of the test split; found beside the train file, or cut from it, where not given."""
    setting: Literal["short", "lra"] = "short"
    """Bounds and sizes of what is generated: short has 6 to 49 tokens, lra is Long Range Arena's 501 to 1999."""
    max_depth: int | None = None
    """Digits stand at this depth at most; 4 (short) or 10 (lra)."""
    max_args: int | None = None
    """Most arguments of an operator; 5 (short) or 10 (lra)."""
    min_length: int | None = None
    """Generated expressions have more tokens than this; 5 (short) or 500 (lra)."""
    max_length: int | None = None
    """Generated expressions have fewer tokens than this; 50 (short) or 2000 (lra). In a file: most tokens of one."""
    num_train: Size | None = None
    """Generated train expressions; 20000 (short) or 96000 (lra)."""
    num_valid: Size | None = None
    """Generated valid expressions; 1000 (short) or 2000 (lra)."""
    num_test: Size | None = None
    """Generated test expressions; 1000 (short) or 2000 (lra)."""
    data_seed: int | None = None
    """Seed of the generator, apart from the seed of training; 0 where not given."""


class ListOpsTask(ClassificationTask):
    """Ten-way classification of ListOps expressions by their value.

    Expressions are tokens in the Long Range Arena's form, without parentheses. Generated train,
    valid and test have no expression in common. In a file every expression is evaluated, and a
    malformed one or a wrong label is a `DataError` with file:line.

    Source: Nangia and Bowman 2018; the generator is that of Tay et al. 2021. Cost: a quarter of a
    second for the short setting, about a minute on one core for the 100,000 expressions of lra.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("listops", {"num_train": 100, "num_valid": 10, "num_test": 10})
    >>> example = task.dataset("train")[0]
    >>> task.tokenizer.decode(example["input_ids"]), example["labels"]
    ('[MED 7 4 [MAX 3 2 6 4 9 ] ]', [7])
    """

    name: ClassVar[str] = "listops"

    def __init__(self, options: ListOpsOptions) -> None:
        encoder = WordEncoder(VOCABULARY, drop=PARENTHESES)
        self.options = options
        examples, source = (
            _generate(options) if options.data == "builtin" else _read(options, encoder)
        )
        details = {"form": "Long Range Arena: parentheses removed"}
        super().__init__(
            encoder=encoder, examples=examples, labels=DIGITS, source=source, details=details
        )


def _generate(options: ListOpsOptions) -> tuple[dict[Split, LabelledExamples], dict[str, Any]]:
    refuse_split_files(
        "builtin expressions bring their own splits", valid=options.valid, test=options.test
    )
    bounds = given_options(options, ("max_depth", "max_args", "min_length", "max_length"))
    rules = replace(RULES[options.setting], **bounds)
    counts = {
        split: getattr(options, f"num_{split}") or SIZES[options.setting][split] for split in SPLITS
    }
    seed = options.data_seed or 0
    drawn = ListOpsGenerator(rules, seed=seed).draw_distinct(sum(counts.values()))
    expressions, values = list(drawn), list(drawn.values())
    digest = hashlib.sha256(
        b"\n".join(b"%d %s" % (value, text.hex().encode()) for text, value in drawn.items())
    )
    examples: dict[Split, LabelledExamples] = {}
    start = 0
    for split in SPLITS:
        chosen = slice(start, start := start + counts[split])
        flat = np.frombuffer(b"".join(expressions[chosen]), dtype=np.uint8) + np.uint8(NUM_SPECIAL)
        ids = Ragged(flat, [len(expression) for expression in expressions[chosen]])
        examples[split] = LabelledExamples(ids, np.array(values[chosen], dtype=np.int64))
    return examples, {
        "source": f"builtin: generated by the Long Range Arena rules, setting {options.setting}",
        "generator_version": GENERATOR_VERSION,
        "data_seed": seed,
        "rules": {
            "max_depth": rules.max_depth,
            "max_args": rules.max_args,
            "tokens": f"more than {rules.min_length}, fewer than {rules.max_length}",
            "operators": list(GENERATED_OPERATORS),
        },
        "sha256": digest.hexdigest(),
    }


def _read(
    options: ListOpsOptions, encoder: WordEncoder
) -> tuple[dict[Split, LabelledExamples], dict[str, Any]]:
    drawn = [
        "max_depth",
        "max_args",
        "min_length",
        "num_train",
        "num_valid",
        "num_test",
        "data_seed",
    ]
    reason = f"bound what is generated and have no effect on {options.data}"
    refuse_options("listops", options, drawn, reason)
    tables, described = load_labelled(options.data, valid=options.valid, test=options.test)
    problems = [problem for split in SPLITS for problem in _wrong_rows(tables[split])]
    if problems:
        raise DataError(
            f"{len(problems)} rows that are not label and expression; correct or remove them:\n"
            + listed(problems)
        )
    examples: dict[Split, LabelledExamples] = {}
    for split in SPLITS:
        encoded = encoder.encode(tables[split].texts)
        if options.max_length is not None:
            remedy = "raise max_length, or leave it out"
            refuse_longer(tables[split], encoded.full_lengths, options.max_length, remedy)
        labels = np.array([int(label) for label in tables[split].labels], dtype=np.int64)
        examples[split] = LabelledExamples(encoded.ids, labels)
    return examples, described | {
        "labels_checked": "every label equals the value of its expression"
    }


def _wrong_rows(table: LabelledTexts) -> list[str]:
    """Return one problem for each row whose expression is malformed or whose label is not its
    value."""
    return [
        f"{table.where(index)}: {problem}"
        for index, (text, label) in enumerate(zip(table.texts, table.labels, strict=True))
        if (problem := _problem(text.replace("(", " ( ").replace(")", " ) ").split(), label))
    ]


def _problem(tokens: Sequence[str], label: str) -> str | None:
    opened, closed = tokens.count("("), tokens.count(")")
    if opened != closed:
        return f"{opened} '(' and {closed} ')'"
    try:
        value = evaluate([token for token in tokens if token not in PARENTHESES])
    except ValueError as error:
        return f"malformed expression: {error} (parentheses not counted)"
    right = label == str(value)
    return None if right else f"label {label!r}, but the expression has the value {value}"


register_task(
    ListOpsTask, ListOpsOptions, "the value of a nested list expression, ten classes (accuracy)"
)
