"""The lines of the page "Add it to your script", put into loops of the scripts' shapes: they run,
and do what the page says."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from tests.support.zoo import ZOO  # noqa: F401

import wellposed as wp  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:.*(LeafSpec|is_gradient_checkpointing)")
PAGE = Path(__file__).parents[1] / "docs" / "howto" / "add_to_your_script.md"
SECTION = re.compile(r"^#+ (.*)\n(?:(?!#|```).*\n)*```diff\n((?:[ +@-].*\n)*)```$", re.MULTILINE)
BLOCKS = dict(SECTION.findall(PAGE.read_text("utf-8")))
EXAMPLE = Path(__file__).parents[1] / "examples" / "hf_trainer.py"
ROWS = [{"input_ids": torch.arange(6) + at, "labels": at % 3} for at in range(32)]

RUN = """
if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
"""
TRAIN = "\ntrainer.train()\n"
NANOGPT = """
weight_decay, learning_rate, beta1, beta2, device_type, log_interval = 0.1, 0.01, 0.9, 0.9, "cpu", 2
model, scaler = GPT(), torch.amp.GradScaler("cpu")
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)
for micro_step in range(8):
    logits, loss = model(torch.arange(8)[None], torch.arange(8)[None])
    scaler.scale(loss / 2).backward()
    if micro_step % 2 == 0:
        continue
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""
MINGPT = """
class Trainer:
    def run(self, model, config, x):
        self.optimizer = model.configure_optimizers(config)
        for y in [x] * 8:
            logits, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            self.optimizer.step()
model, trainer = GPT(), Trainer()
trainer.run(model, 0.1, torch.arange(8)[None])
globals().update(vars(trainer))
"""
PEFT = """
peft = pytest.importorskip("peft")
model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], r=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.utils.data.DataLoader(ROWS, batch_size=4):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LIGHTNING = """
lightning = pytest.importorskip("lightning")
class Module(lightning.LightningModule):
    def training_step(self, batch):
        loss = self.model(**batch).loss
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer
module = Module()
module.model = model
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", **options)
trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=4))
globals().update(vars(module))
"""
TIMM = """
model = ZOO["timm look-alike"].build()
if args.do_train:
    optimizer = torch.optim.AdamW(
        model.parameters(),
        **args.opt_kwargs,
    )
for _ in range(8):
    model(torch.randn(2, 5, 16)).square().mean().backward()
    optimizer.step()
"""


class GPT(hf.GPT2LMHeadModel):
    """Called as nanoGPT and minGPT are: head and embedding tied, query, key and value one weight."""

    def __init__(self):
        super().__init__(hf.GPT2Config(vocab_size=9, n_embd=16, n_layer=2, n_head=2, n_positions=8))

    def forward(self, x, y):
        out = super().forward(x, labels=y)
        return out.logits, out.loss

    def configure_optimizers(self, decay, rate=1e-2, betas=(0.9, 0.95), device_type="cpu"):
        groups = [[p for p in self.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
        groups = [{"params": groups[0], "weight_decay": decay}, {"params": groups[1]}]
        return torch.optim.AdamW(groups, lr=rate, betas=betas, weight_decay=0.0, fused=True)


class OwnLoss(hf.Trainer):
    """Computes its loss without the model's, as trainers of TRL and sentence-transformers do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return F.cross_entropy(model(inputs["input_ids"]).logits, inputs["labels"])


SCRIPTS = {
    "run_glue": RUN, "run_clm": RUN, "nanoGPT": NANOGPT, "minGPT": MINGPT, "TRL": TRAIN, "PEFT": PEFT,
    "sentence-transformers": TRAIN, "Lightning": LIGHTNING, "timm": TIMM,
}  # fmt: skip


def patched(script, block):
    """Apply a block of the page, whose hunks must each fit one place, as ``patch`` does."""
    for hunk in block.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        assert script.count(f"\n{old}") == 1, old
        script = script.replace(old, new)
    return script


def run(script, folder):
    """Run a script, with eight micro-batches, from a model and a Trainer as the scripts make them."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = hf.BertConfig(vocab_size=40, hidden_size=16, num_labels=3, **sizes)
    model = hf.BertForSequenceClassification(config)
    args = hf.TrainingArguments(
        str(folder), do_train=True, learning_rate=1e-2, weight_decay=0.1, use_cpu=True, save_strategy="no",
        num_train_epochs=1, gradient_accumulation_steps=2, per_device_train_batch_size=4,
    )  # fmt: skip
    args.opt_kwargs = {"lr": 1e-2, "weight_decay": 0.05}  # of timm
    trainer = (OwnLoss if script == TRAIN else hf.Trainer)(model, args, train_dataset=ROWS)
    names = {"training_args": args, "checkpoint": None, **globals(), **locals()}
    exec(script, names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_lines_of_the_page_do_what_they_say(name, tmp_path, caplog):
    plain = run(SCRIPTS[name], tmp_path)
    changed = run(patched(SCRIPTS[name], BLOCKS[name]), tmp_path)
    pairs = zip(plain["model"].parameters(), changed["model"].parameters(), strict=True)
    assert any(not torch.equal(before, after) for before, after in pairs)
    if handle := changed.get("handle"):
        assert handle.error().worst < 1e-5
        assert caplog.text.count("weight decay is left out") == ("spectral" not in BLOCKS[name])
    if penalty := changed.get("penalty"):
        assert penalty.step == 8
        total = sum(penalty.terms().values())
        penalty.rebind(plain["model"])
        assert total < penalty().item()
    if monitor := changed.get("monitor"):
        assert monitor.steps == 4
    assert {"handle", "penalty"} & changed.keys()


def test_every_block_of_the_page_has_its_loop():
    assert BLOCKS.keys() == SCRIPTS.keys()
    assert PAGE.read_text("utf-8").count("```diff") == len(SCRIPTS)


@pytest.mark.slow
def test_the_example_of_the_trainer_says_what_it_reached(tmp_path, monkeypatch, capsys):
    script = EXAMPLE
    options = ["--use_cpu", "--output_dir", str(tmp_path), "--max_steps", "40"]
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    penalty, error, largest = re.search(
        r"penalty (\S+), error of the set (\S+)\nlargest weight (\S+),", printed
    ).groups()
    start = 0.1 * 4 * 16**0.5  # two layers, query and key 16 x 16 and near 0
    assert 0 < float(penalty) < 0.95 * start
    assert float(error) < 1e-6
    assert 0 < float(largest) <= 2
    rows = re.findall(r"^words +(\d) +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2"]
    assert 0 < float(rows[0][1]) <= float(rows[0][2])
