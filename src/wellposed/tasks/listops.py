"""Task ``listops``: the value of a nested list expression, generated as in the Long Range Arena or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from wellposed.errors import ConfigError, DataError, listed
from wellposed.tasks.data.columns import TableOptions
from wellposed.tasks.data.listops_expressions import (
    DIGITS,
    GENERATED_OPERATORS,
    GENERATOR_VERSION,
    PARENTHESES,
    VOCABULARY,
    ListOpsGenerator,
    ListOpsRules,
    evaluate,
)
from wellposed.tasks.data.tables import LabelledTexts
from wellposed.tasks.kinds.classification import (
    ClassificationTask,
    LabelledExamples,
    refuse_longer,
    require_positive,
)
from wellposed.tasks.task import SPLITS, TASKS, Split, TaskSpec
from wellposed.tasks.text.tokenizers import NUM_SPECIAL, WordEncoder
from wellposed.tasks.text_classification import load_tables

RULES: Mapping[str, ListOpsRules] = {
    "short": ListOpsRules(max_depth=4, max_args=5, min_length=5, max_length=50),
    "lra": ListOpsRules(max_depth=10, max_args=10, min_length=500, max_length=2000),
}
SIZES: Mapping[str, Mapping[Split, int]] = {
    "short": {"train": 20000, "valid": 1000, "test": 1000},
    "lra": {"train": 96000, "valid": 2000, "test": 2000},
}


@dataclass(frozen=True)
class ListOpsOptions:
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
    num_train: int | None = None
    """Generated train expressions; 20000 (short) or 96000 (lra)."""
    num_valid: int | None = None
    """Generated valid expressions; 1000 (short) or 2000 (lra)."""
    num_test: int | None = None
    """Generated test expressions; 1000 (short) or 2000 (lra)."""
    data_seed: int | None = None
    """Seed of the generator, apart from the seed of training; 0 where not given."""


class ListOpsTask(ClassificationTask):
    """Ten-way classification of ListOps expressions by their value.

    Expressions are tokens in the Long Range Arena's form, without parentheses. Generated train, valid and test have no
    expression in common. In a file every expression is evaluated, and a malformed one or a wrong label is a `DataError`
    with file:line.

    Source: Nangia and Bowman 2018; the generator is that of Tay et al. 2021. Cost: a quarter of a second for the short
    setting, about a minute on one core for the 100,000 expressions of lra.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("listops", {"num_train": 100, "num_valid": 10, "num_test": 10})
    >>> example = task.dataset("train")[0]
    >>> task.tokenizer.decode(example["input_ids"]), example["labels"]
    ('[MED 7 4 [MAX 3 2 6 4 9 ] ]', [7])
    """

    name: ClassVar[str] = "listops"

    def __init__(self, options: ListOpsOptions) -> None:
        require_positive("listops", num_train=options.num_train, num_valid=options.num_valid, num_test=options.num_test)
        encoder = WordEncoder(VOCABULARY, drop=PARENTHESES)
        self.options = options
        if options.data == "builtin":
            examples, self._source = _generate(options)
        else:
            examples, self._source = _read(options, encoder)
        super().__init__(encoder=encoder, examples=examples, labels=DIGITS)

    def description(self) -> dict[str, Any]:
        described = {"task": self.name, **self._source, "tokenizer": self._encoder.description()}
        return {**described, **self._describe_examples(), "form": "Long Range Arena: parentheses removed"}


def _generate(options: ListOpsOptions) -> tuple[dict[Split, LabelledExamples], dict[str, Any]]:
    import hashlib

    import numpy as np

    from wellposed.tasks.batches.ragged import Ragged

    given = [name for name in ("valid", "test") if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"option {' and '.join(given)} needs data=FILE; builtin expressions bring their own splits")
    base = RULES[options.setting]
    rules = ListOpsRules(
        max_depth=_given(options.max_depth, base.max_depth),
        max_args=_given(options.max_args, base.max_args),
        min_length=_given(options.min_length, base.min_length),
        max_length=_given(options.max_length, base.max_length),
    )
    sizes = SIZES[options.setting]
    counts: dict[Split, int] = {
        "train": _given(options.num_train, sizes["train"]),
        "valid": _given(options.num_valid, sizes["valid"]),
        "test": _given(options.num_test, sizes["test"]),
    }
    seed = _given(options.data_seed, 0)
    drawn = ListOpsGenerator(rules, seed=seed).draw_distinct(sum(counts.values()))
    expressions, values = list(drawn), list(drawn.values())
    digest = hashlib.sha256(b"\n".join(b"%d %s" % (value, text.hex().encode()) for text, value in drawn.items()))
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


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _read(options: ListOpsOptions, encoder: WordEncoder) -> tuple[dict[Split, LabelledExamples], dict[str, Any]]:
    import numpy as np

    names = ("max_depth", "max_args", "min_length", "num_train", "num_valid", "num_test", "data_seed")
    unused = [name for name in names if getattr(options, name) is not None]
    if unused:
        raise ConfigError(f"listops: {', '.join(unused)} bound what is generated and have no effect on {options.data}")
    tables, described = load_tables(options, TableOptions())
    problems = [problem for split in SPLITS for problem in _wrong_rows(tables[split])]
    if problems:
        raise DataError(
            f"{len(problems)} rows that are not label and expression; correct or remove them:\n" + listed(problems)
        )
    examples: dict[Split, LabelledExamples] = {}
    for split in SPLITS:
        encoded = encoder.encode(tables[split].texts)
        if options.max_length is not None:
            refuse_longer(tables[split], encoded.full_lengths, options.max_length, "raise max_length, or leave it out")
        labels = np.array([int(label) for label in tables[split].labels], dtype=np.int64)
        examples[split] = LabelledExamples(encoded.ids, labels)
    return examples, described | {"labels_checked": "every label equals the value of its expression"}


def _wrong_rows(table: LabelledTexts) -> list[str]:
    """Return one problem for each row whose expression is malformed or whose label is not its value."""
    problems = []
    for index, (text, label) in enumerate(zip(table.texts, table.labels, strict=True)):
        problem = _problem(text.replace("(", " ( ").replace(")", " ) ").split(), label)
        if problem:
            problems.append(f"{table.where(index)}: {problem}")
    return problems


def _problem(tokens: Sequence[str], label: str) -> str | None:
    opened, closed = tokens.count("("), tokens.count(")")
    if opened != closed:
        return f"{opened} '(' and {closed} ')'"
    try:
        value = evaluate([token for token in tokens if token not in PARENTHESES])
    except ValueError as error:
        return f"malformed expression: {error} (parentheses not counted)"
    return None if label == str(value) else f"label {label!r}, but the expression has the value {value}"


TASKS.register("listops")(
    TaskSpec("listops", ListOpsOptions, ListOpsTask, "the value of a nested list expression, ten classes (accuracy)")
)
