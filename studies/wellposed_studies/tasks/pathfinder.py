"""Task ``pathfinder`` of the Long Range Arena: are two dots on one dashed curve?

Consecutive dashes of a curve are one pixel apart; different curves, and a dot and other curves, 1.4
or more. Sizes are those of the 32 x 32 release (dash 2, gap 1, thickness 0.5, dot radius 1.5).
`random.Random` with a text seed draws, so images agree if cosines round alike.

The dots must not reveal the label, as ends of one curve do, by distance and direction. So each seed
gives two drawings of two long curves with the same dots, dashes at the dots and third end; the
label chooses one. Curves of one or two dashes leave no room for this.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from wellposed.errors import ConfigError, DataError
from wellposed.lazy import ModuleOnFirstUse
from wellposed.options import CheckedOptions, Count, Ge, Positive, Size
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data.images import Images, read_image_file
from wellposed_lab.tasks.data.splits import Split
from wellposed_lab.tasks.task import register_task
from wellposed_studies.tasks.drawn import DrawnOptions, drawn_facts
from wellposed_studies.tasks.pixels import (
    ArrayImages,
    PixelTask,
    prepare_images,
    read_npz_splits,
    stack_images,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    np = ModuleOnFirstUse("numpy")

LABELS = ("apart", "connected")
SIZES: Mapping[Split, int] = {"train": 1000, "valid": 200, "test": 200}
_CUT_SHARE = 0.1
_SHORT_TURN = 3.6
GENERATOR_VERSION = 2
DASH = 2.0
GAP = 1.0
THICKNESS = 0.5
RADIUS = 1.5
SEPARATION = 1.4
_MARGIN = 2.0
_TURNS = 6
_BUDGET = 4
_CURVE_TRIES = 20
_IMAGE_TRIES = 100

Array: TypeAlias = "NDArray[Any]"
Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class PathfinderRules(CheckedOptions):
    """Contents of an image; lengths in dashes, turns in radians."""

    size: Size
    contour_length: Annotated[int, Ge(3)]
    distractors: Count
    distractor_length: Size
    max_turn: Positive


RULED = ("contour_length", "distractors", "distractor_length", "max_turn")
RULES: Mapping[str, PathfinderRules] = {
    "easy": PathfinderRules(32, 6, 5, 2, 0.6),
    "medium": PathfinderRules(32, 9, 5, 3, 0.7),
    "hard": PathfinderRules(32, 14, 5, 4, 0.8),
}
"""The three levels of the public release."""


@dataclass(frozen=True)
class Drawing:
    """Geometry of an image; a point is the complex number x + i y."""

    curves: Sequence[Array]
    """Start and end of each dash, (dashes, 2), curve by curve."""
    dots: tuple[complex, complex]
    label: int
    """1 if both dots are on the ends of one curve."""


class _NoRoomError(Exception):
    """No place for a curve; the caller tries again."""


def _tried(times: int, draw: Callable[[], Drawn]) -> Drawn:
    for _ in range(times):
        with suppress(_NoRoomError):
            return draw()
    raise _NoRoomError


def draw_image(rules: PathfinderRules, label: int, seed: str) -> Drawing:
    """Return the drawing of a seed; `ConfigError` if it does not fit in 100 tries."""
    generator = random.Random(f"pathfinder/{GENERATOR_VERSION}/{seed}")

    def draw() -> Drawing:
        first, second = long = _wirings(rules, generator)[label]
        # Retried separately, so that long curves are not selected by the room they leave.
        short = _tried(_CURVE_TRIES, lambda: _distractors(rules, long, generator))
        return Drawing([*long, *short], (first[0, 0], (first if label else second)[-1, 1]), label)

    try:
        return _tried(_IMAGE_TRIES, draw)
    except _NoRoomError:
        raise ConfigError(
            f"pathfinder: {rules.distractors} distractors of {rules.distractor_length} dashes and"
            f" two curves of {rules.contour_length} do not fit into {rules.size} x {rules.size}"
            " pixels; lower contour_length or distractors, or raise size or max_turn"
        ) from None


def render(drawing: Drawing, size: int) -> NDArray[np.uint8]:
    """Return the gray image (size, size), 0 to 255; edges are one pixel wide."""
    centres = np.arange(size) + 0.5
    pixels = (centres + 1j * centres[:, None])[..., None]
    distance = _distance(pixels, np.concatenate(drawing.curves)).min(-1)
    to_dots = abs(pixels - np.array(drawing.dots)).min(-1)
    shade = np.maximum(THICKNESS / 2 + 0.5 - distance, RADIUS + 0.5 - to_dots)
    return np.rint(255 * np.clip(shade, 0.0, 1.0)).astype(np.uint8)


def _distance(points: Array, dashes: Array) -> Array:
    """Return the distance from points to dashes (..., 2), broadcast."""
    start = dashes[..., 0]
    step = dashes[..., 1] - dashes[..., 0]
    along = np.real((points - start) * step.conj()) / np.maximum(abs(step) ** 2, 1e-12)
    along = np.minimum(np.maximum(along, 0.0), 1.0)  # half the time of clip on arrays this small
    return abs(points - start - along * step)


def _wirings(rules: PathfinderRules, generator: random.Random) -> Sequence[tuple[Array, Array]]:
    """Return two pairs of long curves: with the dots on different curves, and on the same one."""
    pen = _Pen(rules, generator, rules.contour_length)
    joining = pen.draw(_rows())
    last = _rows(joining[-1:])[[0, -1]]  # the dash, and its far end with a dot

    def part() -> Sequence[tuple[Array, Array]]:
        leaving = pen.grow(last, first=joining[0])
        other = pen.grow(_rows(joining), first=leaving[-1, ::-1])
        arriving = pen.grow(_rows(leaving), first=joining[-1, ::-1])
        return (leaving, arriving[::-1, ::-1]), (joining, other)

    return _tried(_CURVE_TRIES, part)


def _distractors(
    rules: PathfinderRules, long: tuple[Array, Array], generator: random.Random
) -> Sequence[Array]:
    pen = _Pen(rules, generator, rules.distractor_length, radius=0.0)
    drawn = _rows(*long)
    short = list[Array]()
    for _ in range(rules.distractors):
        short.append(pen.draw(drawn))
        drawn = np.concatenate((drawn, _rows(short[-1])[: pen.length]))
    return short


def _rows(*curves: Array) -> Array:
    """Return rows (start, end, distance) to keep away from: dashes, then curve ends with a dot."""
    ends = [[end, end] for curve in curves for end in (curve[0, 0], curve[-1, 1])]
    rows = np.concatenate((np.empty((0, 2), complex), *curves, np.reshape(ends, (-1, 2))))
    distances = np.full(len(rows), SEPARATION)
    distances[len(rows) - len(ends) :] += RADIUS
    return np.column_stack((rows, distances))


@dataclass(frozen=True)
class _Pen:
    """Draws curves of ``length`` dashes; ends keep ``radius`` more distance, for a dot."""

    rules: PathfinderRules
    generator: random.Random
    length: int
    radius: float = RADIUS

    def draw(self, drawn: Array) -> Array:
        return _tried(_CURVE_TRIES, lambda: self.grow(drawn))

    def grow(self, drawn: Array, *, first: Array | None = None) -> Array:
        """Return a curve clear of ``drawn`` and itself, by depth-first search within a budget."""
        rows = np.concatenate((drawn, np.full((self.length, 3), SEPARATION, complex)))
        curve = rows[len(drawn) :]
        curve[[0, -1], 2] += self.radius
        if first is None:
            low = _MARGIN
            high = self.rules.size - _MARGIN
            x = self.generator.uniform(low, high)
            y = self.generator.uniform(low, high)
            heading = self.generator.uniform(-math.pi, math.pi)
            choices = [self._candidates(drawn, x + 1j * y, heading, 0)]
        else:
            choices = [[(first, float(np.angle(first[1] - first[0])))]]
            if not self._clear(first[None], drawn, 0).all():
                raise _NoRoomError

        for _ in range(_BUDGET * self.length):
            while choices and not choices[-1]:
                choices.pop()
            if not choices:
                break
            dash, heading = choices[-1].pop()
            index = len(choices)
            curve[index - 1, :2] = dash
            if index == self.length:
                return curve[:, :2]
            # without the last dash, which is only a gap away
            others = rows[: len(drawn) + index - 1]
            choices.append(self._candidates(others, dash[1], heading, index))
        raise _NoRoomError

    def _candidates(
        self, others: Array, end: complex, heading: float, index: int
    ) -> list[tuple[Array, float]]:
        """Return dashes and headings that fit at ``place`` of a curve with this end."""
        turn = self.rules.max_turn if index else 0.0
        turns = [self.generator.uniform(-turn, turn) for _ in range(_TURNS if index else 1)]
        headings = heading + np.array(turns)
        step = np.cos(headings) + 1j * np.sin(headings)
        start = end + (GAP if index else 0.0) * step
        dashes = np.stack((start, start + DASH * step), -1)
        sides = dashes.view(float)
        within = (sides >= _MARGIN) & (sides <= self.rules.size - _MARGIN)
        ok = np.logical_and.reduce(within, -1)
        ok[ok] = self._clear(dashes[ok], others, index)
        return list(zip(dashes[ok], headings[ok].tolist(), strict=True))

    def _clear(self, dashes: Array, others: Array, index: int) -> Array:
        """Return which dashes fit at ``place``: far enough from others, and free ends farther."""
        more = self.radius * np.array([[index == 0], [index == self.length - 1]])
        distances = np.real(others[:, 2])
        near = _distance(dashes[..., None], others) >= distances + more
        back = _distance(others[:, :2], dashes[:, None, None]) >= distances[:, None]
        return np.logical_and.reduce(near, (-1, -2)) & np.logical_and.reduce(back, (-1, -2))


@dataclass(frozen=True)
class PathfinderOptions(DrawnOptions):
    """Options of the task `pathfinder`."""

    data: str = "builtin"
    """builtin (drawn), a folder of the public release (imgs and metadata), or an npz file or folder."""
    setting: Literal["easy", "medium", "hard"] = "easy"
    """Length of the drawn curves: 6, 9 or 14 dashes, as in the public release; 1000, 200 and 200 images are drawn
    (the release has 200000)."""
    size: Size | None = None
    """Side of the image: 32 if drawn; images of a file are shrunk to it by block means."""
    contour_length: Annotated[int, Ge(3)] | None = None
    """Dashes of each of the two long curves, three or more, in place of the setting's."""
    distractors: int | None = None
    """Number of short curves; 5 by default."""
    distractor_length: Size | None = None
    """Dashes of a short curve; by default a third of the setting's long ones."""
    max_turn: float | None = None
    """Largest turn from dash to dash in radians; by default 0.6, 0.7 or 0.8 by setting, more for short curves."""
    drawn: ClassVar[str] = f"{' '.join(RULED)} {DrawnOptions.drawn}"


