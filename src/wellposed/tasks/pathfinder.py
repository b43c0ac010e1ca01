"""Task ``pathfinder`` of the Long Range Arena: are two dots on one dashed curve?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from wellposed.errors import ConfigError, DataError, listed
from wellposed.options import CheckedOptions, Size
from wellposed.tasks.checks import given_options, refuse_options
from wellposed.tasks.data.files import describe_file, missing_file, read_text
from wellposed.tasks.data.images import Images, read_image_file, read_npz_splits, stack_images
from wellposed.tasks.data.splits import SPLITS, Split, cut_missing
from wellposed.tasks.generators.pathfinder import (
    GENERATOR_VERSION,
    MATCHED_LENGTH,
    RULES,
    PathfinderRules,
    draw_image,
    render,
)
from wellposed.tasks.kinds.images import PixelTask, prepare_images
from wellposed.tasks.task import register_task

LABELS = ("apart", "connected")
SIZES: Mapping[Split, int] = {"train": 1000, "valid": 200, "test": 200}
_CUT_SHARE = 0.1
_SHORT_TURN = 3.6


@dataclass(frozen=True)
class PathfinderOptions(CheckedOptions):
    """Options of the task `pathfinder`."""

    data: str = "builtin"
    """builtin (drawn), a folder of the public release (imgs and metadata), or an npz file or folder."""
    valid: str | None = None
    """npz file of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """npz file of the test split; found beside the train file, or cut from it, where not given."""
    setting: Literal["easy", "medium", "hard"] = "easy"
    """Length of the drawn curves: 6, 9 or 14 dashes, as the three levels of the public release."""
    size: Size | None = None
    """Side of the image: 32 where drawn; images of a file are shrunk to it by block means."""
    contour_length: Size | None = None
    """Dashes of each of the two long curves, in place of the setting's."""
    distractors: int | None = None
    """Number of short curves; 5 where not given."""
    distractor_length: Size | None = None
    """Dashes of a short curve; a third of the setting's long ones where not given."""
    max_turn: float | None = None
    """Largest turn from dash to dash in radians; 0.6, 0.7 or 0.8 by setting, more for short curves, where not given."""
    num_train: Size | None = None
    """Drawn train images; 1000 where not given (the release has 160000)."""
    num_valid: Size | None = None
    """Drawn valid images; 200 where not given."""
    num_test: Size | None = None
    """Drawn test images; 200 where not given."""
    data_seed: int | None = None
    """Seed of the drawing, apart from the seed of training; 0 where not given."""
    unreadable: Literal["error", "skip"] = "error"
    """Whether an image of the release that cannot be decoded is an error, or left out and listed in the report."""


class PathfinderTask(PixelTask):
    """Two-way classification of images: do the two dots mark the ends of one curve, or of two?

    Every image holds two long dashed curves, short distractors and two dots; half of a split is
    connected. Drawn labels
    are exact by construction: curves keep a distance larger than the gaps between their dashes.
    Where the dots are, and how the dashes at them point, has one law for both classes (curves of
    three dashes or more). Image i of a split is a function of (rules, data_seed, split, i) alone,
    whatever the sizes. Tokens are gray values 0 to 255, by row.

    Source: Linsley et al. 2018; Tay et al. 2021, whose release (``imgs`` and ``metadata``) is read
    as it is, cut 80, 10, 10 by a fixed shuffle; ours is an own generator with its sizes, not its
    code. Cost on one core: about 30 ms an easy image, 80 ms a hard one; draw large sets once and
    keep them as npz.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("pathfinder", {"num_train": 4, "num_valid": 2, "num_test": 2})
    >>> task.lengths("train"), task.reference()
    ([1024, 1024, 1024, 1024], {'accuracy': 0.5})
    """

    name: ClassVar[str] = "pathfinder"

    def __init__(self, options: PathfinderOptions) -> None:
        self.options = options
        images, source = _load(options)
        super().__init__(images=images, labels=LABELS, source=source, details={})


def _load(options: PathfinderOptions) -> tuple[dict[Split, Images], dict[str, Any]]:
    if options.data == "builtin":
        return _draw(options)
    drawn = "contour_length distractors distractor_length max_turn num_train num_valid num_test"
    reason = f"say what is drawn and have no effect on {options.data}"
    refuse_options("pathfinder", options, (*drawn.split(), "data_seed"), reason)
    root = Path(options.data)
    if not root.exists():
        raise missing_file(root)
    _refuse_near_releases(root)
    if (root / "metadata").is_dir():
        reason = f"name npz files; {root} is a folder of the release"
        refuse_options("pathfinder", options, ("valid", "test"), reason)
        images, described = read_release(root, skip=options.unreadable == "skip")
    else:
        images, described = read_npz_splits(options.data, valid=options.valid, test=options.test)
    return {
        split: _prepared(images[split], options.size, f"{options.data} ({split})")
        for split in SPLITS
    }, described


