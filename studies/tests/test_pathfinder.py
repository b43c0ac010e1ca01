"""Pathfinder: labels read off the picture by another route, balance, determinism, the release's
folders, bad input."""

import numpy as np
import pytest

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import build_task
from wellposed_studies.tasks import pathfinder

FEW = {"num_train": 6, "num_valid": 2, "num_test": 2}


def build(data="builtin", **options):
    return build_task("pathfinder", {"data": str(data), **options})


def connected_on_paper(drawing, size):
    """Draw dashes with a thick pen on fine paper, so that gaps close and curves do not touch;
    follow the ink."""
    from scipy import ndimage

    fine = 10
    pen = (pathfinder.GAP + pathfinder.SEPARATION) / 4
    paper = np.ones((size * fine,) * 2, bool)
    marked = np.ones_like(paper)
    start, end = np.concatenate(drawing.curves).T[..., None]
    inked = fine * (start + np.linspace(0, 1, 40) * (end - start))
    dots = fine * np.array(drawing.dots)
    paper[inked.imag.astype(int), inked.real.astype(int)] = False
    rows = dots.imag.astype(int)
    columns = dots.real.astype(int)
    marked[rows, columns] = False
    ink = ndimage.distance_transform_edt(paper) <= pen * fine
    ink |= ndimage.distance_transform_edt(marked) <= (pathfinder.RADIUS + pen / 2) * fine
    parts, _ = ndimage.label(ink)
    return len(set(parts[rows, columns].tolist())) == 1


@pytest.mark.parametrize(("setting", "count"), [("easy", 6), ("medium", 2), ("hard", 2)])
def test_the_label_is_what_following_the_ink_says(setting, count):
    rules = pathfinder.RULES[setting]
    for index in range(count):
        drawing = pathfinder.draw_image(rules, index % 2, f"test/{index}")
        expected = [rules.contour_length] * 2 + [rules.distractor_length] * 5
        assert [len(curve) for curve in drawing.curves] == expected
        assert connected_on_paper(drawing, rules.size) == bool(index % 2) == bool(drawing.label)


def test_dashes_have_their_length_gap_and_turn_and_stay_inside():
    rules = pathfinder.RULES["medium"]
    drawing = pathfinder.draw_image(rules, 1, "geometry")
    for curve in drawing.curves:
        steps = curve[:, 1] - curve[:, 0]
        gaps = curve[1:, 0] - curve[:-1, 1]
        assert abs(steps) == pytest.approx(pathfinder.DASH)
        assert abs(gaps) == pytest.approx(pathfinder.GAP)
        assert abs(np.angle(steps[1:] / steps[:-1])).max() <= rules.max_turn + 1e-9
        sides = curve.view(float)
        assert sides.min() > 1.9
        assert sides.max() < rules.size - 1.9


def facing(drawing):
    """Return the dots and the far ends of the dashes that start there: the view from the dots."""
    ends = {
        dash[0]: dash[1] for curve in drawing.curves[:2] for dash in (curve[0], curve[-1, ::-1])
    }
    return drawing.dots, [ends[dot] for dot in drawing.dots]


@pytest.mark.parametrize(("setting", "count"), [("easy", 4), ("hard", 1)])
def test_the_dots_and_the_dashes_at_them_do_not_know_the_label(setting, count):
    for index in range(count):
        apart, connected = (
            pathfinder.draw_image(pathfinder.RULES[setting], label, f"dots/{index}")
            for label in (0, 1)
        )
        assert facing(apart) == facing(connected)
        assert not np.array_equal(apart.curves[0], connected.curves[0])


def test_pixels_show_the_dots_the_dashes_and_nothing_else():
    curve = np.array([[4.5 + 8.5j, 10.5 + 8.5j]])
    drawing = pathfinder.Drawing([curve], (4.5 + 8.5j, 24.5 + 20.5j), 0)
    image = pathfinder.render(drawing, 32)
    assert image[8, 4] == image[20, 24] == image[8, 5] == 255
    assert image[8, 8] == round(255 * 0.75)
    assert image[9, 8] == 0
    assert image[8, 12:].max() == 0
    assert (image > 0).sum() < 45


