"""Trackers are told what the files of a run hold, and none of them can end a run."""

import logging

import pytest
from accelerate import tracking as accelerate_tracking
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tests.support import stub_task as stub
from tests.support.notebook import Notebook

from wellposed.errors import ConfigError
from wellposed.options import flat_options
from wellposed.training import read_config, read_metrics
from wellposed.training.loop.tracking import Tracking


@pytest.fixture(autouse=True)
def records(monkeypatch):
    """The notebook in the place of every tracker."""
    for name in ("notebook", "tensorboard", "trackio", "wandb"):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Notebook)
    available = [*accelerate_tracking._available_trackers, "tensorboard", "trackio", "wandb"]
    monkeypatch.setattr(accelerate_tracking, "_available_trackers", available)
    monkeypatch.setattr(Notebook, "records", [])
    return Notebook.records


def numbers(row):
    return {
        f"{row['split']}/{name}": value
        for name, value in row.items()
        if name not in ("step", "split", "best") and value is not None
    }


def test_a_tracker_is_told_what_the_files_hold(tmp_path, records, capsys):
    out = tmp_path / "run"
    result = stub.run(stub.make_config(), out, tracking=Tracking(("notebook",)))
    (record,) = records
    assert record.config == flat_options(read_config(out).to_dict())
    assert record.place == ("wellposed",)
    rows = read_metrics(out)
    assert [values for _, values in record.rows[: len(rows)]] == [numbers(row) for row in rows]
    steps = [step for step, _ in record.rows]
    assert steps == sorted(steps)
    assert [step for step, values in record.rows if "train/loss" in values] == [2, 4, 6, 8, 10, 12]
    assert len(record.rows) == len(rows) + 1
    final = record.rows[-1][1]
    scores = result.result["results"]["stub"]
    named = {"/".join(["final", *name.split(",")[::-1]]): scores[name] for name in scores}
    assert final == {"final/succeeded": 1, **named}
    assert record.finished
    assert capsys.readouterr().out == ""


def test_a_run_is_the_same_with_and_without(tmp_path):
    stub.run(stub.make_config(dropout=0.1), tmp_path / "plain")
    stub.run(stub.make_config(dropout=0.1), tmp_path / "tracked", tracking=Tracking(("notebook",)))
    one, other = tmp_path / "plain", tmp_path / "tracked"
    files = [path.relative_to(one) for path in one.rglob("model.safetensors")]
    assert len(files) > 1
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes()
    assert not (tmp_path / "plain" / "trackers.json").exists()


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "finish"])
def test_a_tracker_that_raises_is_told_once_and_ends_nothing(tmp_path, monkeypatch, caplog, method):
    class Broken(Notebook):
        pass

    def fail(*_, **__):
        raise OSError("the network is away")

    monkeypatch.setattr(Broken, method, fail)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "broken", Broken)
    with caplog.at_level(logging.WARNING, logger="wellposed.training"):
        both = Tracking(("broken", "notebook"))
        result = stub.run(stub.make_config(), tmp_path / "run", tracking=both)
    assert result.status == "success"
    whole = next(record for record in Notebook.records if type(record) is Notebook)
    assert len(whole.rows) == len(read_metrics(tmp_path / "run")) + 1
    said = [record.getMessage() for record in caplog.records]
    told = [line for line in said if "tracker broken" in line]
    assert told[0] == "tracker broken: OSError: the network is away; the run goes on"
    lost = f"tracker broken: {len(whole.rows)} records did not arrive"
    assert [line.partition(";")[0] for line in told[1:]] == ([lost] if method == "log" else [])


@pytest.mark.parametrize(
    ("name", "says"),
    [("comet_ml", "comet_ml needs the package 'comet-ml'"), ("tensorbord", "nearest: tensorboard")],
)
def test_an_absent_tracker_is_refused_at_once(tmp_path, name, says):
    with pytest.raises(ConfigError, match=says) as refused:
        stub.run(stub.make_config(), tmp_path / "run", tracking=Tracking((name,)))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_resumed_run_keeps_its_record(tmp_path, records, name):
    out, tracking = tmp_path / "run", Tracking((name,))
    config = stub.make_config(log_every=1, checkpoint_every=3, eval_every=20)

    class Killed(BaseException):
        pass

    class Until(stub.StubTask):
        taken = 0

        def collate(self, examples):
            self.taken += 1
            if self.taken > 5:
                raise Killed
            return super().collate(examples)

    with pytest.raises(Killed):
        stub.run(config, out, task=Until(), tracking=tracking)
    assert records[0].finished
    assert [step for step, _ in records[0].rows] == [1, 2, 3, 4, 5]
    stub.run(config, out, resume="auto", tracking=tracking)
    steps = [step for step, values in records[1].rows if "train/loss" in values]
    assert steps == list(range(4, 13))
    first, second = records[0].options, records[1].options
    if name == "tensorboard":
        assert (first, second) == ({"purge_step": 1}, {"purge_step": 4})
        assert records[0].config is not None
        assert records[1].config is None
    else:
        assert first == second
        assert first["resume"] == "allow"
    stub.run(config, out, resume="auto", tracking=tracking)
    assert len(records) == 2  # nothing is left to report of a finished run
