"""A penalty attached to a Trainer leaves its loss what it was: many trainers' losses, each beside a loop
of plain PyTorch."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from transformers.trainer_callback import TrainerCallback

import wellposed as wp

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TOKENS, LENGTH, ROWS = 40, 7, 8
SIZES = {"vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "max_position_embeddings": 16}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MIXED = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 1}
SEQ2SEQ = {"vocab_size": TOKENS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16,
           "dropout": 0.0, "pad_token_id": 1, "decoder_start_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
           "forced_eos_token_id": 2}  # fmt: skip


def drawn(labels):
    """Rows with ``labels`` of a row's number and its tokens."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, TOKENS, (ROWS, LENGTH), generator=draw).tolist()
    return [{"input_ids": row, "labels": labels(n, row)} for n, row in enumerate(ids)]


def classes(number, row):
    return number % 3


def tokens(number, row):
    """The row's own tokens, of which some are left out: not as many in each row."""
    return [-100 if place < number % 3 else token for place, token in enumerate(row)]


def numbers(number, row):
    return -100.0 if number == 2 else sum(row) / 100


# What a loop of plain PyTorch takes the gradient of: the loss of one of ``count`` micro-batches, where
# ``items`` labels are counted in all.


def own(model, batch, items, count):
    """The model's own loss; what the model is told of the count is the Trainer's."""
    return model(**batch, num_items_in_batch=items).loss


def smoothed(model, batch, items, count):
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="sum", label_smoothing=0.1) / items


def cross_entropy(model, batch, items, count):
    """BERT takes the mean of a micro-batch, and the Trainer adds these up."""
    return F.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def squares(model, batch, items, count):
    return (model(input_ids=batch["input_ids"]).logits[:, 0] - batch["labels"]).square().mean()


def next_tokens(model, batch, items, count):
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    logits = logits.float()  # as transformers has it
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / items


def margin(outputs, labels, num_items_in_batch):
    return F.multi_margin_loss(outputs.logits, labels, reduction="sum") / num_items_in_batch


def own_margin(model, batch, items, count):
    return margin(model(input_ids=batch["input_ids"]), batch["labels"], items)


