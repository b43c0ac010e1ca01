"""Draw the pictures of docs/gallery.md and of the front page into docs/assets/gallery.

    python -m tools.gallery            # all; the runs take about three minutes of one core
    python -m tools.gallery --drawn    # the pictures of committed rows
    python -m tools.gallery --depth FOLDER    # of a finished comparison
    python -m tools.gallery --screens FOLDER  # its report, and the built site, in a browser

The plots are read on a light page and on a dark one.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from wellposed.measurement import INK, figure_style
from wellposed_lab.charts import Panel, Series, draw, lines, medians, where
from wellposed_lab.report.runs import read_metrics
from wellposed_studies.frontier.certified import curves_panel
from wellposed_studies.frontier.training_methods import BASELINES

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "assets" / "gallery"
ROWS = ROOT / "benchmarks" / "reproduction"
GREY = "#808080"  # read on white and on black


def committed(study: str) -> list[dict[str, str]]:
    """Return the committed rows of a study."""
    return [*csv.DictReader((ROWS / f"frontier-{study}.csv").read_text("utf-8").splitlines())]


def draw_study(path: Path) -> None:
    """Certified and attacked accuracy of the models of a study, a panel for each of its parts."""
    study, column, parts, models = STUDIES[path.stem]
    rows = [row for row in committed(study) if row["radius"] and row["model"] in models]
    panels = [
        curves_panel(title, where(rows, **{column: part}), list(models))
        for part, title in parts.items()
    ]
    draw(panels, path, columns=2 if study == "order" else None)


TEMPERED = ("lipschitz, T = 5", "lipschitz, T = 10", "lipschitz, T = 20")
MIXED = ("post_ln", "rezero", "lipschitz, T = 10", "no blocks, T = 10")
NO_BAG = ("rezero", "lipschitz, T = 100", "no blocks, T = 30")
CORPORA = {"ag_news": "AG News", "imdb": "IMDb", "sst": "SST"}
TASKS = {name: name for name in ("order", "recall, distinct", "recall", "listops")}
STUDIES = {
    "corpora": ("accuracy", "corpus", CORPORA, MIXED),
    "temperatures": ("accuracy", "corpus", {"ag_news": "AG News"}, TEMPERED),
    "order": ("order", "task", TASKS, NO_BAG),
}
"""Of each picture of committed rows: study, column of its parts and their titles, models."""


CAPS = ("", " capped at 1", " capped at 2", " capped at 4", ", warm-up")
"""Endings of the names of the models of the learning rates, after the name of the norm."""


def draw_rates(path: Path) -> None:
    """Test loss over learning rates, median over seeds, shaded from the least to the greatest."""
    panels = []
    for norm in ("post-LN", "pre-LN"):
        rows = [
            {
                "cap": cap.strip(", ") or "no cap",
                **{column: float(row[column]) for column in ("rate", "test")},
            }
            for cap in CAPS
            for row in where(committed("rates"), model=norm + cap)
        ]
        curves = medians(rows, "rate", "test", by="cap")
        panels.append(Panel(norm, "learning rate", "test loss (nats)", curves, "log"))
    draw(panels, path, columns=1)  # on a phone, two beside each other have letters of six pixels


def draw_methods(path: Path) -> None:
    """Loss on valid over learning rates of AdamW, Muon and the two best of the other methods."""
    rows = where(committed("methods"), model="ours")
    baselines = [row for row in rows if row["method"] in BASELINES]
    others = sorted(
        (row for row in rows if row["method"] not in BASELINES), key=lambda row: float(row["valid"])
    )
    curves = []
    for row in [*baselines, *others[:2]]:
        tried = [one.split(":") for one in row["rates"].split()]
        losses = [float(loss) for _, loss in tried]
        curves.append(Series(row["method"], [float(rate) for rate, _ in tried], losses))
    title = "4 layers of width 128, 2,000 steps, first seed"
    draw([Panel(title, "learning rate", "loss on valid (nats)", curves, "log")], path)


def draw_depth(folder: Path, path: Path) -> None:
    """Loss on valid over steps, median over seeds, shaded from the least to the greatest."""
    order = json.loads((folder / "compare.json").read_text("utf-8"))["variants"]
    rows = [
        {**row, "variant": name}
        for name in order
        for run in (folder / name).glob("seed-*")
        for row in where(read_metrics(run), split="valid")
    ]
    title = "24 layers, 120 steps, one learning rate"
    curves = medians(rows, "step", "loss", by="variant")
    draw([Panel(title, "optimizer steps", "nats per character on valid", curves)], path)


def draw_measured(path: Path) -> None:
    """Weights of a small decoder after T-Fixup, one matrix made orthogonal."""
    import torch

    import wellposed as wp

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4}
    model = wp.models.build_model("wellposed", "causal_lm", **sizes, norm="none", init="t_fixup")
    roles = wp.find_roles(model)
    for attention in roles.attention[1:3]:
        torch.nn.init.orthogonal_(attention.query.tensor())
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
    rows = []
    for name, rate in RATES.items():
        out = path.parent / name
        words = f"-m wellposed {MONITORED} {rate} --out".split()
        # A run that blows up may end with values that are not finite.
        subprocess.run([sys.executable, *words, str(out)], check=False, capture_output=True)
        rows += [{**row, "run": name} for row in read_metrics(out)]
    panels = []
    for title, split, column, level in (
        ("loss, nats per character", "train", "loss", None),
        ("update over weight, worst weight", "monitor", "vital/update", ("alarm: 0.1", 0.1)),
        ("attention logit, worst head", "monitor", "vital/logit_max", ("alarm: 50", 50)),
    ):
        curves = lines(where(rows, split=split), "step", column, by="run")
        panels.append(Panel(title, "optimizer steps", "", curves, "log", "log", level=level))
    draw(panels, path)


def draw_flow(path: Path) -> None:
    """Data, density and samples of the residual flow of the examples."""
    example = runpy.run_path(str(ROOT / "examples" / "residual_flow.py"))
    flow = example["train"](1000)
    with figure_style():
        example["draw"](flow, example["draw_samples"](flow)[0], str(path))


def draw_recipe(path: Path) -> None:
    """The figure of a recipe at mini scale."""
    from wellposed_studies.reproduce import reproduce

    reproduce(path.stem.replace("-", "/", 1), scale="mini", out=path.parent)


Drawing = Callable[[Path], None]
DRAWN: dict[str, Drawing] = dict.fromkeys(STUDIES, draw_study)
if (ROWS / "frontier-rates.csv").is_file():
    DRAWN["rates"] = draw_rates
if (ROWS / "frontier-methods.csv").is_file():
    DRAWN["methods"] = draw_methods
RECIPES = dict.fromkeys(("kim2021-figure-2", "kim2021-figure-3"), draw_recipe)
RUNS: dict[str, Drawing] = {"flow": draw_flow, "measured": draw_measured, "monitor": draw_monitor}
MADE: dict[str, Drawing] = {**DRAWN, **RECIPES, **RUNS}
"""Function that writes each picture of the page as an SVG file."""


def for_both_pages(text: str) -> str:
    """Return an SVG file without a background, its ink a grey that is read on white and on black,
    and short."""
    ground = r'(<g id="patch_1">\s*<path d="[^"]*" style="fill: )#ffffff'
    text = re.sub(ground, r"\1none", text.replace(INK, GREY))
    text = re.sub(r'"[^"]*"', lambda value: re.sub(r"(\.\d\d)\d+", r"\1", value[0]), text)
    return re.sub(r"(?s)<metadata>.*?</metadata>|(?m:^[ \t]+|[ \t]+$)", "", text)


def picture(name: str, drawing: Drawing) -> str:
    """Return a picture, made now."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.svg"
        drawing(path)
        return for_both_pages(path.read_text("utf-8"))


