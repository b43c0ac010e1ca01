"""What README, documentation and package say they do, against what the code does."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import wellposed as wp
from wellposed.models import WellposedConfig, WellposedForSequenceClassification
from wellposed.nn import L2SelfAttention
from wellposed.registry import Registry
from wellposed_lab.compare.variants import VARIANTS
from wellposed_lab.tasks.task import TASKS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
VARIANTS_FILE = "wellposed_lab.compare.variants"
SMALL: dict[str, Any] = dict.fromkeys(("hidden_size", "intermediate_size"), 8) | {"vocab_size": 20}
SMALL |= {"num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "page", ["pyproject.toml", "mkdocs.yml", "docs/index.md", "src/wellposed/__init__.py"]
)
def test_no_page_certifies_any_model(page):
    text = (ROOT / page).read_text("utf-8")
    assert "certified" in text or "certifies" in text or "Certificates" in text
    assert "any PyTorch model" not in text


def plain():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def own():
    config = WellposedConfig(**SMALL, attention="l2_tied", norm="none")
    return WellposedForSequenceClassification(config).eval()


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SMALL)).eval()


def t5():
    from transformers import T5Config, T5Model

    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5Model(T5Config(vocab_size=20, **sizes)).eval()


@pytest.mark.parametrize("build", [plain, own, bert, lambda: L2SelfAttention(8, 2).eval()])
def test_what_is_said_to_have_a_certificate_has_one(build):
    assert math.isfinite(wp.certify(build(), seq_len=4).total)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: nn.LSTM(8, 8, batch_first=True), "LSTM"),
        (lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), "TransformerDecoderLayer"),
        (t5, "T5Model"),
    ],
)
def test_what_is_said_to_have_none_is_named(build, name):
    """Whoever adds a rule for one of these corrects docs/index.md and docs/howto/certify.md, and
    then this list."""
    certificate = wp.certify(nn.Sequential(nn.Linear(8, 8), build().eval()), seq_len=4, radius=1.0)
    assert certificate.total == math.inf
    assert name in certificate.table()


@pytest.mark.parametrize(("heading", "registered"), [("Variants", VARIANTS), ("Tasks", TASKS)])
def test_the_page_of_the_command_lists_every_variant_and_every_task(
    heading: str, registered: Registry[Any]
) -> None:
    page = (ROOT / "docs" / "command.md").read_text("utf-8")
    rows = page.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    first = "".join(row.split("|")[1] for row in rows if row.startswith("| `"))
    listed = set(re.findall(r"`(\w+)`", first))
    ours = {
        name
        for name in registered
        if getattr(registered.get(name), "__module__", "") == VARIANTS_FILE
    }
    assert ours <= listed <= set(registered)


def table_rows(text, heading):
    """The cells of the table whose first heading this is."""
    lines = text.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_readme_and_the_page_of_families_agree():
    page = (ROOT / "docs" / "families.md").read_text("utf-8")
    rows = table_rows(README, "family")
    assert len(rows) == 5
    assert rows == table_rows(page, "family")
