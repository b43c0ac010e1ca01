"""The Trainer of Hugging Face as an oracle: over the same batches, loss and optimizer it ends at the
same weights as our loop, bit for bit."""

import copy

import pytest
import torch
from tests.support.films import write_films
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments

from wellposed.model_options import ModelOptions
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.config import ConstrainOptions, PenaltyOptions, RunConfig, TrainOptions
from wellposed_lab.training.loop import build
from wellposed_lab.training.loop.batches import MicroBatches, model_inputs
from wellposed_lab.training.loop.penalties import build_penalty
from wellposed_lab.training.loop.schedules import learning_rate
from wellposed_lab.training.loop.train import train

STEPS = 7
MODEL = ModelOptions(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, dropout=0.0)
CASES = {
    "adamw": {},
    "accumulation": {"gradient_accumulation": 2, "schedule": "linear", "warmup_steps": 2},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.1, "schedule": "cosine", "label_smoothing": 0.1},
    "held": {"weight_decay": 0.1, "max_grad_norm": 0.1},
}
HELD = {
    "penalty": PenaltyOptions(query=0.1, form="gram"),
    "constrain": ConstrainOptions(where="key"),
}


class OurBatches(Trainer):
    """A Trainer that is given our micro-batches."""

    def __init__(self, task, options, penalty, **keywords):
        self.task = task
        self.options = options
        self.penalty = penalty
        super().__init__(train_dataset=[0], compute_loss_func=self.mean_loss, **keywords)

    def get_train_dataloader(self):
        stream = MicroBatches(self.task, self.options.batch_size, self.options.seed)
        return stream.take(STEPS * self.options.gradient_accumulation)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(**model_inputs(model, inputs)).logits
        return self.mean_loss(logits, inputs, num_items_in_batch)

    def mean_loss(self, logits, batch, targets):
        smoothing = self.options.label_smoothing
        loss = self.task.loss_sum(logits, batch, label_smoothing=smoothing)[0] * (1 / int(targets))
        return loss if self.penalty is None else loss + self.penalty()


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_ends_at_the_same_weights(name, tmp_path):
    table = write_films(tmp_path / "train.tsv")
    data = {"data": str(table), "max_length": 8}
    more = {"steps": STEPS, "batch_size": 4, "eval_every": STEPS, "checkpoint_every": STEPS}
    options = TrainOptions(**{**more, **CASES[name]})
    config = RunConfig("text_classification", data, model=MODEL, train=options)
    config = RunConfig(**{**vars(config), **(HELD if name == "held" else {})})
    task = build_task(config.task, config.task_options)
    torch.manual_seed(0)
    first = build.build_run_model(config, task)
    ours = copy.deepcopy(first)
    theirs = copy.deepcopy(first)
    done = train(config, tmp_path / "run", task=task, model=lambda *_: ours, progress=False)
    assert done.status == "success"

    penalty = build_penalty(config.penalty, theirs)
    weights = build.constrained_weights(config.constrain, theirs)
    # A rate of 1, so that the factor of the schedule is the rate itself.
    one = TrainOptions(**{**vars(options), "learning_rate": 1.0})
    optimizer = build.build_optimizer(theirs, one, constrained=weights)
    build.build_constraint(config.constrain, theirs, optimizer)
    schedule = LambdaLR(optimizer, lambda step: learning_rate(step + 1, options, 16))
    arguments = TrainingArguments(
        str(tmp_path / "theirs"),
        max_steps=STEPS,
        gradient_accumulation_steps=options.gradient_accumulation,
        max_grad_norm=options.max_grad_norm,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    keywords = {"model": theirs, "args": arguments, "optimizers": (optimizer, schedule)}
    trainer = OurBatches(task, options, penalty, **keywords)
    trainer.train()
    assert trainer.state.global_step == STEPS
    expected = theirs.state_dict()
    moved = [name for name, value in first.state_dict().items() if not value.equal(expected[name])]
    assert moved
    assert [
        name for name, value in ours.state_dict().items() if not value.equal(expected[name])
    ] == []
