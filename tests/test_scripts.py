"""The lines of the page "Add it to your script", put into loops of the scripts' shapes: they run,
and do what the page says."""

import logging
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from tests.support.zoo import ZOO
from torch import nn

import wellposed as wp

pytestmark = pytest.mark.filterwarnings("ignore:.*(LeafSpec|is_gradient_checkpointing)")
PAGE = Path(__file__).parents[1] / "docs" / "howto" / "add_to_your_script.md"
SECTION = re.compile(r"^#+ (.*)\n(?:(?!#|```).*\n)*```diff\n((?:[ +@-].*\n)*)```$", re.MULTILINE)
BLOCKS = dict(SECTION.findall(PAGE.read_text("utf-8")))

RUN = """
if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
"""
TRAIN = "\ntrainer.train()\n"
NANOGPT = """
weight_decay, learning_rate, beta1, beta2, device_type, log_interval = 0.1, 1e-2, 0.9, 0.95, "cpu", 2
model = GPT(tied=True)
scaler = torch.amp.GradScaler("cpu")
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)
for iter_num in range(4):
    for micro_step in range(2):
        logits, loss = model(*get_batch())
        scaler.scale(loss / 2).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""
MINGPT = """
class Trainer:
    def run(self, model, config):
        self.optimizer = model.configure_optimizers(config)
        for _ in range(4):
            x, y = get_batch()
            logits, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            self.optimizer.step()
model = GPT(tied=False)
trainer = Trainer()
trainer.run(model, 0.1)
globals().update(vars(trainer))
"""
PEFT = """
peft = pytest.importorskip("peft")
batch = {"input_ids": torch.randint(40, (4, 6)), "labels": torch.tensor([0, 1, 2, 0])}
model = bert()
model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], r=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LIGHTNING = """
lightning = pytest.importorskip("lightning")
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = bert()

    def training_step(self, batch):
        loss = self.model(**batch).loss
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer
module = Module()
model = module.model
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_steps=4, accumulate_grad_batches=2, accelerator="cpu", **options)
trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=4))
globals().update(vars(module))
"""
TIMM = """
import argparse
def main(args):
    model = ZOO["timm look-alike"].build()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        **args.opt_kwargs,
    )
    for _ in range(4):
        model(torch.randn(2, 5, 16)).square().mean().backward()
        optimizer.step()
    return locals()
args = argparse.Namespace(opt_kwargs={"lr": 1e-2, "weight_decay": 0.05})
globals().update(main(args))
"""


class Attention(nn.Module):
    """Causal attention with nanoGPT's names."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(16, 48), nn.Linear(16, 16), 2

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.c_proj(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """One layer, and groups of weights with and without decay, as nanoGPT and minGPT make them."""

    def __init__(self, tied):
        super().__init__()
        mlp = OrderedDict(c_fc=nn.Linear(16, 64), gelu=nn.GELU(), c_proj=nn.Linear(64, 16))
        block = OrderedDict(attn=Attention(), mlp=nn.Sequential(mlp))
        layers = nn.ModuleList([nn.Sequential(block)])
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(40, 16), "h": layers})
        self.lm_head = nn.Linear(16, 40, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, x, y):
        logits = self.lm_head(self.transformer.h[0](self.transformer.wte(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self, decay, rate=1e-2, betas=(0.9, 0.95), device_type="cpu"):
        weights = [weight for weight in self.parameters() if weight.dim() > 1]
        groups = [{"params": weights, "weight_decay": decay}]
        groups += [{"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)


class OwnLoss(hf.Trainer):
    """A trainer that computes its loss without the model's, as those of TRL and others do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = F.cross_entropy(model(inputs["input_ids"]).logits, inputs["labels"])
        return (loss, {}) if return_outputs else loss


ROWS = [{"input_ids": torch.arange(6) + at, "labels": at % 3} for at in range(32)]
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "max_position_embeddings": 16, "num_labels": 3}  # fmt: skip
"""Script, class of the Trainer that the script has made, micro-batches."""
SCRIPTS = {
    "run_glue": (RUN, hf.Trainer, 8),
    "run_clm": (RUN, hf.Trainer, 8),
    "nanoGPT": (NANOGPT, None, 8),
    "minGPT": (MINGPT, None, 4),
    "TRL": (TRAIN, OwnLoss, 8),
    "PEFT": (PEFT, None, 4),
    "sentence-transformers": (TRAIN, OwnLoss, 8),
    "Lightning": (LIGHTNING, None, 8),
    "timm": (TIMM, None, 4),
}


def get_batch():
    return torch.randint(40, (4, 6)), torch.randint(40, (4, 6))


def bert():
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES))


def patched(script, block):
    """Apply a block of the page, whose hunks must each fit one place, like ``patch``."""
    for hunk in block.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        assert script.count(f"\n{old}") == 1, old
        script = script.replace(old, new)
    return script


def run(script, trainer, folder):
    torch.manual_seed(0)
    names = {"torch": torch, "wp": wp, "pytest": pytest, "GPT": GPT, "get_batch": get_batch}
    names |= {"bert": bert, "model": bert(), "ROWS": ROWS, "ZOO": ZOO, "checkpoint": None}
    if trainer:
        names["training_args"] = hf.TrainingArguments(
            str(folder), do_train=True, max_steps=4, learning_rate=1e-2, weight_decay=0.1, use_cpu=True,
            gradient_accumulation_steps=2, per_device_train_batch_size=4, save_strategy="no",
        )  # fmt: skip
        names["trainer"] = trainer(names["model"], names["training_args"], train_dataset=ROWS)
    exec(script, names)
    return names


def test_every_block_of_the_page_has_its_loop():
    assert BLOCKS.keys() == SCRIPTS.keys()
    assert PAGE.read_text("utf-8").count("```diff") == len(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_lines_of_the_page_do_what_they_say(name, tmp_path, caplog):
    script, trainer, batches = SCRIPTS[name]
    plain = run(script, trainer, tmp_path)
    with caplog.at_level(logging.INFO):
        changed = run(patched(script, BLOCKS[name]), trainer, tmp_path)
    pairs = zip(plain["model"].parameters(), changed["model"].parameters(), strict=True)
    assert any(not torch.equal(before, after) for before, after in pairs)
    if handle := changed.get("handle"):
        assert handle.error().worst < 1e-5
        assert caplog.text.count("weight decay is left out") == ("spectral" not in BLOCKS[name])
    if penalty := changed.get("penalty"):
        assert penalty.step == batches
        total = sum(penalty.terms().values())
        penalty.rebind(plain["model"])
        penalty()
        assert total < sum(penalty.terms().values())
    if monitor := changed.get("monitor"):
        assert monitor.steps == 4
    assert {"handle", "penalty", "monitor"} & changed.keys()
