"""Draw the pictures of docs/gallery.md into docs/assets/gallery, and those of the front page.

    python -m tools.gallery            # all; the runs take about two minutes of one core
    python -m tools.gallery --drawn    # the pictures of committed rows
    python -m tools.gallery --depth FOLDER    # docs/pictures/depth.svg, of a finished comparison

The pictures are read on a light page and on a dark one.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wellposed.charts import INK, Panel, Series, draw, lines, where
from wellposed.training import read_metrics
from wellposed_studies.frontier.certified import curves_panel
from wellposed_studies.study import mean_and_error

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "assets" / "gallery"
FRONT = ROOT / "docs" / "pictures"
ROWS = ROOT / "benchmarks" / "reproduction"
GREY = "#808080"  # read on white and on black


def curves(study: str, title: str, names: dict[str, str], **wanted: str) -> Panel:
    """Return certified and attacked accuracy of the models of ``names``, under the names given."""
    with (ROWS / f"frontier-{study}.csv").open(newline="", encoding="utf-8") as opened:
        rows = [row for row in where(list(csv.DictReader(opened)), **wanted) if row["radius"]]
    named = [{**row, "model": names[row["model"]]} for row in rows if row["model"] in names]
    return curves_panel(title, named, list(names.values()))


def draw_order(path: Path) -> None:
    """Four tasks that no bag of words can do."""
    names = {name: name for name in ("rezero", "lipschitz, T = 100", "no blocks, T = 30")}
    tasks = ("order", "recall, distinct", "recall", "listops")
    draw([curves("order", task, names, task=task) for task in tasks], path, columns=2)


def draw_corpora(path: Path) -> None:
    """Three corpora."""
    kinds = ("post_ln", "rezero", "lipschitz, T = 10", "no blocks, T = 10")
    names = {name: name for name in kinds}
    titles = {"ag_news": "AG News", "imdb": "IMDb", "sst": "SST"}
    panels = [curves("accuracy", titles[name], names, corpus=name) for name in titles]
    draw(panels, path)


def draw_temperatures(path: Path) -> None:
    """One model, trained at three temperatures."""
    names = {f"lipschitz, T = {number}": f"lipschitz, T = {number}" for number in (5, 10, 20)}
    draw([curves("accuracy", "AG News", names, corpus="ag_news")], path)


def draw_certified(path: Path) -> None:
    """A certified model, its control and a plain Transformer: the front page."""

    def names(model: int, control: int) -> dict[str, str]:
        control_name, plain = f"no blocks, T = {control}", {"rezero": "ReZero"}
        ours = {f"lipschitz, T = {model}": "lipschitz", control_name: "the same without blocks"}
        return ours | plain

    order = curves("order", "order of two words", names(100, 30), task="order")
    draw([order, curves("accuracy", "AG News", names(10, 10), corpus="ag_news")], path)


def draw_depth(folder: Path, path: Path) -> None:
    """Loss on valid over steps, mean over seeds: the front page."""

    def curve(variant: Path) -> Series:
        seeds = [
            {row["step"]: row["loss"] for row in read_metrics(run) if row["split"] == "valid"}
            for run in sorted(variant.glob("seed-*"))
        ]
        steps = sorted(set.intersection(*map(set, seeds)))
        means, errors = zip(*(mean_and_error([s[n] for s in seeds]) for n in steps), strict=True)
        return Series(f"{variant.name} ({len(seeds)} seeds)", steps, means, errors=errors)

    order = json.loads((folder / "compare.json").read_text("utf-8"))["variants"]
    title = "24 layers, 120 steps, one learning rate"
    shown = [curve(folder / name) for name in order]
    draw([Panel(title, "optimizer steps", "nats per character on valid", shown)], path)


def copy_depth(path: Path) -> None:
    """The picture of the front page."""
    path.write_bytes((FRONT / "depth.svg").read_bytes())


def draw_measured(path: Path) -> None:
    """Weights of a small decoder after T-Fixup, one matrix made orthogonal."""
    import torch

    import wellposed as wp
    from wellposed.models import WellposedConfig, WellposedForCausalLM

    torch.manual_seed(0)
    model = WellposedForCausalLM(
        WellposedConfig(hidden_size=64, num_hidden_layers=4, norm="none", init="t_fixup")
    )
    roles = wp.find_roles(model)
    with torch.no_grad():
        for number in (1, 2):
            torch.nn.init.orthogonal_(roles.attention[number].query.tensor())
    wp.measure(model).plot(path)


MONITORED = (
    "train char_lm --quiet --variant rezero --model.num-hidden-layers 4 --model.hidden-size 64"
    " --batch-size 16 --seq-len 64 --limit-chars 200000 --precision bf16 --schedule constant"
    " --steps 100 --log-every 1 --monitor 1"
)
RATES = {"healthy": "--learning-rate 2e-3 --warmup-steps 20", "blown": "--learning-rate 6e-2"}
"""Two runs of the page, the second of which blows up."""


def draw_monitor(path: Path) -> None:
    """Loss and vital signs of a run that blows up and of one that does not."""
    runs = {}
    for name, rate in RATES.items():
        out = path.parent / name
        words = f"-m wellposed {MONITORED} {rate} --out".split()
        # A run that blows up may end with values that are not finite.
        subprocess.run([sys.executable, *words, str(out)], check=False, capture_output=True)
        runs[name] = read_metrics(out)

    def panel(title: str, split: str, column: str, limit: float | None = None) -> Panel:
        shown = [
            replace(line, label=name)
            for name, rows in runs.items()
            for line in lines(where(rows, split=split), "step", column, by="split")
        ]
        level = None if limit is None else (f"alarm: {limit:g}", limit)
        return Panel(title, "optimizer steps", "", shown, "log", "log", level=level)

    loss = panel("loss, nats per character", "train", "loss")
    update = panel("update over weight, worst weight", "monitor", "update", 0.1)
    draw([loss, update, panel("attention logit, worst head", "monitor", "logit_max", 50)], path)


def reproduced(name: str) -> Callable[[Path], None]:
    """Return what makes the figure of a recipe at mini scale."""

    def make(path: Path) -> None:
        from wellposed.recipes.reproduce import reproduce

        with tempfile.TemporaryDirectory() as folder:
            done = reproduce(name, scale="mini", out=Path(folder))
            [drawn] = (file for file in done.files if file.suffix == ".svg")
            path.write_bytes(drawn.read_bytes())

    return make


# Of committed rows, in a second; and those of runs.
DRAWN = {
    "depth": copy_depth,
    "corpora": draw_corpora,
    "temperatures": draw_temperatures,
    "order": draw_order,
}
MADE: dict[str, Callable[[Path], None]] = {
    **DRAWN,
    "measured": draw_measured,
    "monitor": draw_monitor,
    "kim2021-figure-2": reproduced("kim2021/figure-2"),
    "kim2021-figure-3": reproduced("kim2021/figure-3"),
}
"""What writes each picture of the page as an SVG file."""


def for_both_pages(text: str) -> str:
    """Return an SVG file without a background, its ink a grey that is read on white and on black,
    and short."""
    text = re.sub(
        r'(<g id="patch_1">\s*<path d="[^"]*" style="fill: )#ffffff',
        r"\1none",
        text.replace(INK, GREY),
    )
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'"[^"]*"', lambda value: re.sub(r"(\.\d\d)\d+", r"\1", value[0]), text)
    return re.sub(r"^[ \t]+|[ \t]+$", "", text, flags=re.MULTILINE)


def picture(name: str) -> str:
    """Return a picture, made now."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.svg"
        MADE[name](path)
        return for_both_pages(path.read_text("utf-8"))


def main() -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drawn", action="store_true", help="only those of committed rows")
    parser.add_argument("--depth", type=Path, help="draw the front page's of this comparison alone")
    words = parser.parse_args()
    if words.depth:
        draw_depth(words.depth, FRONT / "depth.svg")
        return 0
    draw_certified(FRONT / "certified.svg")
    for name in DRAWN if words.drawn else MADE:
        (PICTURES / f"{name}.svg").write_text(picture(name), "utf-8")
        sys.stdout.write(f"{name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