WIDTHS, HEIGHT = (390, 1400), 1600
"""Sizes of the pictures of a page, in pixels."""
# Windows of Chromium have a least width of about 500 pixels, so the page is a frame in a wide one.
BROWSER = "chromium --headless --no-sandbox --hide-scrollbars --window-size=1500,1800"
FRAME = '<body style="margin: 0"><iframe width="{}" height="{}" src="{}" style="border: 0">'


def take_screen(page: Path, width: int, path: Path) -> None:
    """Write the top of a page at this width as a PNG file of 256 colours."""
    with tempfile.TemporaryDirectory() as folder:
        frame, taken = Path(folder, "frame.html"), Path(folder, "taken.png")
        frame.write_text(FRAME.format(width, HEIGHT, page.resolve().as_uri()), "utf-8")
        words = ["--virtual-time-budget=5000", f"--user-data-dir={folder}", f"--screenshot={taken}"]
        subprocess.run([*BROWSER.split(), *words, frame.as_uri()], check=True, capture_output=True)
        pixels = Image.open(taken).convert("RGB").crop((0, 0, width, HEIGHT))
        pixels.quantize().save(path, optimize=True)


def take_screens(folder: Path) -> None:
    """Write pictures of a comparison's report and of the built site's first page."""
    if shutil.which("chromium") is None:
        raise SystemExit("chromium, which shows the pages, is not on PATH: apt install chromium")
    pages = {"report": folder / "report.html", "site": ROOT / "site" / "index.html"}
    for name, page in pages.items():
        if not page.is_file():
            raise SystemExit(f"no file {page}: first type `make demo` and `zensical build`")
        for width in WIDTHS:
            take_screen(page, width, PICTURES / f"{name}-{width}.png")


def main() -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drawn", action="store_true", help="only those of committed rows")
    parser.add_argument("--depth", type=Path, help="draw this one alone, of this folder")
    parser.add_argument("--screens", type=Path, help="report of this folder and the site, alone")
    words = parser.parse_args()
    drawings = DRAWN if words.drawn else MADE
    if words.screens:
        take_screens(words.screens)
        return 0
    if words.depth:
        drawings = {"depth": lambda path: draw_depth(words.depth, path)}
    for name, drawing in drawings.items():
        (PICTURES / f"{name}.svg").write_text(picture(name, drawing), "utf-8")
        sys.stdout.write(f"{name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
