"""CONTRIBUTING shows how to add one of each; its blocks run here, from outside the package, as they
stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
BEFORE = """
from dataclasses import replace
import tempfile
from pathlib import Path

import torch
from torch import nn

import wellposed as wp
from wellposed.certification import LayerBound, register_rule
from wellposed.charts import Panel
from wellposed.models import WellposedConfig, WellposedModel
from wellposed.nn import ATTENTIONS
from wellposed.recipes.recipe import Reproduction, recipe
from wellposed.recipes.reproduce import reproduce
from wellposed.compare.variants import VARIANTS, apply_variant
from wellposed.roles import FAMILIES, Family
from wellposed.roles.families import attention_named, feedforward_named
from wellposed.tasks import TASKS, TaskSpec, TextClassificationOptions, TextClassificationTask, build_task
from wellposed.training import RunConfig
"""
AFTER = """
assert apply_variant("narrow", RunConfig("listops")).model.hidden_size == 64

config = WellposedConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, attention="average", num_hidden_layers=1)
assert WellposedModel(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape == (1, 3, 8)
assert wp.certify(Average().eval(), seq_len=4).total == 1.0

rows = Path(tempfile.mkdtemp()) / "train.tsv"
rows.write_text("label\\ttext\\n" + "good\\ta film\\nbad\\ta movie\\n" * 30)
assert build_task("films", {"data": str(rows)}).labels == ("bad", "good")


class Attention(nn.Module):
    num_attention_heads = 2

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(8, 8) for _ in range(4))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


layer = nn.ModuleDict({"attention": Attention(), "mlp": FeedForward()})
found = wp.find_roles(nn.ModuleDict({"layers": nn.ModuleList([layer])}))
assert {weight.role for weight in found.weights()} == {
    "query", "key", "value", "output", "feedforward_in", "feedforward_out"
}, str(found)

done = reproduce("mine/figure-1", scale="mini", out=Path(tempfile.mkdtemp()))
assert done.files[0].read_text().split() == ["x,y", "1,2"]
"""


def test_every_block_is_at_most_five_lines() -> None:
    assert len(BLOCKS) == 6
    assert [
        block for block in BLOCKS if len([line for line in block.split("\n") if line.strip()]) > 5
    ] == []


def test_one_of_each_is_added_from_outside(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("\n".join([BEFORE, *BLOCKS, AFTER]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