@register_task(
    "pathfinder", PathfinderOptions, "whether two dots are on one dashed curve (accuracy)"
)
class PathfinderTask(PixelTask):
    """Two-way classification of images: do the two dots mark the ends of one curve, or of two?

    Images have two long dashed curves, short distractors and two dots; half of a split is
    connected. Labels are exact; dots and directions at the dots have one distribution in both
    classes. Image i depends only on (rules, data_seed, split, i). Tokens are gray values, by row.

    Source: Linsley et al. 2018; Tay et al. 2021, whose release (``imgs`` and ``metadata``) is read
    unchanged and cut 80, 10, 10 by a fixed shuffle. The generator is ours. Cost on one core: 30 ms
    an easy image, 80 ms a hard one; draw large sets once and save them as npz.

    >>> from wellposed_lab.tasks.task import build_task
    >>> task = build_task("pathfinder", {"num_train": 4, "num_valid": 2, "num_test": 2})
    >>> task.lengths("train"), task.reference()
    ([1024, 1024, 1024, 1024], {'accuracy': 0.5})
    """

    def __init__(self, options: PathfinderOptions) -> None:
        self.options = options
        drawn = options.data == "builtin"
        images, source = _draw(options) if drawn else _read(options)
        super().__init__(images=images, labels=LABELS, described=source)


