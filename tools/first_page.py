"""The changes of README, word for word, in small scripts such as a reader has.

    python tools/first_page.py             # names of the changes and the extra that each needs
    python tools/first_page.py 2 > a.py    # the script of a change

`tools/installs.py` runs each script in an environment of its extra, and a test does so with what is
installed here. A change that no longer fits its script is an error.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
CORE = "core"
SECTION = re.compile(r"^### (.*)\n\n(.*)\n\n```diff\n((?:[ +@-].*\n)*)```$", re.MULTILINE)

LOOP = """
import torch

encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
x, y = torch.randn(64, 5, 16), torch.randn(64, 5, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(8):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CHECK_LOOP = """
for name, weight in model.named_parameters():
    if "linear" in name and weight.dim() == 2:
        limit = 2 * (weight.shape[0] / weight.shape[1]) ** 0.5
        size = torch.linalg.matrix_norm(weight.double(), 2)
        assert size <= limit * (1 + 1e-6), (name, size, limit)
print("every matrix is below its size")
"""
TRAINER = """
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, **sizes))
rows = [{"input_ids": torch.arange(6) + n, "labels": n % 3} for n in range(32)]
options = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
arguments = TrainingArguments(tempfile.mkdtemp(), max_steps=8, logging_steps=4, **options)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
"""
CHECK_TRAINER = """
logged = {name.partition("/")[0] for row in trainer.state.log_history for name in row}
assert penalty.step == 8, penalty.step
print("logged", sorted(logged))
"""
CERTIFICATE = """
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "the", *"abc", "##b", "##c"]
inner = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
model = BertForSequenceClassification(BertConfig(vocab_size=len(pieces), num_labels=2, **sizes))
texts = ["good film the good film good", "the bad abc bad film bad bad"] * 16
labels = [0, 1] * 16


def train(model, ids, labels):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    for _ in range(30):
        model(**batch, labels=torch.tensor(labels)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


ids = tokenizer(texts)["input_ids"]
train(model, ids, labels)
"""
SCRIPTS = {
    "Your loop": (LOOP, CHECK_LOOP),
    "The Trainer of transformers": (TRAINER, CHECK_TRAINER),
    "A certificate": (CERTIFICATE, ""),
}
"""Scripts without the changes, and what is checked after them; named as on the page."""


@dataclass(frozen=True)
class Change:
    """One change of the page."""

    name: str
    extra: str
    """The extra that the page names, or `CORE`."""
    block: str
    """The block of the page, as a patch."""

    def script(self) -> str:
        """Return the reader's script with the change, and its checks."""
        script, check = SCRIPTS[self.name]
        return patched(script, self.block) + check


def changes(page: Path = README) -> list[Change]:
    """Return the changes of a page, in its order."""
    listed = []
    for name, text, block in SECTION.findall(page.read_text("utf-8")):
        extra = re.search(r"`\[(\w+)\]`", text)
        listed.append(Change(name, extra[1] if extra else CORE, block))
    return listed


def patched(script: str, block: str) -> str:
    """Apply a block of a page, whose lines must fit one place of the script, as ``patch`` does."""
    lines = block.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] != "+")
    new = "".join(line[1:] for line in lines if line[0] != "-")
    if f"\n{script}".count(f"\n{old}") != 1:
        raise ValueError(f"expected once in the script:\n{old}")
    return script.replace(old, new)


def main() -> None:
    """Print the changes, or the script of one."""
    every = changes()
    if len(sys.argv) > 1:
        sys.stdout.write(every[int(sys.argv[1]) - 1].script())
        return
    for number, change in enumerate(every, start=1):
        sys.stdout.write(f"{number}  {change.extra:<5} {change.name}\n")


if __name__ == "__main__":
    main()
