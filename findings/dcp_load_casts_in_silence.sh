#!/usr/bin/env bash
# Guess: `torch.distributed.checkpoint.load` compares a checkpoint with the tensors that it fills, and raises if they do
# not fit: it does for other shapes, and for a name that the checkpoint lacks.
# Fact: it compares no dtypes. Numbers are cast to what they meet: 0.9 becomes 0 in int64, 300 becomes 44 in int8. And a
# tied weight takes two tensors of an untied checkpoint one after the other: the head overwrites the embedding.
# Nothing is said in either case. What it does raise is no `Exception`, so `except Exception` lets it pass.
# Bites: whoever resumes with another dtype, loads quantised buffers by name, or ties weights that were trained untied.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6

FOLDER="$folder" "$folder/venv/bin/python" - <<'PYTHON'
import logging
import os
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

print("torch", torch.__version__)
warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
logging.basicConfig(level=logging.WARNING)
folder = os.environ["FOLDER"]
dcp.save({"w": torch.tensor([0.9, -2.7, 300.0])}, checkpoint_id=f"{folder}/numbers")
for dtype, expected in ((torch.int64, [0, -2, 300]), (torch.int8, [0, -2, 44])):
    target = {"w": torch.zeros(3, dtype=dtype)}
    dcp.load(target, checkpoint_id=f"{folder}/numbers")
    print("0.9, -2.7, 300.0 loaded into", dtype, "are", target["w"].tolist())
    assert target["w"].tolist() == expected
try:
    dcp.load({"w": torch.zeros(2)}, checkpoint_id=f"{folder}/numbers")
except dcp.CheckpointException as error:
    print("another shape:", type(error).__name__, "- an Exception", isinstance(error, Exception))
    assert not isinstance(error, Exception)
else:
    raise AssertionError("another shape was loaded")


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


torch.manual_seed(0)
untied, tied = Model(False), Model(True)
dcp.save(untied.state_dict(), checkpoint_id=f"{folder}/untied")
dcp.load(tied.state_dict(), checkpoint_id=f"{folder}/untied")
table = tied.embedding.weight
is_embedding = torch.equal(table, untied.embedding.weight)
is_head = torch.equal(table, untied.head.weight)
print("an untied checkpoint in a tied model: the embedding", is_embedding, "- the head", is_head)
assert is_head and not is_embedding
PYTHON
