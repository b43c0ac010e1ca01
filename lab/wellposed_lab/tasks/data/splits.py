"""Train, valid and test: found by file name, or cut from train by a fixed shuffle."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from wellposed.errors import ConfigError, DataError, import_extra, is_about_resources, listed
from wellposed.hub import UNREACHABLE, hub_answers
from wellposed.options import CheckedOptions
from wellposed_lab.tasks.data.files import missing_file

Split: TypeAlias = Literal["train", "valid", "test"]
SPLITS: tuple[Split, Split, Split] = ("train", "valid", "test")
SPLIT_WORDS: Mapping[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev", "eval"),
    "test": ("test",),
}
CUT_SHARE = 0.05
MIN_ROWS_TO_CUT = 20
MIN_CHARACTERS_TO_CUT = 40

Rows = TypeVar("Rows", bound="Selectable")
Read = TypeVar("Read")
Described: TypeAlias = dict[str, Any]
Loaded: TypeAlias = tuple[dict[Split, Read], Described]
"""The data of each split, and a description of its source."""
Draw = Callable[[Any, Sequence[Split], int], dict[Split, list[int]]]
"""From train, the missing splits and the number of rows of each, to the rows of each and of train."""


@dataclass(frozen=True)
class DataOptions(CheckedOptions):
    """Data of a task."""

    data: str
    """A file, a folder, or hf:name[:config]."""
    valid: str | None = None
    """File of the valid split (default: found beside the train file, else cut from it)."""
    test: str | None = None
    """File of the test split (default: found beside the train file, else cut from it)."""

    def problems(self) -> list[str]:
        if self.data != "builtin" and not self.data.startswith("hf:"):
            return []
        what = f"only with data=FILE; {self.data} data has its own splits"
        return [f"option {name}: {what}" for name in given_options(self, ("valid", "test"))]


class Selectable(Protocol):
    """Rows that can be selected."""

    def __len__(self) -> int: ...

    def select(self: Rows, rows: Sequence[int], /) -> Rows: ...


def given_options(options: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the named options that are not None."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def refuse_split_files(options: DataOptions, what: str) -> None:
    """Raise `ConfigError` if files of splits are given with data that has its own splits."""
    named = given_options(options, ("valid", "test"))
    if named:
        raise ConfigError(
            f"option {' and '.join(named)}: only with data=FILE; {options.data} is {what} and"
            " has its own splits"
        )


def load_splits(
    options: DataOptions,
    *,
    suffixes: Sequence[str],
    read_file: Callable[[Path], tuple[Read, Described]],
    read_hub: Callable[[Any, str], Read] | None = None,
    unlike: re.Pattern[str] | None = None,
) -> Loaded[Read]:
    """Read every split of the data, and describe its source. ``read_file`` takes a path,
    ``read_hub`` (if any) hub rows and a name for errors. Names like ``unlike`` are skipped."""
    data = options.data
    if data == "builtin":
        raise ConfigError("data = 'builtin': this task has no such data; give a file or hf:NAME")
    if read_hub is not None and data.startswith("hf:"):
        return load_hub_splits(data, read_hub)
    paths, origin = find_split_files(options, suffixes=suffixes, unlike=unlike)
    contents: dict[Split, Read] = {}
    described: dict[Split, Described] = {}
    for split, path in paths.items():
        contents[split], described[split] = read_file(path)
    return contents, {"source": data, "files": described, "splits": origin}


def load_hub_splits(data: str, read: Callable[[Any, str], Read]) -> Loaded[Read]:
    """Read every split of ``hf:name[:config]`` from its rows and a name for errors."""
    contents: dict[Split, Read] = {}
    described: dict[Split, Described] = {}
    for split, rows in load_hub_dataset(data).items():
        contents[split] = read(rows, f"{data} ({split})")
        described[split] = {"rows": len(rows), "fingerprint": getattr(rows, "_fingerprint", None)}
    return contents, {"source": data, "files": described, "splits": "published"}


def find_split_files(
    options: DataOptions, *, suffixes: Sequence[str], unlike: re.Pattern[str] | None = None
) -> tuple[dict[Split, Path], str]:
    """Return the files of the splits of a train file or a folder, and how they were found.

    Beside ``ptb.char.train.txt.gz``, valid and test have valid, validation, val, dev or eval, and
    test, in place of ``train``, with or without ``.gz``. In a folder, the only file with ``train``
    in its name is used, and names with one more part, as ``test_a.tsv.gz``, are accepted too.
    """
    root = Path(options.data)
    explicit = {n: Path(path) for n, path in given_options(options, ("valid", "test")).items()}
    for path in (root, *explicit.values()):
        if not path.exists():
            raise missing_file(path)
    train = _train_file(root, suffixes, unlike) if root.is_dir() else root
    paths: dict[Split, Path] = {"train": train}
    for split in SPLITS[1:]:
        path = explicit.get(split) or _sibling(train, split, loose=root.is_dir())
        paths |= {split: path} if path else {}
    origin = "found by name" if len(paths) - 1 > len(explicit) else "one file"
    return paths, origin + (f", {' and '.join(explicit)} given" if explicit else "")


def _train_file(folder: Path, suffixes: Sequence[str], unlike: re.Pattern[str] | None) -> Path:
    endings = tuple(suffix + gz for suffix in suffixes for gz in ("", ".gz"))
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    likely = [name for name in names if name.lower().endswith(endings) and train_position(name)]
    trains = [name for name in likely if unlike is None or not unlike.search(name)]
    if len(trains) == 1:
        return folder / trains[0]
    if trains:
        raise DataError(
            f"{folder}: {len(trains)} train files, expected one; give one of them instead of the"
            " folder:\n" + listed([str(folder / name) for name in trains])
        )

    looked_for = ", ".join(f"train{suffix}[.gz]" for suffix in suffixes)
    holds = ", ".join(names[:10]) or "nothing"
    raise DataError(
        f"{folder}: no train file; looked for names like {looked_for} (with a prefix such as"
        f" 'name.train' or 'name_train'), and found: {holds}; give the file itself"
    )


def train_position(name: str) -> tuple[int, int] | None:
    """Return the position of the last word ``train`` in a file name."""
    matches = list(re.finditer(r"(?<![A-Za-z])train(?![A-Za-z])", name, re.IGNORECASE))
    return matches[-1].span() if matches else None


def _sibling(train: Path, split: Split, *, loose: bool) -> Path | None:
    """Return the file of a split beside train's; ``loose`` accepts one more part in its name."""
    position = train_position(train.name)
    if position is None:
        return None

    before = train.name[: position[0]]
    after = train.name[position[1] :]
    plain = re.escape(after.removesuffix(".gz"))
    names = sorted(entry.name for entry in train.parent.iterdir() if entry.is_file())
    more = rf"[._-].*{plain}(\.gz)?"
    for word in SPLIT_WORDS[split]:
        for end in (re.escape(after), plain, rf"{plain}\.gz", *([more] if loose else [])):
            pattern = re.compile(re.escape(before + word) + end, re.IGNORECASE)
            matches = [name for name in names if pattern.fullmatch(name)]
            if len(matches) > 1 and end == more:
                raise DataError(
                    f"{train.parent}: {len(matches)} files could be the {split} split of"
                    f" {train.name}: {', '.join(matches)}; name one with the option {split!r}"
                )
            if matches:
                return train.parent / matches[0]

    return None


