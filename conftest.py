"""Fixtures every test may use."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from tests.support.one_mesh import one_mesh

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Names of 0.3, which warn when they are imported; lab/tests/test_moved.py tries each.
collect_ignore = [
    str(file)
    for file in (Path(__file__).parent / "src" / "wellposed").glob("*.py")
    if "= moved_package(" in file.read_text("utf-8")
]
# As a shell and nohup start what runs behind.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.fixture(scope="session")
def shared_data():
    """Return the folder of real data sets, or skip with the reason."""
    folder = Path(os.environ.get("WELLPOSED_DATA", Path(__file__).parents[1] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"no shared data at {folder}; set WELLPOSED_DATA to the folder that holds ptb/,"
            " listops/, imdb/, ..."
        )
    return folder


@pytest.fixture
def mesh():
    """Return a device mesh of this process alone."""
    with one_mesh() as single:
        yield single


@pytest.fixture(autouse=True)
def _as_a_new_process(monkeypatch):
    """A file that one test imports is not recorded by the runs of the next, and what is compiled is
    compiled again where a test left a model watched."""
    # `torch.manual_seed` formats the stack for each kind of device that is absent, in milliseconds.
    seed = (
        torch.manual_seed
        if torch.accelerator.is_available()
        else torch.default_generator.manual_seed
    )
    seed(0)
    if plugins := sys.modules.get("wellposed_lab.plugins"):
        monkeypatch.setattr(plugins, "_imported", {})
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("default")
