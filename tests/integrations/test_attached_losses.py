"""A penalty attached to a Trainer leaves its loss what it was: many trainers' losses, each beside a loop
of plain PyTorch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import wellposed as wp
from wellposed.errors import ConfigError

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TOKENS = 40
LENGTH = 7
ROWS = 8
SIZES = {"vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "max_position_embeddings": 16}  # fmt: skip
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
MIXTRAL = {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 1,
           "output_router_logits": True, "router_aux_loss_coef": 0.5, "experts_implementation": "eager"}  # fmt: skip
SEQ2SEQ = {"vocab_size": TOKENS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16,
           "dropout": 0.0, "pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2,
           "forced_eos_token_id": 2}  # fmt: skip


def own_loss(model, batch, items, count):
    """The model's own loss of one of ``count`` micro-batches, of ``items`` labels in all."""
    return model(**batch, num_items_in_batch=items).loss


def next_tokens(model, batch, items, count):
    logits = model(batch["input_ids"]).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / items


def smoothed(model, batch, items, count):
    logits = model(batch["input_ids"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="sum", label_smoothing=0.1) / items


def margin(outputs, labels, num_items_in_batch):
    return F.multi_margin_loss(outputs.logits, labels, reduction="sum") / num_items_in_batch


def margins(model, batch, items, count):
    return margin(model(batch["input_ids"]), batch["labels"], items)


def contrast(model, batch, items=None, count=1):
    """The mean of a micro-batch, of embeddings or logits, as sentence-transformers and TRL have."""
    left, right = model(batch["input_ids"])[0].flatten(1).chunk(2)
    return F.cross_entropy(left @ right.mT, torch.arange(len(left))) / count


class Contrasting(hf.Trainer):
    """A trainer with a loss and metrics of its own."""

    summed = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = contrast(model, inputs)
        self.summed += loss.item()
        return (loss, {}) if return_outputs else loss

    def log(self, logs, *rest):
        super().log({**logs, "contrast": self.summed}, *rest)


class Scaled(Contrasting):
    """The same of a model that takes keywords of a loss, so the trainer has to say what it does."""

    loss_is_scaled_for_ga = False


class Sentences(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = hf.BertModel(hf.BertConfig(**BERT), add_pooling_layer=False)

    def forward(self, input_ids):
        return (self.body(input_ids).last_hidden_state.mean(1),)


def classes(number, row):
    return number % 3


def tokens(number, row):
    """The row's own tokens, of which some are left out: not as many in each row."""
    return [-100 if position < number % 3 else token for position, token in enumerate(row)]


def numbers(number, row):
    return -100.0 if number == 2 else sum(row) / 100


class Row(NamedTuple):
    build: Any
    labels: Any = tokens
    loss: Any = own_loss
    trainer: Any = hf.Trainer
    options: dict = {}  # noqa: RUF012
    arguments: dict = {}  # noqa: RUF012
    shift: bool = False  # whether the Trainer counts labels without the first


def lora():
    config = peft.LoraConfig(target_modules=["k_proj"], r=2, init_lora_weights=False)
    return peft.get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), config)


def of_bert(kind, labels=3):
    return lambda: kind(hf.BertConfig(**BERT, num_labels=labels))


UNLABELLED = {"label_names": ["input_ids"], "remove_unused_columns": False}
CLASSES = of_bert(hf.BertForSequenceClassification)
SEQ = {"trainer": hf.Seq2SeqTrainer}
TABLE = {
    "classes": Row(CLASSES, classes),
    "regression": Row(of_bert(hf.BertForSequenceClassification, 1), numbers),
    "tokens": Row(of_bert(hf.BertForTokenClassification, TOKENS)),
    "masked": Row(of_bert(hf.BertForMaskedLM)),
    "smoothed": Row(CLASSES, classes, smoothed, arguments={"label_smoothing_factor": 0.1}),
    "loss function": Row(CLASSES, classes, margins, options={"compute_loss_func": margin}),
    "sentences": Row(Sentences, classes, contrast, Contrasting, arguments=UNLABELLED),
    "scaled": Row(CLASSES, classes, contrast, Scaled),
    "gpt2": Row(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), loss=next_tokens),
    "llama": Row(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), loss=next_tokens, shift=True),
    "mixtral": Row(lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**MIXTRAL)), shift=True),
    "lora": Row(lora, loss=next_tokens, shift=True),
    "bart": Row(lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ)), **SEQ),
    "marian": Row(lambda: hf.MarianMTModel(hf.MarianConfig(**SEQ2SEQ)), **SEQ),
}  # fmt: skip
HEAVY = ("masked", "marian", "tokens")
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in HEAVY)) for name in TABLE]