@contextmanager
def _cache_if_offline() -> Iterator[None]:
    """Within the context, use only the hub's cache if the hub does not answer."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def load_hub_dataset(data: str) -> dict[Split, Any]:
    """Load ``hf:name[:config]`` with the `datasets` library; return its splits by our names."""
    datasets = import_extra("datasets", "datasets", "hf: data sets")
    name, _, config = data.removeprefix("hf:").partition(":")
    if not name:
        raise DataError(f"{data!r}: no data set is named; write hf:name or hf:name:config")

    try:
        with _cache_if_offline():
            loaded = datasets.load_dataset(name, config or None)
    except Exception as error:
        if is_about_resources(error):
            raise
        lost = isinstance(error, ConnectionError) and not hub_answers()
        reason = UNREACHABLE if lost else f"{type(error).__name__}: {error}"
        raise DataError(f"{data}: cannot be loaded: {reason}") from error

    if "train" not in loaded:
        raise DataError(f"{data}: no split named train; it has {', '.join(map(str, loaded))}")
    return {
        split: loaded[names[0]]
        for split in SPLITS
        if (names := [word for word in SPLIT_WORDS[split] if word in loaded])
    }


def cut_missing(
    splits: Mapping[Split, Rows],
    where: str,
    described: Described,
    *,
    noun: str = "rows",
    at_least: int = MIN_ROWS_TO_CUT,
    share: float = CUT_SHARE,
    remedy: str = "give them with the options {missing}",
    draw: Draw | None = None,
) -> Loaded[Rows]:
    """Cut missing splits from train by a fixed shuffle; return all splits, and what was cut.

    Each gets the ``share`` of train, row by row unless ``draw`` chooses the rows. Fewer rows than
    ``at_least`` are an error that calls them ``noun`` and ends with ``remedy``.

    >>> class Numbers(tuple):
    ...     def select(self, rows):
    ...         return Numbers(self[row] for row in rows)
    >>> found = {"train": Numbers(range(20)), "valid": Numbers([20])}
    >>> splits, described = cut_missing(found, "x.tsv", {"source": "x.tsv"})
    >>> splits["test"], described["cut_from_train"]
    ((15,), {'test': '1 of 20 rows, by a fixed shuffle'})
    """
    missing: list[Split] = [split for split in SPLITS if split not in splits]
    train = splits["train"]
    if not missing:
        return {split: splits[split] for split in SPLITS}, described
    if len(train) < at_least:
        names = " and ".join(missing)
        raise DataError(
            f"{where}: {len(train)} {noun.partition(',')[0]} are too few to cut {names} from,"
            f" expected at least {at_least}; " + remedy.format(missing=names)
        )

    rows = (draw or _draw)(train, missing, max(1, round(len(train) * share)))
    cut = {split: train.select(sorted(chosen)) for split, chosen in rows.items()}
    description = f"of {len(train)} {noun}, by a fixed shuffle"
    taken = {split: f"{len(rows[split])} {description}" for split in missing}
    everything = {**splits, **cut}
    return {split: everything[split] for split in SPLITS}, described | {"cut_from_train": taken}


def _draw(train: Selectable, missing: Sequence[Split], count: int) -> dict[Split, list[int]]:
    order = shuffled(range(len(train)))
    rows: dict[Split, list[int]] = {"train": order[len(missing) * count :]}
    for index, split in enumerate(missing):
        rows[split] = order[index * count :][:count]
    return rows


def shuffled(values: Sequence[Read]) -> list[Read]:
    """Return the values in the order of the fixed shuffle that cuts splits."""
    order = list(values)
    random.Random("cut").shuffle(order)
    return order


def cut_missing_text(texts: Mapping[Split, str], where: str, described: Described) -> Loaded[str]:
    """Cut missing texts from the end of train, valid before test, 5 % of train each."""
    train = texts["train"]
    missing: list[Split] = [split for split in SPLITS if split not in texts]
    if missing and len(train) < MIN_CHARACTERS_TO_CUT:
        raise DataError(
            f"{where}: {len(train)} characters are too few to cut {' and '.join(missing)} from;"
            f" expected >= {MIN_CHARACTERS_TO_CUT}"
        )

    count = round(len(train) * CUT_SHARE)
    start = len(train) - count * len(missing)
    cut: dict[Split, str] = {**texts, "train": train[:start]}
    for index, split in enumerate(missing):
        cut[split] = train[start + index * count :][:count]
    taken = dict.fromkeys(missing, f"contiguous {CUT_SHARE:.0%}")
    return cut, described | ({"cut_from_train": taken} if missing else {})