@pytest.mark.slow
def test_images_depend_on_seed_split_and_number_alone():
    task = build(**FEW)
    larger = build(**{**FEW, "num_train": 8})
    assert list(larger.dataset("train"))[:6] == list(task.dataset("train"))
    every = [tuple(example["input_ids"]) for split in SPLITS for example in task.dataset(split)]
    assert len(set(every)) == len(every)
    for split in SPLITS:
        assert task.dataset(split).labels.tolist() == [0, 1] * (FEW[f"num_{split}"] // 2)
    drawn = pathfinder.render(pathfinder.draw_image(pathfinder.RULES["easy"], 0, "0/train/0"), 32)
    decoded = task.tokenizer.decode(task.dataset("train")[0]["input_ids"])
    assert decoded.split() == list(map(str, drawn.flat))
    described = task.description()
    assert described["sha256"] == build(**FEW).description()["sha256"]
    assert described["rules"]["contour_length"] == 6
    assert described["image"] == [32, 32]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="do not fit into 6 x 6 pixels; lower contour_length"):
        pathfinder.draw_image(pathfinder.PathfinderRules(6, 4, 5, 4, 0.8), 0, "x")


def write_release(folder, count=30):
    from PIL import Image

    (folder / "metadata").mkdir()
    for number in range(2):
        (folder / "imgs" / str(number)).mkdir(parents=True)
        lines = []
        for index in range(count // 2):
            values = np.full((32, 32), 8 * index + number, np.uint8)
            Image.fromarray(values).save(folder / "imgs" / str(number) / f"sample_{index}.png")
            lines.append(f"imgs/{number} sample_{index}.png {index} {index % 2} 1.8 6 2 1.5")
        (folder / "metadata" / f"{number}.npy").write_text("\n".join(lines) + "\n")


def test_the_public_release_is_read_as_it_is(tmp_path):
    pytest.importorskip("PIL")
    write_release(tmp_path)
    task = build(tmp_path)
    assert [len(task.dataset(split)) for split in SPLITS] == [24, 3, 3]
    for split in SPLITS:
        for example in task.dataset(split):
            value = example["input_ids"][0] - 2
            assert set(example["input_ids"]) == {value + 2}
            assert example["labels"] == [value // 8 % 2]
    assert build(tmp_path, size=8).lengths("test") == [64] * 3
    assert task.description()["cut_from_train"]["test"] == "3 of 30 rows, by a fixed shuffle"


def test_damaged_releases_are_named_by_line(tmp_path):
    pytest.importorskip("PIL")
    write_release(tmp_path)
    (tmp_path / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    metadata = tmp_path / "metadata" / "0.npy"
    with pytest.raises(DataError, match=f"{metadata}:4: .*sample_3.png: missing or empty"):
        build(tmp_path)
    (tmp_path / "imgs" / "1" / "sample_5.png").write_bytes(b"no image")
    lines = metadata.read_text().splitlines(True)
    metadata.write_text("".join(line for line in lines if "sample_3" not in line))
    with pytest.raises(DataError, match=r"imgs/1/sample_5.png: cannot be decoded"):
        build(tmp_path)
    for content, message in (
        (b"imgs/0 caf\xe9.png 0 1\n", "0.npy:1: not UTF-8: byte 0xe9"),
        (b"imgs/0 sample_0.png 0 2\n", "0.npy:1: expected folder, file, number, label"),
    ):
        metadata.write_bytes(content)
        with pytest.raises(DataError, match=message):
            build(tmp_path)
    np.save(metadata, np.zeros(3))
    with pytest.raises(DataError, match="control bytes"):
        build(tmp_path)


def test_folders_near_the_release_are_told_apart(tmp_path):
    root = tmp_path / "pathfinder32"
    for name in ("curv_baseline", "curv_contour_length_9"):
        (root / name / "metadata").mkdir(parents=True)
        (root / name / "imgs").mkdir()
    with pytest.raises(DataError, match="holds 2 releases; give one, as"):
        build(root)
    with pytest.raises(DataError, match=r"metadata: no .npy file of text"):
        build(root / "curv_baseline")
    (root / "curv_baseline" / "metadata").rmdir()
    with pytest.raises(DataError, match="holds imgs but no metadata"):
        build(root / "curv_baseline")


def test_npz_files_are_read_and_drawing_options_refused(tmp_path):
    for split in SPLITS:
        x = np.random.default_rng(0).integers(0, 256, (4, 8, 8), dtype=np.uint8)
        np.savez(tmp_path / f"{split}.npz", x=x, y=np.array([0, 1, 0, 1]))
    assert [len(build(tmp_path).dataset(split)) for split in SPLITS] == [4, 4, 4]
    np.savez(tmp_path / "train.npz", x=x, y=np.array([0, 1, 2, 1]))
    with pytest.raises(DataError, match=r"labels \[2\], expected 0 \(apart\) and 1 \(connected\)"):
        build(tmp_path)