def trained(folder, row, dtype, accumulation, strength=None, *, scale="step", **changes):
    """A Trainer that has trained, the batches and the gradient of its first step, and the penalty."""
    torch.manual_seed(0)
    model = row.build().to(dtype).train()
    batches = []
    gradients = {}
    penalty = None
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, TOKENS, (ROWS, LENGTH), generator=draw).tolist()
    rows = [
        {"input_ids": text, "labels": row.labels(number, text)} for number, text in enumerate(ids)
    ]

    def collated(some):
        batch = {name: torch.tensor([item[name] for item in some]) for name in some[0]}
        if batch["labels"].is_floating_point():
            batch["labels"] = batch["labels"].to(dtype)
        batches.append(dict(batch))
        return batch

    class Kept(hf.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **now):
            grown = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            gradients.update({} if gradients else grown)

    settings = {"max_steps": 1, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "use_cpu": True,
                "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "max_grad_norm": 0.0,
                "per_device_train_batch_size": ROWS // accumulation, "gradient_accumulation_steps": accumulation,
                "prediction_loss_only": True}  # fmt: skip
    kind = hf.Seq2SeqTrainingArguments if row.trainer is hf.Seq2SeqTrainer else hf.TrainingArguments
    trainer = row.trainer(
        model, kind(str(folder), **{**settings, **row.arguments, **changes}), train_dataset=rows,
        eval_dataset=rows, data_collator=collated, callbacks=[Kept()], **row.options,
    )  # fmt: skip
    if strength is not None:
        penalty = wp.OrthogonalityPenalty(model, key=lambda _: strength, form="gram_squared")
        penalty.attach(trainer, scale=scale)
    trainer.train()
    return trainer, batches, gradients, penalty


def key_penalty(model):
    """0.3 times the penalty by its definition: |W W^T - I|_F^2 of what computes the keys."""
    total = 0.0
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "c_attn":
            weight = module.weight[:, 16:32].T
        elif last not in ("key", "k_proj") or "encoder_attn" in name:
            continue
        elif hasattr(module, "base_layer"):
            factors = module.lora_B["default"].weight @ module.lora_A["default"].weight
            weight = module.base_layer.weight + module.scaling["default"] * factors
        else:
            weight = module.weight
        total = total + 0.3 * (weight @ weight.T - torch.eye(len(weight)).double()).square().sum()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_that_of_a_plain_loop_and_one_penalty(name, accumulation, tmp_path):
    row = TABLE[name]
    trainer, batches, gradients, _ = trained(tmp_path, row, torch.float64, accumulation, 0.3)
    torch.manual_seed(0)
    plain = row.build().double().train()
    items = sum(batch["labels"][..., int(row.shift) :].ne(-100).sum() for batch in batches)
    added = key_penalty(plain)
    assert (len(batches), added > 0.1) == (accumulation, True)
    loss = sum(row.loss(plain, batch, items, accumulation) for batch in batches) + added
    loss.backward()
    # The Trainer adds losses up in float32.
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    bound = 1e-9 * max(float(gradient.abs().max()) for gradient in expected.values())
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_at_strength_0_every_number_is_the_plain_trainers(name, tmp_path):
    results = []
    for strength in (None, 0.0):
        evals = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        trainer, *_, penalty = trained(tmp_path, TABLE[name], torch.float32, 2, strength, **evals)
        logged = [value for row in trainer.state.log_history for value in row.items()]
        clocks = ("_runtime", "_per_second")
        results.append([pair for pair in logged if not pair[0].endswith(clocks)])
        results.append({name: value.tolist() for name, value in trainer.model.state_dict().items()})
    assert results[:2] == results[2:]
    assert penalty.step == 4


MEANS = ("classes", "regression", "tokens", "masked", "bart", "marian")
"""Rows whose loss is a mean, although the Trainer passes the number of labels in a step."""
LIGHT = ("classes", "gpt2")
ALL = [pytest.param(name, marks=[pytest.mark.slow] * (name not in LIGHT)) for name in TABLE]


def warnings_of(caplog):
    return [row.message for row in caplog.records if "relative strength" in row.message]


