"""Checkpoints: complete or absent, damaged ones refused by file, nothing pickled, a full disk loses
nothing."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lab.tests.support import stub_task as stub
from lab.tests.support.runs import flip
from tests.support.words import words as typed
from torch import nn

from wellposed.errors import CheckpointError
from wellposed_lab.training.folder import atomic, checkpoints
from wellposed_lab.training.folder.checkpoints import encode, random_tensors
from wellposed_lab.training.folder.state import TrainerState

FILES = typed("model.safetensors optimizer.safetensors trainer_state.json manifest.json")


class Training:
    """A model, an optimizer with a state, and their folder."""

    def __init__(self, folder):
        self.model = stub.StubModel(dropout=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.folder = folder

    def step(self):
        self.optimizer.zero_grad()
        tokens = torch.randint(0, 11, (2, 4))
        self.model(tokens, None).logits.square().mean().backward()
        self.optimizer.step()

    def save(self, step):
        state = TrainerState(step=step, best_value=0.1 + 0.2, best_step=1)
        random_states = [encode(*random_tensors())]
        files = checkpoints.snapshot(self.model, self.optimizer, state, random_states)
        return checkpoints.write_checkpoint(self.folder, step, files)

    def numbers(self):
        state = self.optimizer.state_dict()["state"]
        moments = [state[i][name] for i in sorted(state) for name in sorted(state[i])]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]


@pytest.fixture
def training(tmp_path):
    """Return a model that has taken a step."""
    training = Training(tmp_path)
    training.step()
    return training


def draw():
    return [random.random(), random.gauss(0, 1), torch.rand(3).tolist(), np.random.rand(3).tolist()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_checkpoint_brings_back_every_bit(training, tmp_path):
    for _ in range(2):
        training.step()
    folder = training.save(3)
    before = training.numbers()
    drawn = draw()
    training.step()
    straight = training.numbers()
    other = Training(tmp_path)
    state = checkpoints.load_checkpoint(folder, other.model, other.optimizer, rank=0)
    assert (state.step, state.best_value) == (3, 0.1 + 0.2)
    assert same(other.numbers(), before)
    assert other.model.head.weight is other.model.embedding.weight
    assert draw() == drawn
    other.step()  # the same random tokens and the same dropout
    assert same(other.numbers(), straight)


def test_nothing_is_pickled(training):
    folder = training.save(1)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["half", "altered", "missing"])
def test_damage_is_found_and_the_file_named(training, name, damage):
    older = training.save(1)
    folder = training.save(2)
    path = folder / name
    if damage == "missing":
        path.unlink()
    elif damage == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        flip(path)
    # One changed bit of a manifest may leave valid JSON; then a digest, a size or a name is off.
    is_named = (name, damage) != ("manifest.json", "altered")
    with pytest.raises(CheckpointError, match=name if is_named else "checkpoint-2"):
        checkpoints.verify(folder)
    newest, (note,) = checkpoints.newest_complete(training.folder)
    assert newest == older
    assert "checkpoint-2" in note


@pytest.mark.parametrize(("older", "renames"), [(1, 0), (2, 0), (2, 1)])
def test_a_kill_at_a_rename(training, monkeypatch, older, renames):
    """A kill leaves a temporary folder behind; it is never taken for a checkpoint, and the next
    start removes it or, between the two renames of a replacement, puts it back."""
    old = training.save(older)
    rename = Path.rename
    left = iter(range(renames))

    class Killed(BaseException):
        pass

    def kill(self, target):
        if next(left, None) is None:
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        # A killed process cleans nothing up.
        patch.setattr(atomic.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(Path, "rename", kill)
        with pytest.raises(Killed):
            training.save(2)
    assert len(list(training.folder.iterdir())) == 2
    assert old.exists() == (renames == 0)
    atomic.remove_litter(training.folder)
    assert checkpoints.newest_complete(training.folder) == (old, [])
    assert list(training.folder.iterdir()) == [old]


def test_the_newest_and_the_best_stay(training):
    for step in (1, 2, 3, 4, 9):
        training.save(step)
    # 9 is later than the present step: a damaged one, or of a course that was given up
    checkpoints.prune(training.folder, step=4, keep=2, best_step=1)
    assert [path.name for path in checkpoints.all_checkpoints(training.folder)] == [
        "checkpoint-1", "checkpoint-3", "checkpoint-4",
    ]  # fmt: skip
    assert len(list(training.folder.iterdir())) == 3


def test_a_checkpoint_of_another_model_is_refused(training):
    folder = training.save(1)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        checkpoints.load_checkpoint(folder, nn.Linear(2, 2))


def test_a_new_process_keeps_its_generators_and_old_files_are_counted(training):
    folder = training.save(1)
    before = torch.manual_seed(5).get_state()
    checkpoints.load_checkpoint(folder, training.model, training.optimizer, rank=1)
    assert torch.equal(torch.get_rng_state(), before)
    checkpoints.load_checkpoint(folder, training.model, training.optimizer, rank=0)
    assert not torch.equal(torch.get_rng_state(), before)
    values = json.loads((folder / checkpoints.STATE).read_text())
    del values["processes"]
    (folder / checkpoints.STATE).write_text(json.dumps(values))
    shutil.copy(*(folder / checkpoints.random_name(rank) for rank in (0, 1)))
    assert checkpoints.load_checkpoint(folder, training.model).processes == 2
