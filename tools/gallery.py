"""Draw the pictures of docs/gallery.md and of the front page into docs/assets/gallery.

    python -m tools.gallery            # all; the runs take about two minutes of one core
    python -m tools.gallery --drawn    # the pictures of committed rows
    python -m tools.gallery --depth FOLDER    # of a finished comparison

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
from pathlib import Path

from wellposed.measurement import INK
from wellposed_lab.charts import Panel, draw, lines, medians, where
from wellposed_lab.report.runs import read_metrics
from wellposed_studies.frontier.certified import curves_panel

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "assets" / "gallery"
ROWS = ROOT / "benchmarks" / "reproduction"
GREY = "#808080"  # read on white and on black


def draw_study(path: Path) -> None:
    """Certified and attacked accuracy of the models of a study, a panel for each of its parts."""
    study, column, parts, models = STUDIES[path.stem]
    every = csv.DictReader((ROWS / f"frontier-{study}.csv").read_text("utf-8").splitlines())
    rows = [row for row in every if row["radius"] and row["model"] in models]
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
    path.write_text(for_both_pages(path.read_text("utf-8")), "utf-8")


def draw_measured(path: Path) -> None:
    """Weights of a small decoder after T-Fixup, one matrix made orthogonal."""
    import torch

    import wellposed as wp

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4}
    model = wp.models.build_model("wellposed", "causal_lm", **sizes, norm="none", init="t_fixup")
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
    rows = []
    for name, rate in RATES.items():
        out = path.parent / name
        words = f"-m wellposed {MONITORED} {rate} --out".split()
        # A run that blows up may end with values that are not finite.
        subprocess.run([sys.executable, *words, str(out)], check=False, capture_output=True)
        rows += [{**row, "run": name} for row in read_metrics(out)]
    panels = []
    for title, split, column, limit in (
        ("loss, nats per character", "train", "loss", None),
        ("update over weight, worst weight", "monitor", "vital/update", 0.1),
        ("attention logit, worst head", "monitor", "vital/logit_max", 50),
    ):
        curves = lines(where(rows, split=split), "step", column, by="run")
        level = None if limit is None else (f"alarm: {limit:g}", limit)
        panels.append(Panel(title, "optimizer steps", "", curves, "log", "log", level=level))
    draw(panels, path)


def draw_recipe(path: Path) -> None:
    """The figure of a recipe at mini scale."""
    from wellposed_studies.reproduce import reproduce

    with tempfile.TemporaryDirectory() as folder:
        done = reproduce(path.stem.replace("-", "/", 1), scale="mini", out=Path(folder))
        path.write_bytes(done.files[1].read_bytes())


DRAWN: dict[str, Callable[[Path], None]] = dict.fromkeys(STUDIES, draw_study)
MADE: dict[str, Callable[[Path], None]] = {
    **DRAWN,
    "measured": draw_measured,
    "monitor": draw_monitor,
    "kim2021-figure-2": draw_recipe,
    "kim2021-figure-3": draw_recipe,
}
"""Function that writes each picture of the page as an SVG file."""


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
    parser.add_argument("--depth", type=Path, help="draw this one alone, of this folder")
    words = parser.parse_args()
    if words.depth:
        draw_depth(words.depth, PICTURES / "depth.svg")
        return 0
    for name in DRAWN if words.drawn else MADE:
        (PICTURES / f"{name}.svg").write_text(picture(name), "utf-8")
        sys.stdout.write(f"{name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