@pytest.mark.parametrize("name", ALL)
def test_the_scale_of_the_task_adds_as_many_penalties_as_the_trainer_counts_means(
    name, tmp_path, caplog
):
    """The gradient is that of the plain Trainer, and of 4 penalties if it adds 4 means up."""
    row = TABLE[name]
    times = 4 if name in MEANS else 1
    *_, plain, _ = trained(tmp_path, row, torch.float64, 4)
    torch.manual_seed(0)
    model = row.build().double()
    key_penalty(model).backward()
    for scale, penalties in (("step", 1), ("task", times)):
        caplog.clear()
        *_, gradients, _ = trained(tmp_path, row, torch.float64, 4, 0.3, scale=scale)
        warned = warnings_of(caplog)
        assert len(warned) == (times == 4 and scale == "step")
        expected = dict(plain)
        for parameter_name, weight in model.named_parameters():
            if weight.grad is not None:
                added = penalties * weight.grad
                expected[parameter_name] = expected.get(parameter_name, 0) + added
        bound = 1e-9 * max(float(gradient.abs().max()) for gradient in expected.values())
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=bound)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_the_ratio_of_penalty_and_task_is_that_without_accumulation(accumulation, tmp_path, caplog):
    """A step of a BERT classifier is that of one batch, times the number of micro-batches."""
    one, many = (
        trained(tmp_path, TABLE["classes"], torch.float64, count, 0.3, scale="task")[2]
        for count in (1, accumulation)
    )
    expected = {name: accumulation * gradient for name, gradient in one.items()}
    torch.testing.assert_close(many, expected, rtol=1e-9, atol=1e-12)
    assert warnings_of(caplog) == []


def test_the_warning_has_the_numbers_and_is_logged_once(tmp_path, caplog):
    trained(tmp_path, TABLE["classes"], torch.float32, 4, 0.3, max_steps=3)
    (line,) = warnings_of(caplog)
    assert "the loss of BertForSequenceClassification is a mean without num_items" in line
    assert "a step has 4 times the task's gradient and one penalty" in line
    assert "relative strength is 1/4; penalty.attach(trainer, scale='task') keeps the ratio" in line


@pytest.mark.slow
def test_two_processes_count_a_mean_twice_as_often(tmp_path):
    """DDP averages the gradients of losses that the Trainer has multiplied by the processes."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, *launch, "tests.support.accumulated_worker", str(tmp_path)]
    options = {"cwd": Path(__file__).parents[2], "capture_output": True, "text": True}
    done = subprocess.run(command, **options, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    gradients = json.loads((tmp_path / "gradients.json").read_text())
    plain, step, task = (
        torch.tensor(gradients[name]).double() for name in ("None", "step", "task")
    )
    torch.testing.assert_close(task - plain, 4 * (step - plain), rtol=1e-6, atol=1e-9)
    assert "a step has 4 times the task's gradient" in done.stderr


class Unclear(Contrasting):
    """A loss of its own beside a model that takes keywords: nobody knows how it is scaled."""


def test_a_scale_that_cannot_be_known_is_refused_by_name(tmp_path):
    row = Row(CLASSES, classes, contrast, Unclear)
    with pytest.raises(ConfigError, match=r"how Unclear scales its loss.*loss_is_scaled_for_ga"):
        trained(tmp_path, row, torch.float32, 4, 0.3, scale="task")
    trained(tmp_path, row, torch.float32, 1, 0.3, scale="task")
    trained(tmp_path, TABLE["scaled"], torch.float32, 4, 0.3, scale="task")


def test_a_scale_of_another_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="scale"):
        trained(tmp_path, TABLE["classes"], torch.float32, 1, 0.3, scale="tasks")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_compiles_the_model(tmp_path, caplog):
    """A compiled model has a truth value only if the module inside has a length."""
    model = CLASSES()
    options = {"torch_compile": True, "torch_compile_backend": "eager", "use_cpu": True}
    options |= {"max_steps": 2, "report_to": [], "save_strategy": "no"}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    rows = [{"input_ids": [1, 2, 3, 4], "labels": number % 2} for number in range(8)]
    arguments = hf.TrainingArguments(str(tmp_path), **options)
    trainer = hf.Trainer(model, arguments, train_dataset=rows)
    penalty = wp.OrthogonalityPenalty(model, key=0.3)
    penalty.attach(trainer)
    trainer.train()
    assert penalty.step == 4
    (line,) = warnings_of(caplog)
    assert "relative strength is 1/2" in line
