"""`python -m benchmarks` at its tiniest: the rows, the JSON, the page, and the comparison with the
last run."""

import importlib
import importlib.metadata
import json
import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.__main__")


def rows_in(folder, name):
    (file,) = (folder / "results").glob("*.json")
    return json.loads(file.read_text("utf-8"))["benchmarks"][name]["rows"]


def test_two_runs_leave_rows_a_page_and_a_comparison(runner, tmp_path, capsys):
    assert runner.main(["ball", "norms", "--quick", "--out", str(tmp_path)]) == 0
    (file,) = (tmp_path / "results").glob("*.json")
    record = json.loads(file.read_text("utf-8"))
    assert record["versions"]["torch"] == importlib.metadata.version("torch")
    assert record["machine"]["cores"] >= 1
    assert set(record["benchmarks"]) == {"ball", "norms"}
    (ball,) = rows_in(tmp_path, "ball")
    assert ball["low"] <= ball["value"] <= ball["high"]
    assert ball["ours"] > 0
    assert "last" not in ball

    # As if the block had been ten times as fast, and the norms what they are.
    ball |= {key: ball[key] / 10 for key in ("value", "low", "high")}
    norms = rows_in(tmp_path, "norms")
    for row in norms:
        row |= {"low": 0.0, "high": 1e9}
    record["benchmarks"] = {"ball": {"rows": [ball]}, "norms": {"rows": norms}}
    yesterday = file.with_name(file.name[: -len("2000-01-01.json")] + "2000-01-01.json")
    yesterday.write_text(json.dumps(record | {"date": "2000-01-01"}), "utf-8")
    file.unlink()
    capsys.readouterr()
    assert runner.main(["ball", "norms", "--quick", "--out", str(tmp_path)]) == 0
    assert "outside its spread" in capsys.readouterr().out
    yesterday.unlink()
    (again,) = rows_in(tmp_path, "ball")
    assert again["last"]["outside"] is True
    assert again["last"]["ratio"] == pytest.approx(again["value"] / ball["value"])
    assert [row["last"]["outside"] for row in rows_in(tmp_path, "norms")] == [False] * len(norms)
    page = (tmp_path / "SPEED.md").read_text("utf-8")
    assert f"| {again['name']} | {again['value']:.3g} [" in page
    assert "of 2000-01-01, **outside its spread**" in page
    assert "| flex_attention | L2 attention through FlexAttention" in page


def test_the_page_is_that_of_the_results_and_says_why_each_goal_is_missed(runner):
    page = (runner.HERE / "SPEED.md").read_text("utf-8")
    assert page == runner.table(runner.HERE / "results", dict(runner.benchmarks()))
    missed = re.findall(r"^\| .* \| \*\*[^|]*\|", page, re.MULTILINE)
    assert missed
    assert [row for row in missed if not re.search(r"\*\* \(\d+\) \|$", row)] == []


def test_peers_are_named_with_their_versions_and_the_missing_ones_are_said(
    runner, tmp_path, capsys
):
    assert runner.main(["peers", "--quick", "--rounds", "3", "--out", str(tmp_path)]) == 0
    peers = importlib.import_module("benchmarks.peers").PEERS
    names = [row["name"] for row in rows_in(tmp_path, "peers")]
    output = capsys.readouterr().out
    for peer in peers:
        title = peer.title()
        if title is None:
            assert f"{peer.package} is not installed" in output
        else:
            assert importlib.metadata.version(peer.package).partition("+")[0] in title
            measured = [name for name in names if f"{title}, 16" in name]
            assert len(measured) == 3  # step, inference, error
    assert len({peer.title() for peer in peers if peer.package == "torch"}) == 7
    assert sum(name.startswith("spectral step / spectral_norm") for name in names) == 6


def test_without_a_gpu_one_line_says_so(runner, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runner.main(["--device", "cuda"]) == 0
    assert capsys.readouterr().out == "no CUDA here\n"


def test_a_gpu_keeps_each_row_as_it_comes_and_begins_none_after_its_time(
    runner, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    norms = dict(runner.benchmarks())["norms"]
    stored = []
    tiny = runner.Setup(quick=True)
    assert runner.measure(norms, tiny, {}, float("inf"), lambda rows: stored.append(len(rows)))
    assert stored == list(range(1, len(stored) + 1))
    assert runner.measure(norms, tiny, {}, 0.0, lambda rows: stored.append(rows))
    assert len(stored[-1]) == 1
    assert "its time is over" in capsys.readouterr().out
    monkeypatch.setattr(runner, "GPU_MINUTES", 0)
    assert runner.main(["gpu"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    on_gpu = [name for name, one in runner.benchmarks() if "cuda" in one.devices]
    assert next(iter(runner.GPU_SECONDS)) == "steps"
    assert {line.partition(": ")[0] for line in lines} == set(on_gpu)
    assert all(line.endswith("left out, 0 minutes are over") for line in lines)
    assert sum(runner.GPU_SECONDS.values()) <= 7 * 60


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_row_of_a_training_step_runs_in_tiny_sizes(runner, tmp_path):
    assert runner.main(["steps", "--quick", "--out", str(tmp_path)]) == 0
    steps = dict(runner.benchmarks())["steps"]
    wanted = [steps.goal_of(row["name"], "cuda").wanted for row in rows_in(tmp_path, "steps")]
    assert wanted == (["<= 1.05"] * 4 + ["<= 1.03"] * 2) * 2 + ["<= 1.5"] * 2


@pytest.mark.parametrize(
    ("goal", "good", "bad"), [("<= 1.25", 1.25, 1.3), (">= 10", 11, 9), ("1 to 2", 1.5, 3)]
)
def test_a_goal_is_met_or_not(runner, goal, good, bad):
    reaches = importlib.import_module("benchmarks.rows").reaches
    assert reaches(good, goal)
    assert not reaches(bad, goal)


def test_sides_take_turns_and_the_first_round_is_left_out(runner):
    rows = importlib.import_module("benchmarks.rows")
    order = []
    sides = {name: lambda name=name: order.append(name) for name in "abc"}
    times = rows.Setup(rounds=2).interleave(sides, 9)
    assert "".join(order) == "abcbcacab"
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2, "c": 2}
    row = rows.ratio_row("a / b", {"a": [2.0, 3.0, 8.0], "b": [1.0, 1.0, 2.0]}, "a", "b")
    assert (row.value, row.low, row.high, row.ours) == (3.0, 2.0, 4.0, 3000.0)
