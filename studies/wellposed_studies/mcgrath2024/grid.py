"""McGrath (2024): the cells of his grid, his printed numbers and our scales; free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.errors import unknown_name
from wellposed.recipes.recipe import Request
from wellposed_studies.mcgrath2024.multitask_options import MultiTaskOptions

STRENGTHS = (1e-2, 1e-4, 1e-6)
PLACES = ("key", "query", "key+query")
FURTHER_PLACES = ("value", "embedding")
"""Where his section 4.2 penalises too; he prints no number of these."""
FINE_TUNING: Mapping[str, Mapping[str, Any]] = {
    "mini": {"learning_rate": 5e-5, "steps": 200, "measure_every": 20},
    "medium": {"learning_rate": 5e-5, "steps": 1000, "measure_every": 50},
}
"""How a pretrained encoder is trained where the scale has a small one of its own."""
QR_METHODS = ("householder", "gram_schmidt")
BASELINE = "baseline"

# Table 1, in its order. The key row equals the query row in all four columns, so one of them is
# very likely a copy.
PAPER_TABLE: dict[str, dict[str, float]] = {
    BASELINE: {"sst": 0.485, "para": 0.876, "sts": 0.8358, "overall": 0.7596},
    "key": {"sst": 0.4968, "para": 0.871, "sts": 0.8362, "overall": 0.762},
    "query": {"sst": 0.4968, "para": 0.871, "sts": 0.8362, "overall": 0.762},
    "key+query": {"sst": 0.4687, "para": 0.871, "sts": 0.8377, "overall": 0.7528},
}


@dataclass(frozen=True)
class Cell:
    """One point of the grid: where the penalty is, in which form, and how strong."""

    place: str
    form: str
    strength: float

    @property
    def name(self) -> str:
        """``baseline``, ``key:1e-2``, ``key+query:1e-6``, ``householder:1e-4``."""
        if self.form == "none":
            return BASELINE
        return f"{self.place if self.form == 'gram' else self.form}:{_short(self.strength)}"

    @property
    def group(self) -> str:
        """The name without its strength: a row of Table 1, or a QR form."""
        return self.name.partition(":")[0]

    @property
    def folder(self) -> str:
        """The name as part of a path."""
        return self.name.replace(":", "-")

    def penalty(self) -> dict[str, Any] | None:
        """Return the keywords of `wellposed.OrthogonalityPenalty`, or None for the baseline."""
        if self.form == "none":
            return None
        strengths = dict.fromkeys(self.place.split("+"), self.strength)
        form = {"form": "gram"} if self.form == "gram" else {"form": "qr", "qr_method": self.form}
        return {**strengths, **form}

    def parameters(self) -> dict[str, Any]:
        """Return the coordinates as Optuna shows them."""
        return {"place": self.place, "form": self.form, "strength": self.strength}


def grid() -> tuple[Cell, ...]:
    """Return the baseline, his sweep (strength x key x query) and the QR forms on key and query.

    His own sweep holds the baseline three times, once for each strength without a penalty; here it
    is once.

    >>> len(grid()), grid()[1].name, grid()[-1].name
    (16, 'key:1e-2', 'gram_schmidt:1e-6')
    """
    gram = [Cell(place, "gram", strength) for place in PLACES for strength in STRENGTHS]
    qr = [Cell("key+query", method, strength) for method in QR_METHODS for strength in STRENGTHS]
    return (Cell("none", "none", 0.0), *gram, *qr)


def further_cells() -> tuple[Cell, ...]:
    """Return the penalties on values and on token embeddings, which his sweep leaves out.

    >>> [cell.name for cell in further_cells()][::3]
    ['value:1e-2', 'embedding:1e-2']
    """
    return tuple(
        Cell(place, "gram", strength) for place in FURTHER_PLACES for strength in STRENGTHS
    )


def chosen_cells(names: Sequence[str]) -> tuple[Cell, ...]:
    """Return the named cells in order, the baseline always among them; no name is the whole `grid`.

    Raises:
        ConfigError: a name that is neither in the grid nor a further cell (nearest three named).
    """
    known = {cell.name: cell for cell in (*grid(), *further_cells())}
    for name in names:
        if name not in known:
            raise unknown_name("cell", name, known)
    wanted = {BASELINE, *(names or (cell.name for cell in grid()))}
    return tuple(cell for name, cell in known.items() if name in wanted)


_TOY_MODEL: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 400,
}
SCALES: dict[str, MultiTaskOptions] = {
    # Seconds, for tests: too small to show anything.
    "toy": MultiTaskOptions(
        **_TOY_MODEL, max_length=16, train_rows=400, batch_size=4, steps=3, measure_every=2
    ),
    # 48 trainings in under twenty minutes on two CPU cores.
    "mini": MultiTaskOptions(train_rows=12000, steps=350, measure_every=35),
    # 50 trainings of Figure 1 in under five hours on two CPU cores.
    "medium": MultiTaskOptions(hidden_size=128, train_rows=50_000, steps=2000, measure_every=100),
    # A pretrained BERT base on every row: three passes over the largest set.
    "paper": MultiTaskOptions(
        encoder="bert-base-uncased",
        max_length=128,
        steps=5300,
        learning_rate=2e-5,
        measure_every=265,
    ),
}


def options_of(scale: str, encoder: str | None = None) -> MultiTaskOptions:
    """Return how ``scale`` trains its own model, or fine-tunes a pretrained ``encoder`` in its
    place.

    >>> options_of("medium").learning_rate, options_of("medium", "minilm/").learning_rate
    (0.001, 5e-05)
    """
    if encoder is None:
        return SCALES[scale]
    pretrained = not Path(encoder).is_file()  # a config.json has random weights
    return replace(
        SCALES[scale], encoder=encoder, **(FINE_TUNING.get(scale, {}) if pretrained else {})
    )


def seeds_of(request: Request) -> int:
    """Return the trainings of every cell."""
    return request.pick(toy=2, mini=3, medium=5, paper=3)


def _short(strength: float) -> str:
    mantissa, _, exponent = f"{strength:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
