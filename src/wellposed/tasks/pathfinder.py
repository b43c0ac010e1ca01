"""Task ``pathfinder`` of the Long Range Arena: are two dots on one dashed curve?

Curves are drawn so that connectivity can be read off the picture: consecutive dashes of a curve are
one pixel apart, dashes of different curves at least 1.4, and a dot is at least 1.4 pixels away from
every curve but its own. Sizes are those of the Long Range Arena's 32 x 32 release (dash 2, gap 1,
thickness 0.5, dot radius 1.5). The random numbers are those of `random.Random` with a text for a
seed, so an image is the same on every machine whose cosine rounds alike.

The dots must not tell the label. Ends of one curve lie at a typical distance and face each other,
ends of two do not: dots on ends chosen afterwards would give the label away. Here a seed gives two
ways of drawing two long curves, which have the two dots, the dashes at them and a third end in
common, and the label says which of the two is drawn. Curves of
one or two dashes leave no room for that: with them the distance of the dots does tell the label.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import ConfigError, DataError
from wellposed.options import CheckedOptions, Count, Positive, Size
from wellposed.tasks.data import files, images, splits
from wellposed.tasks.data.images import Images
from wellposed.tasks.data.splits import SPLITS, DataOptions, Split
from wellposed.tasks.image_classification import PixelTask, prepare_images
from wellposed.tasks.task import register_task

LABELS = ("apart", "connected")
SIZES: Mapping[Split, int] = {"train": 1000, "valid": 200, "test": 200}
_CUT_SHARE = 0.1
_SHORT_TURN = 3.6
GENERATOR_VERSION = 2
DASH, GAP, THICKNESS, RADIUS = 2.0, 1.0, 0.5, 1.5
SEPARATION = 1.4
MATCHED_LENGTH = 3
_MARGIN = 2.0
_TURNS, _BUDGET = 6, 4
_CURVE_TRIES, _IMAGE_TRIES = 20, 100

Dash: TypeAlias = tuple[float, float, float, float]
Curve: TypeAlias = tuple[Dash, ...]
Curves: TypeAlias = tuple[Curve, ...]


@dataclass(frozen=True)
class PathfinderRules(CheckedOptions):
    """What an image holds; lengths in dashes, turns in radians."""

    size: Size
    contour_length: Size
    distractors: Count
    distractor_length: Size
    max_turn: Positive


RULES: Mapping[str, PathfinderRules] = {
    "easy": PathfinderRules(32, 6, 5, 2, 0.6),
    "medium": PathfinderRules(32, 9, 5, 3, 0.7),
    "hard": PathfinderRules(32, 14, 5, 4, 0.8),
}
"""The three levels of the public release."""


@dataclass(frozen=True)
class Drawing:
    """The geometry of an image: dashes as (x, y, x, y), curve by curve, and the two dots."""

    curves: Curves
    dots: tuple[tuple[float, float], tuple[float, float]]
    label: int
    """1 where both dots are on the ends of one curve."""


def draw_image(rules: PathfinderRules, label: int, seed: str) -> Drawing:
    """Return the drawing that the arguments determine; `ConfigError` where it does not fit in 100
    tries."""
    generator = random.Random(f"pathfinder/{GENERATOR_VERSION}/{seed}")
    for _ in range(_IMAGE_TRIES):
        wirings = _wirings(rules, generator)
        short = None if wirings is None else _distractors(rules, wirings[label], generator)
        if wirings is not None and short is not None:
            first, second = wirings[label]
            return Drawing(
                (first, second, *short),
                (first[0][:2], (first[-1] if label else second[-1])[2:]),
                label,
            )
    raise ConfigError(
        f"pathfinder: {rules.distractors} distractors of {rules.distractor_length} dashes and two"
        f" curves of {rules.contour_length} do not fit into {rules.size} x {rules.size} pixels;"
        " lower contour_length or distractors, or raise size or max_turn"
    )


def render(drawing: Drawing, size: int) -> NDArray[np.uint8]:
    """Return the gray image (size, size), 0 to 255: a pixel's value falls from 1 to 0 within a
    pixel of an edge."""
    centres = np.arange(size) + 0.5
    x, y = centres[None, :, None], centres[:, None, None]
    dashes = np.array([dash for curve in drawing.curves for dash in curve]).T
    distance = _to_segment(x, y, dashes).min(-1)
    dots = np.array(drawing.dots).T
    to_dots = np.hypot(x - dots[0], y - dots[1]).min(-1)
    shade = np.maximum(THICKNESS / 2 + 0.5 - distance, RADIUS + 0.5 - to_dots)
    return np.rint(255 * np.clip(shade, 0.0, 1.0)).astype(np.uint8)


def _to_segment(x: NDArray[Any], y: NDArray[Any], dashes: NDArray[Any]) -> NDArray[Any]:
    """Return the distance from points to segments (4, ...), broadcast."""
    x0, y0, x1, y1 = dashes
    dx, dy = x1 - x0, y1 - y0
    along = ((x - x0) * dx + (y - y0) * dy) / np.maximum(dx * dx + dy * dy, 1e-12)
    along = np.minimum(np.maximum(along, 0.0), 1.0)  # half the time of clip on arrays this small
    return np.hypot(x - x0 - along * dx, y - y0 - along * dy)


def _wirings(rules: PathfinderRules, generator: random.Random) -> tuple[Curves, Curves] | None:
    """Return two long curves that part the dots, and two of which the first joins them; None where
    they do not fit."""
    pen = _Pen(rules, generator, rules.contour_length)
    joining = pen.draw(_rows(()))
    if joining is None:
        return None
    ends = joining[0], joining[-1]
    if pen.length < MATCHED_LENGTH:
        other = pen.draw(_rows([joining]))
        return None if other is None else ((joining, other), (joining, other))
    last = _rows([ends[1:]])[[0, -1]]  # the dash, and its far end, which bears a dot
    for _ in range(_CURVE_TRIES):
        leaving = pen.grow(last, first=ends[0])
        other = leaving and pen.grow(_rows([joining]), first=_reverse(leaving[-1]))
        arriving = leaving and other and pen.grow(_rows([leaving]), first=_reverse(ends[1]))
        if leaving and other and arriving:
            return (leaving, tuple(map(_reverse, reversed(arriving)))), (joining, other)
    return None


def _distractors(rules: PathfinderRules, long: Curves, generator: random.Random) -> Curves | None:
    """Return the short curves; tried again by themselves, so that long ones are not chosen by the
    room they leave."""
    pen = _Pen(rules, generator, rules.distractor_length, dotted=False)
    for _ in range(_CURVE_TRIES):
        drawn, short = _rows(long), []
        for _ in range(rules.distractors):
            curve = pen.draw(drawn)
            if curve is None:
                break
            short.append(curve)
            drawn = np.concatenate((drawn, _rows([curve], dotted=False)))
        else:
            return tuple(short)
    return None


def _rows(curves: Sequence[Curve], *, dotted: bool = True) -> NDArray[Any]:
    """Return what others keep away from, as rows (x, y, x, y, distance); ends that may bear a dot,
    a radius more."""
    rows = [(*dash, SEPARATION) for curve in curves for dash in curve]
    if dotted:
        ends = [end for curve in curves for end in (curve[0][:2], curve[-1][2:])]
        rows += [(*end, *end, SEPARATION + RADIUS) for end in ends]
    return np.array(rows).reshape(-1, 5)


def _reverse(dash: Dash) -> Dash:
    return (*dash[2:], *dash[:2])


@dataclass(frozen=True)
class _Pen:
    """Draws curves of ``length`` dashes, whose ends keep a radius more away where they may bear
    dots."""

    rules: PathfinderRules
    generator: random.Random
    length: int
    dotted: bool = True

    def draw(self, drawn: NDArray[Any]) -> Curve | None:
        """Return a curve that `grow` finds in a few tries."""
        tries = (self.grow(drawn) for _ in range(_CURVE_TRIES))
        return next((curve for curve in tries if curve is not None), None)

    def grow(self, drawn: NDArray[Any], *, first: Dash | None = None) -> Curve | None:
        """Return a curve that keeps its distance from ``drawn`` and itself, found depth first
        within a budget, or None."""
        rows = np.concatenate((drawn, np.empty((self.length, 5))))
        if first is None:
            low, high = _MARGIN, self.rules.size - _MARGIN
            x, y = self.generator.uniform(low, high), self.generator.uniform(low, high)
            start = (x, y, self.generator.uniform(-math.pi, math.pi))
            choices = [self._candidates(rows[: len(drawn)], start, 0)]
        else:
            more = RADIUS * np.array([self.dotted, self.dotted and self.length == 1])
            clear = _clear(np.array([first]), drawn, more).all()
            heading = math.atan2(first[3] - first[1], first[2] - first[0])
            choices = [[(first, heading)] if clear else []]
        for _ in range(_BUDGET * self.length):
            while choices and not choices[-1]:
                choices.pop()
            if not choices:
                return None
            dash, heading = choices[-1].pop()
            place = len(choices)
            at_end = self.dotted and place in (1, self.length)
            rows[len(drawn) + place - 1] = (*dash, SEPARATION + (RADIUS if at_end else 0.0))
            if place == self.length:
                return tuple(_as_dash(row) for row in rows[len(drawn) :])
            # the dash just drawn is a gap away, which is less than what others keep
            before = rows[: len(drawn) + place - 1]
            choices.append(self._candidates(before, (dash[2], dash[3], heading), place))
        return None

    def _candidates(
        self, others: NDArray[Any], state: tuple[float, float, float], place: int
    ) -> list[tuple[Dash, float]]:
        """Return dashes and their headings that can stand at ``place`` of a curve whose end and
        heading are ``state``."""
        x, y, heading = state
        turn = self.rules.max_turn if place else 0.0
        turns = [self.generator.uniform(-turn, turn) for _ in range(_TURNS if place else 1)]
        headings = heading + np.array(turns)
        step = np.stack((np.cos(headings), np.sin(headings)), -1)
        start = np.array((x, y)) + (GAP if place else 0.0) * step
        dashes = np.concatenate((start, start + DASH * step), -1)
        ok = ((dashes >= _MARGIN) & (dashes <= self.rules.size - _MARGIN)).all(-1)
        dashes, headings = dashes[ok], headings[ok]
        if not len(dashes):
            return []
        more = RADIUS * np.array([self.dotted and place == end for end in (0, self.length - 1)])
        ok = _clear(dashes, others, more)
        found = zip(dashes[ok], headings[ok], strict=True)
        return [(_as_dash(dash), float(angle)) for dash, angle in found]


def _as_dash(row: NDArray[Any]) -> Dash:
    return float(row[0]), float(row[1]), float(row[2]), float(row[3])


def _clear(dashes: NDArray[Any], others: NDArray[Any], more: NDArray[Any]) -> NDArray[Any]:
    """Return which dashes keep their distance from rows (x, y, x, y, distance), their ends ``more``
    of it."""
    ends, tips = dashes.reshape(-1, 2, 1, 2), others[:, :4].reshape(1, 1, -1, 2, 2)
    to_others = _to_segment(ends[..., 0], ends[..., 1], others.T[:4])
    near = to_others >= others[:, 4] + more[None, :, None]
    to_dashes = _to_segment(tips[..., 0], tips[..., 1], dashes.T[:, :, None, None, None])
    back = to_dashes >= others[:, 4, None]
    return (near.all((-1, -2)) & back.all((-1, -2, -3))).reshape(-1)


@dataclass(frozen=True)
class PathfinderOptions(DataOptions):
    """Options of the task `pathfinder`."""

    data: str = "builtin"
    """builtin (drawn), a folder of the public release (imgs and metadata), or an npz file or folder."""
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
    drawn: ClassVar[str] = (
        "contour_length distractors distractor_length max_turn data_seed num_train num_valid num_test"
    )


@register_task(
    "pathfinder", PathfinderOptions, "whether two dots are on one dashed curve (accuracy)"
)
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

    def __init__(self, options: PathfinderOptions) -> None:
        self.options = options
        drawn = options.data == "builtin"
        found, source = _draw(options) if drawn else _read(options)
        super().__init__(images=found, labels=LABELS, described=source)


def _read(options: PathfinderOptions) -> splits.Loaded[Images]:
    root = Path(options.data)
    if not root.exists():
        raise files.missing_file(root)
    _refuse_near_releases(root)
    if (root / "metadata").is_dir():
        splits.refuse_split_files(options, "a folder of the release")
        found, described = read_release(root, skip=options.unreadable == "skip")
    else:
        found, _, described = images.read_npz_splits(options)
        found, described = splits.cut_missing(found, options.data, described)
    for split, held in found.items():
        where = f"{options.data} ({split})"
        if wrong := sorted(set(held.labels[held.labels > 1].tolist())):
            raise DataError(f"{where}: labels {wrong}, expected 0 (apart) and 1 (connected)")
        found[split] = prepare_images(held, where, size=options.size)
    return found, described


def _refuse_near_releases(root: Path) -> None:
    """Refuse a folder of whole releases, and one of images without their labels, saying what to
    give."""
    below = sorted(path.parent.name for path in root.glob("*/metadata") if path.is_dir())
    if below:
        raise DataError(f"{root}: holds {len(below)} releases; give one, as {root / below[0]}")
    if (root / "imgs").is_dir() and not (root / "metadata").is_dir():
        raise DataError(f"{root}: holds imgs but no metadata, the folder of labels; copy it too")


def _draw(options: PathfinderOptions) -> splits.Loaded[Images]:
    base = RULES[options.setting]
    if options.contour_length is not None:
        # Curves that part before they meet turn by a certain angle in all, which short ones have
        # few dashes for.
        base = replace(base, max_turn=max(base.max_turn, _SHORT_TURN / options.contour_length))
    rules = replace(base, **splits.given_options(options, PathfinderRules.__dataclass_fields__))
    seed = options.data_seed or 0
    found: dict[Split, Images] = {}
    digest = hashlib.sha256()
    for split in SPLITS:
        count = getattr(options, f"num_{split}") or SIZES[split]
        labels = np.arange(count, dtype=np.int64) % 2
        drawn = [
            render(draw_image(rules, int(label), f"{seed}/{split}/{index}"), rules.size)
            for index, label in enumerate(labels)
        ]
        found[split] = Images(np.stack(drawn), labels)
        digest.update(found[split].sha256().encode())
    return found, {
        "source": f"builtin: drawn, setting {options.setting}",
        "generator_version": GENERATOR_VERSION,
        "data_seed": seed,
        "rules": asdict(rules),
        "dots_tell_nothing": rules.contour_length >= MATCHED_LENGTH,
        "sha256": digest.hexdigest(),
    }


def read_release(folder: Path, *, skip: bool) -> splits.Loaded[Images]:
    """Read ``metadata/<n>.npy``, which are text: folder, file, number, label, ... on each line; and
    the images."""
    metadata = folder / "metadata"
    numbered = sorted(metadata.glob("*.npy"), key=lambda path: (len(path.stem), path.name))
    paths: list[Path] = []
    labels: list[int] = []
    problems: list[str] = []
    skipped: list[str] = []
    for file in numbered:
        for number, line in files.read_text(file).lines():
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
    files.refuse(
        f"{folder}: not the pathfinder release; correct the lines, or give unreadable='skip' for"
        " images that are missing or empty",
        problems or ([] if paths else [f"{metadata}: no .npy file of text"]),
    )
    release = Images(paths, np.array(labels, np.int64), images.read_image_file)
    everything = images.stack_images(release, skipped=skipped if skip else None)
    described = {
        "source": str(folder),
        "files": {file.name: files.describe_file(file) for file in numbered},
        "sha256": everything.sha256(),
        "splits": "the Long Range Arena's shares: 80, 10, 10",
        "skipped_images": skipped,
    }
    return splits.cut_missing({"train": everything}, str(folder), described, share=_CUT_SHARE)