class Preferring(hf.Trainer):
    """A trainer with a loss and metrics of its own, the mean of a micro-batch, as those of TRL."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = preference(model, inputs)
        self.margins = [*getattr(self, "margins", []), float(loss.detach())]
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *rest):
        super().log({**logs, "margin": sum(self.margins)}, *rest)


def preference(model, batch):
    outputs = model(input_ids=batch["input_ids"])
    chosen, rejected = outputs.logits[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean(), outputs


def own_preference(model, batch, items, count):
    return preference(model, batch)[0] / count


class Sentences(nn.Module):
    """A model that returns no loss and takes no keywords of one, as sentence-transformers have."""

    def __init__(self):
        super().__init__()
        self.body = hf.BertModel(hf.BertConfig(**SIZES, **QUIET), add_pooling_layer=False)

    def forward(self, input_ids):
        return self.body(input_ids).last_hidden_state.mean(1)


class Contrasting(hf.Trainer):
    """The loss is of embeddings, and evaluation has no other output."""

    def prediction_step(self, model, inputs, *_, **__):
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = contrast(model, inputs)
        return (loss, {}) if return_outputs else loss


def contrast(model, batch):
    left, right = F.normalize(model(batch["input_ids"]), dim=-1).chunk(2)
    return F.cross_entropy(20 * left @ right.mT, torch.arange(len(left)))


def own_contrast(model, batch, items, count):
    return contrast(model, batch) / count


def adapted():
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    return peft.get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), config)


@dataclass
class Row:
    build: Any
    labels: Any
    loss: Any = own
    trainer: Any = hf.Trainer
    given: dict = field(default_factory=dict)  # of the Trainer
    arguments: dict = field(default_factory=dict)  # of TrainingArguments
    strengths: dict = field(default_factory=dict)
    shift: bool = False  # whether the Trainer counts labels without the first
    keys: tuple = ("key", "k_proj")


def bert(kind, **more):
    return lambda: kind(hf.BertConfig(**SIZES, **QUIET, **more))


GPT2 = {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
CLASSES = bert(hf.BertForSequenceClassification, num_labels=3)
TABLE = {
    "classes": Row(CLASSES, classes, cross_entropy),
    "regression": Row(bert(hf.BertForSequenceClassification, num_labels=1), numbers, squares),
    "tokens": Row(bert(hf.BertForTokenClassification, num_labels=TOKENS), tokens),
    "masked": Row(bert(hf.BertForMaskedLM), tokens),
    "smoothed": Row(CLASSES, classes, smoothed, arguments={"label_smoothing_factor": 0.1}),
    "loss function": Row(CLASSES, classes, own_margin, given={"compute_loss_func": margin}),
    "preferences": Row(CLASSES, classes, own_preference, Preferring),
    "sentences": Row(Sentences, classes, own_contrast, Contrasting, arguments={"label_names": []}),
    "gpt2": Row(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), tokens, next_tokens),
    "llama": Row(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), tokens, next_tokens, shift=True),
    "mixtral": Row(lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, **MIXED, output_router_logits=True,
                   router_aux_loss_coef=0.5,
                   experts_implementation="eager")), tokens, shift=True),
    "lora": Row(adapted, tokens, next_tokens, shift=True, strengths={"query": 0.3, "adapters": True}),
    "bart": Row(lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ)), tokens,
                trainer=hf.Seq2SeqTrainer),
    "marian": Row(lambda: hf.MarianMTModel(hf.MarianConfig(**SEQ2SEQ)), tokens, trainer=hf.Seq2SeqTrainer),
}  # fmt: skip
HEAVY = ("masked", "marian")
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n in HEAVY else n for n in TABLE]


class Gradients(TrainerCallback):
    """Keep the first gradient the optimizer is given."""

    seen = None

    def on_pre_optimizer_step(self, args, state, control, **now):
        named = now["model"].named_parameters()
        self.seen = self.seen or {n: p.grad.clone() for n, p in named if p.grad is not None}


def model_of(row):
    torch.manual_seed(0)
    return row.build().double().train()


def trainer_of(folder, row, model, accumulation, **changes):
    """A trainer that keeps the batches of its training in ``batches``."""
    settings = {
        "max_steps": 1, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "max_grad_norm": 0.0, "seed": 3,
        "per_device_train_batch_size": ROWS // accumulation, "gradient_accumulation_steps": accumulation,
        "remove_unused_columns": False,
    }  # fmt: skip
    arguments = (
        hf.Seq2SeqTrainingArguments if row.trainer is hf.Seq2SeqTrainer else hf.TrainingArguments
    )
    batches, rows = [], drawn(row.labels)

    def collated(examples):
        batch = {name: torch.tensor([each[name] for each in examples]) for name in examples[0]}
        if batch["labels"].is_floating_point():
            batch["labels"] = batch["labels"].double()
        batches.append(dict(batch))
        return batch

    arguments = arguments(str(folder), **{**settings, **row.arguments, **changes})
    trainer = row.trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collated, **row.given
    )
    trainer.batches = batches
    return trainer


def key_penalty(model, row):
    """The penalty by its definition: |W W^T - I|_F^2 of what computes the keys (or, with LoRA, the
    queries), 0.3 times."""
    found = 0.0
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if row.strengths and last == "q_proj":
            factors = module.lora_B["default"].weight @ module.lora_A["default"].weight
            weight = module.base_layer.weight + module.scaling["default"] * factors
        elif not row.strengths and last in ("key", "k_proj") and "encoder_attn" not in name:
            weight = module.weight
        elif last == "c_attn":
            weight = module.weight[:, 16:32].T
        else:
            continue
        found = found + 0.3 * (weight @ weight.T - torch.eye(len(weight)).double()).square().sum()
    return found


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_that_of_a_plain_loop_and_one_penalty(name, accumulation, tmp_path):
    row = TABLE[name]
    model, plain = model_of(row), model_of(row)
    strengths = row.strengths or {"key": 0.3}
    penalty = wp.OrthogonalityPenalty(model, **strengths, form="gram_squared")
    trainer = trainer_of(tmp_path, row, model, accumulation)
    gradients = Gradients()
    trainer.add_callback(gradients)
    penalty.attach(trainer)
    trainer.train()

    items = sum(b["labels"][..., 1 if row.shift else 0 :].ne(-100).sum() for b in trainer.batches)
    assert len(trainer.batches) == accumulation
    parts = [row.loss(plain, batch, items, accumulation) for batch in trainer.batches]
    added = key_penalty(plain, row)
    assert added > 0.1
    loss = sum(parts) + added
    loss.backward()
    logged = trainer.state.log_history[0]["loss"]
    # The Trainer adds losses up in float32.
    assert logged == pytest.approx(loss.item(), rel=1e-6)
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert gradients.seen.keys() == expected.keys()
    for parameter, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            gradients.seen[parameter], gradient, rtol=1e-9, atol=1e-9 * scale + 1e-12
        )


@pytest.mark.parametrize("name", NAMES)
def test_at_strength_0_every_number_is_the_plain_trainers(name, tmp_path):
    row, logs, ends = TABLE[name], [], []
    for is_attached in (False, True):
        model = model_of(row).float()
        trainer = trainer_of(
            tmp_path, row, model, 2, max_steps=3, eval_strategy="steps", eval_steps=1
        )
        if is_attached:
            strengths = {key: (lambda step: 0.0) if key in ("key", "query") else value
                         for key, value in (row.strengths or {"key": 1.0}).items()}  # fmt: skip
            penalty = wp.OrthogonalityPenalty(model, **strengths, form="paper")
            penalty.attach(trainer)
        trainer.train()
        clocks = ("_runtime", "_per_second")
        logs.append(
            [
                {n: v for n, v in each.items() if not n.endswith(clocks)}
                for each in trainer.state.log_history
            ]
        )
        ends.append(model.state_dict())
    assert penalty.step == 6
    assert logs[0] == logs[1]
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())