def _read(options: PathfinderOptions) -> splits.Loaded[Images]:
    root = Path(options.data)
    if not root.exists():
        raise files.missing_file(root)

    _refuse_near_releases(root)
    if (root / "metadata").is_dir():
        splits.refuse_split_files(options, "a folder of the release")
        images, described = read_release(root)
    else:
        images, described = read_npz_splits(options)
        images, described = splits.cut_missing(images, options.data, described)

    for split, part in images.items():
        where = f"{options.data} ({split})"
        wrong = sorted(set(part.labels[part.labels > 1].tolist()))
        if wrong:
            raise DataError(f"{where}: labels {wrong}, expected 0 (apart) and 1 (connected)")
        images[split] = prepare_images(part, where, size=options.size)

    return images, described


def _refuse_near_releases(root: Path) -> None:
    """Refuse a folder of several releases, and one of images without labels."""
    below = sorted(path.parent.name for path in root.glob("*/metadata") if path.is_dir())
    if below:
        raise DataError(f"{root}: holds {len(below)} releases; give one, as {root / below[0]}")
    if (root / "imgs").is_dir() and not (root / "metadata").is_dir():
        raise DataError(f"{root}: holds imgs but no metadata, the folder of labels; copy it too")


def _draw(options: PathfinderOptions) -> splits.Loaded[Images]:
    base = RULES[options.setting]
    if options.contour_length is not None:
        # Curves must turn by a certain angle in total, so short ones need larger turns.
        base = replace(base, max_turn=max(base.max_turn, _SHORT_TURN / options.contour_length))

    rules = replace(base, **splits.given_options(options, PathfinderRules.__dataclass_fields__))
    seed = options.data_seed or 0
    images: dict[Split, ArrayImages] = {}
    digest = hashlib.sha256()
    for split, count in options.counts(SIZES).items():
        labels = np.arange(count, dtype=np.int64) % 2
        drawn = [
            render(draw_image(rules, int(label), f"{seed}/{split}/{index}"), rules.size)
            for index, label in enumerate(labels)
        ]
        images[split] = ArrayImages(np.stack(drawn), labels)
        digest.update(images[split].sha256().encode())

    source = f"drawn, setting {options.setting}"
    drawn_by = asdict(rules)
    return {**images}, drawn_facts(
        source, GENERATOR_VERSION, seed, digest.hexdigest(), rules=drawn_by
    )


