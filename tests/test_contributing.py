"""CONTRIBUTING shows how to add one of each; its blocks run here, from outside the package, as they
stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
BEFORE = """
import re
import sys
from pathlib import Path

mine = {}  # what earlier blocks define; what they import, each block imports for itself
for block in Path(sys.argv[1]).read_text("utf-8").split("# block\\n"):
    names = {"__name__": "pasted", **mine}
    exec(block, names)
    mine |= {name: names[name] for name in re.findall(r"^(?:class|def) (\\w+)", block, re.M)}
globals().update(mine)

import tempfile
import torch
from torch import nn

import wellposed as wp
from wellposed.compare.variants import apply_variant
from wellposed.models import WellposedConfig, WellposedModel
from wellposed.nn import attention_mask
from wellposed.recipes.reproduce import reproduce
from wellposed.tasks import build_task
from wellposed.training import RunConfig
"""
AFTER = """
assert apply_variant("narrow", RunConfig("listops")).model.hidden_size == 64

config = WellposedConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, attention="average", num_hidden_layers=1)
assert WellposedModel(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape == (1, 3, 8)
assert wp.certify(Halve().eval(), seq_len=4).total == 0.5
x = torch.tensor([[[2.0], [4.0], [9.0]]])
padded = torch.tensor([[False, False, True]])
assert Average()(x, key_padding_mask=padded, is_causal=True).flatten().tolist() == [2.0, 3.0, 9.0]

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


def test_every_block_is_short() -> None:
    assert len(BLOCKS) == 6
    code = [re.sub(r"^(from|import) .*\n", "", block, flags=re.MULTILINE) for block in BLOCKS]
    assert [block for block in code if len(re.findall(r"\S.*\n", block)) > 7] == []


@pytest.mark.slow
def test_each_block_runs_as_pasted_and_adds_one_from_outside(tmp_path: Path) -> None:
    blocks, script = tmp_path / "blocks.txt", tmp_path / "mine.py"
    blocks.write_text("# block\n".join(BLOCKS), encoding="utf-8")
    script.write_text(BEFORE + AFTER, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, blocks], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
