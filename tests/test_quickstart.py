"""The quickstart notebook runs from top to bottom in few steps, and prints what it shows."""

import json
import re
from pathlib import Path

import pytest
from tools.notebook import code_cells, run_cell, run_notebook
from torch.optim.optimizer import register_optimizer_step_post_hook

NOTEBOOK = Path(__file__).parents[1] / "docs" / "quickstart.ipynb"
CELLS = code_cells(json.loads(NOTEBOOK.read_text("utf-8")))
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def shape(text):
    """The words of a text without its numbers, which differ with the processor."""
    lines = [re.sub(r"[-= ]+", " ", NUMBER.sub("#", line)).strip() for line in text.splitlines()]
    return [line for line in lines if line and "/tmp" not in line and "runtime" not in line]


def test_a_cell_prints_its_last_value_as_a_server_does():
    names = {}
    assert run_cell("a = 2\nprint(a)\na + 1", names) == "2\n3\n"
    assert run_cell("None", names) == ""
    with pytest.raises(ZeroDivisionError):
        run_cell("1 / 0", names)


def test_the_notebook_has_its_parts_and_its_outputs():
    source = "".join("".join(cell["source"]) for cell in CELLS)
    parts = (
        "constrain_",
        "OrthogonalityPenalty",
        "Monitor(",
        "monitor.plot()",
        "WordCertificate",
        "compare char_lm",
    )
    assert [part for part in parts if part not in source] == []
    assert not re.search(r"/(work|home|root|usr)\b", NOTEBOOK.read_text("utf-8"))
    assert sum(bool(cell["outputs"]) for cell in CELLS) >= len(CELLS) - 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*non-interactive.*:UserWarning")
def test_the_notebook_runs_in_few_steps_and_prints_what_it_shows(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    steps = []
    counting = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        printed = run_notebook(NOTEBOOK)
    finally:
        counting.remove()
    assert len(steps) <= 1300, "half a minute of two cores"
    for cell, text in zip(CELLS, printed, strict=True):
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        assert shape(text)[:1] == shape(stored)[:1]
        if "certificate.accuracy" in "".join(cell["source"]):
            assert float(re.search(r"words +1 +(\S+)", text)[1]) > 0.9
        if "plain   capped" in text:
            low, high = ([*map(float, row.split())] for row in text.splitlines()[1:])
            assert high[2] < high[1] - 0.2, "a rate that is too high without the cap"
            assert min(low[2], high[2]) < low[1]