def _refuse_near_releases(root: Path) -> None:
    """Refuse a folder of whole releases, and one of images without their labels, saying what to
    give."""
    below = sorted(path.parent.name for path in root.glob("*/metadata") if path.is_dir())
    if below:
        raise DataError(
            f"{root}: holds {len(below)} releases ({', '.join(below)}), expected one; give one of"
            f" them, as in {root / below[0]}"
        )
    if (root / "imgs").is_dir() and not (root / "metadata").is_dir():
        raise DataError(
            f"{root}: holds imgs but no folder metadata, which has the labels; copy it from the"
            " release too"
        )


def _prepared(images: Images, size: int | None, where: str) -> Images:
    wrong = sorted(set(images.labels[images.labels > 1].tolist()))
    if wrong:
        raise DataError(f"{where}: labels {wrong}, expected 0 (apart) and 1 (connected)")
    return prepare_images(images, where, size=size)


def _draw(options: PathfinderOptions) -> tuple[dict[Split, Images], dict[str, Any]]:
    if given_options(options, ("valid", "test")):
        raise ConfigError(
            "pathfinder: valid and test need data=FILE; builtin images bring their own splits"
        )
    base = RULES[options.setting]
    if options.contour_length is not None:
        # Curves that part before they meet turn by a certain angle in all, which short ones have
        # few dashes for.
        base = replace(base, max_turn=max(base.max_turn, _SHORT_TURN / options.contour_length))
    rules = replace(base, **given_options(options, PathfinderRules.__dataclass_fields__))
    if rules.distractors < 0 or not rules.max_turn > 0:
        raise ConfigError(
            f"pathfinder: distractors = {rules.distractors}, max_turn = {rules.max_turn}; expected"
            " 0 or more, above 0"
        )
    seed = options.data_seed or 0
    images: dict[Split, Images] = {}
    digest = hashlib.sha256()
    for split in SPLITS:
        count = getattr(options, f"num_{split}") or SIZES[split]
        labels = np.arange(count, dtype=np.int64) % 2
        drawn = [
            render(draw_image(rules, int(label), f"{seed}/{split}/{index}"), rules.size)
            for index, label in enumerate(labels)
        ]
        images[split] = Images(np.stack(drawn), labels)
        digest.update(images[split].sha256().encode())
    return images, {
        "source": f"builtin: drawn, setting {options.setting}",
        "generator_version": GENERATOR_VERSION,
        "data_seed": seed,
        "rules": asdict(rules),
        "dots_tell_nothing": rules.contour_length >= MATCHED_LENGTH,
        "sha256": digest.hexdigest(),
    }


def read_release(folder: Path, *, skip: bool) -> tuple[dict[Split, Images], dict[str, Any]]:
    """Read ``metadata/<n>.npy``, which are text: folder, file, number, label, ... on each line; and
    the images."""
    files = sorted(
        (folder / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.name)
    )
    paths: list[Path] = []
    labels: list[int] = []
    problems: list[str] = []
    skipped: list[str] = []
    for file in files:
        for number, line in enumerate(_metadata_lines(file), 1):
            fields, where = line.split(), f"{file}:{number}"
            path = folder.joinpath(*fields[:2])
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                expected = "expected folder, file, number, label (0 or 1)"
                problems.append(f"{where}: {expected}: {line[:60]!r}")
            elif not path.is_file() or path.stat().st_size == 0:
                (skipped if skip else problems).append(f"{where}: {path}: missing or empty")
            else:
                paths.append(path)
                labels.append(int(fields[3]))
    if problems or not paths:
        raise DataError(
            f"{folder}: not the pathfinder release; correct the lines, or give unreadable='skip'"
            " for images that are missing or empty:\n"
            + listed(problems or [f"{folder / 'metadata'}: no .npy file of text"])
        )
    release = Images(paths, np.array(labels, np.int64), read_image_file)
    everything = stack_images(release, skipped=skipped if skip else None)
    images, cut = cut_missing({"train": everything}, str(folder), share=_CUT_SHARE)
    return images, {
        "source": str(folder),
        "files": {file.name: describe_file(file) for file in files},
        "sha256": everything.sha256(),
        "splits": "the Long Range Arena's shares: 80, 10, 10",
        **cut,
        "skipped_images": skipped,
    }


def _metadata_lines(file: Path) -> list[str]:
    """Return the lines of a metadata file; a real npy file is refused, as it would hold pickled
    objects."""
    with file.open("rb") as stream:
        if stream.read(6) == b"\x93NUMPY":
            raise DataError(
                f"{file}: is a binary npy file; the release has text: folder, file, number, label a"
                " line"
            )
    return [line for _, line in read_text(file).lines()]


register_task(
    PathfinderTask, PathfinderOptions, "whether two dots are on one dashed curve (accuracy)"
)