def read_release(folder: Path) -> splits.Loaded[Images]:
    """Read ``metadata/<n>.npy`` (text lines: folder, file, number, label, ...) and the images."""
    metadata = folder / "metadata"
    numbered = sorted(metadata.glob("*.npy"), key=lambda path: (len(path.stem), path.name))
    paths: list[Path] = []
    labels: list[int] = []
    problems: list[str] = []
    for file in numbered:
        for number, line in files.read_text(file).lines():
            fields = line.split()
            where = f"{file}:{number}"
            path = folder.joinpath(*fields[:2])
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                expected = "expected folder, file, number, label (0 or 1)"
                problems.append(f"{where}: {expected}: {line[:60]!r}")
            elif not path.is_file() or path.stat().st_size == 0:
                problems.append(f"{where}: {path}: missing or empty")
            else:
                paths.append(path)
                labels.append(int(fields[3]))

    files.refuse(
        f"{folder}: not the pathfinder release; correct or remove the lines",
        problems or ([] if paths else [f"{metadata}: no .npy file of text"]),
    )
    release = Images(paths, np.array(labels, np.int64), read_image_file)
    everything = stack_images(release)
    described = {
        "source": str(folder),
        "files": {file.name: files.describe_file(file) for file in numbered},
        "sha256": everything.sha256(),
        "splits": "the Long Range Arena's shares: 80, 10, 10",
    }

    return splits.cut_missing({"train": everything}, str(folder), described, share=_CUT_SHARE)
