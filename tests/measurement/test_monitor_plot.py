"""`Monitor.history` and `Monitor.plot`: every measured step, by role and layer."""

import math
import sys

import pytest
import torch
from torch import nn

from wellposed.errors import ConfigError
from wellposed.measurement import Monitor

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def trained(model=None, *, steps=7, every=3, **options):
    torch.manual_seed(0)
    model = model or nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    returned = []
    with Monitor(model, optimizer, every=every, **options) as monitor:
        for _ in range(steps):
            model(torch.randn(2, 5, 8)).square().mean().backward()
            optimizer.step()
            returned.append(monitor.step())
    return monitor, returned


def panels(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.axison}


def test_the_history_is_what_step_returned():
    monitor, returned = trained()
    expected = [{"step": step, **returned[step - 1]} for step in (1, 4, 7)]
    assert monitor.history() == expected


def test_a_long_history_keeps_its_newest_steps_and_says_what_it_drops(monkeypatch, caplog):
    numbers = len(trained()[1][0])
    monkeypatch.setattr("wellposed.measurement._history.MOST", 5 * numbers)
    logged = []
    monitor, returned = trained(steps=20, every=1, log_to=lambda _, step: logged.append(step))
    rows = monitor.history()
    steps = [int(row["step"]) for row in rows]
    assert len(rows) <= 5
    assert steps[-1] == 20
    assert all(
        row == {"step": step, **returned[step - 1]} for step, row in zip(steps, rows, strict=True)
    )
    assert logged == list(range(1, 21))
    lines = [record.message for record in caplog.records if "history()" in record.message]
    assert len(lines) == 1
    assert len(trained()[0].history()) == 3


def test_curves_are_the_numbers_of_roles_and_layers():
    monitor, _ = trained()
    rows = monitor.history()
    parts = panels(monitor.plot())
    assert list(parts) == [
        "largest singular value",
        "distance from orthogonal (scale-free)",
        "stable rank",
        "largest attention logit",
        "entropy of attention, of 1",
        "kurtosis of activations",
        "gradient norm",
        "step over weight",
        "size of activations (rms)",
    ]
    curves = [line.get_ydata().tolist() for line in parts["largest singular value"].lines]
    names = [name for name in rows[0] if name.endswith("/sigma_max")]
    assert len(names) == 12
    assert curves == [[row[name] for row in rows] for name in names]
    assert parts["largest singular value"].lines[0].get_xdata().tolist() == [1, 4, 7]
    worst = [line.get_ydata().tolist() for line in parts["entropy of attention, of 1"].lines]
    heads = [[f"vital/encoder.{i}.head{h}/entropy" for h in (0, 1)] for i in (0, 1)]
    assert worst[:2] == [[min(row[name] for name in pair) for row in rows] for pair in heads]


def test_legends_name_every_role_and_layer_once():
    monitor, _ = trained(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True))
    roles, layers = monitor.plot().legends
    names = [text.get_text() for text in roles.get_texts()]
    assert names == ["query", "key", "value", "output", "ff in", "ff out"]
    assert [text.get_text() for text in layers.get_texts()] == ["encoder 0"]


@pytest.mark.parametrize(("options", "count"), [({"weights": False}, 6), ({"vitals": False}, 3)])
def test_panels_without_numbers_are_left_out(options, count):
    monitor, _ = trained(**options)
    assert len(panels(monitor.plot())) == count


def test_cross_attention_and_deep_models_have_their_curves():
    decoder = Monitor(nn.Transformer(8, 2, 1, 1, 12, batch_first=True))
    decoder.step()
    names = [text.get_text() for text in decoder.plot().legends[0].get_texts()]
    assert {"query", "cross query", "cross output", "ff in"} <= set(names)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    deep, _ = trained(nn.TransformerEncoder(layer, 21, enable_nested_tensor=False), steps=1)
    named = [text.get_text() for text in deep.plot().legends[1].get_texts()]
    assert named == [f"encoder {depth}" for depth in (0, 5, 10, 15, 20)]


def test_numbers_that_are_not_finite_are_gaps():
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    monitor = Monitor(model, torch.optim.SGD(model.parameters()), every=1, weights=False)
    for factor in (1.0, math.nan):
        model(factor * torch.randn(2, 5, 8)).sum().backward()
        monitor.step()
    values = panels(monitor.plot())["size of activations (rms)"].lines[0].get_ydata().tolist()
    assert math.isfinite(values[0])
    assert math.isnan(values[1])


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_file_is_written_and_a_notebook_can_show_the_figure(tmp_path, suffix):
    monitor, _ = trained(steps=1)
    path = tmp_path / "new" / f"monitor.{suffix}"
    figure = monitor.plot(path)
    assert path.stat().st_size > 1000
    if suffix == "svg":
        assert b"mathdefault" not in path.read_bytes()
    figure.savefig(tmp_path / "again.png")  # outside our style, as a notebook does


def test_refusals(tmp_path, monkeypatch):
    monitor = Monitor(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True))
    with pytest.raises(ConfigError, match=r"nothing was measured yet; call monitor.step\(\)"):
        monitor.plot()
    monitor.step()
    with pytest.raises(ConfigError, match=r"expected .svg or .png, received suffix '.pdf'"):
        monitor.plot("a.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"'matplotlib', which is not installed; run: .*plots"):
        monitor.plot()
