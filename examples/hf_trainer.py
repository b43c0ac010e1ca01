"""Train a classifier of Hugging Face with its Trainer, then count the words that its answers hold against.

    python examples/hf_trainer.py --use_cpu
    torchrun --nproc_per_node 2 examples/hf_trainer.py --fsdp

The options are those of the Trainer. A penalty pulls the query and key weights towards orthogonal ones, a
constraint keeps the feed-forward weights below a spectral norm, and a monitor looks at what trains.

Under `--fsdp` (FSDP2, a GPU for each process; on CPUs accelerate takes DDP) penalty and constraint compute
what one process computes, and the monitor measures weights. Refused by name: its vital signs, of which each
process would see a part, and `penalty.accumulate_()`. The model is saved whole, and one process certifies it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import wellposed as wp
from wellposed.words import WordCertificate, read_in_windows

GOALS = ["they win the goal", "goal win win late goal", "a late goal and we win the cup"]
OIL = ["oil and bank prices", "the bank sells oil", "prices of oil at the bank fall"]
TEXTS, LABELS = [*GOALS, *OIL] * 8, [0, 0, 0, 1, 1, 1] * 8


@dataclass
class Arguments(TrainingArguments):
    """Options of the Trainer, with defaults of our own."""

    output_dir: str | None = field(default_factory=tempfile.mkdtemp)
    learning_rate: float = 3e-3
    max_steps: int = 60
    save_strategy: str = "no"
    report_to: str | None = "none"
    disable_tqdm: bool | None = True
    # Without it accelerate shards the embeddings of a BERT twice, and stops.
    fsdp_config: dict[str, Any] | str | None = field(
        default_factory=lambda: {"transformer_layer_cls_to_wrap": ["BertLayer"]}
    )


class WellPosed(TrainerCallback):
    """Constrain and watch the weights that the optimizer steps, which are there when training begins."""

    def on_train_begin(self, args: TrainingArguments, *_: Any, **now: Any) -> None:
        """Put the constraint and the monitor on."""
        model, optimizer = now["model"], now["optimizer"]
        chosen = ("feedforward_in", "feedforward_out")
        self.handle = wp.constrain_(model, optimizer, where=chosen, to="spectral", bound=2.0)
        self.monitor = wp.Monitor(model, optimizer, every=20, vitals=not args.fsdp)
        self.largest = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Ask the monitor once a step; it answers at every 20th."""
        measured = self.monitor.step()
        sizes = [measured[name] for name in measured if name.endswith("/sigma_max")]
        self.largest = max(sizes, default=self.largest)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take the hooks off; the weights are plain parameters."""
        self.error = self.handle.error().worst
        self.handle.remove()
        self.monitor.remove()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words of our texts."""
    words = dict.fromkeys(["[PAD]", "[UNK]", *" ".join(TEXTS).split()])
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", model_max_length=32
    )


def main() -> None:
    """Train, save, certify."""
    [arguments] = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    tokenizer = word_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), num_hidden_layers=2, num_labels=2, **sizes)
    # One word at a time: this gives a certificate in words whatever reads it.
    model = read_in_windows(BertForSequenceClassification(config), tokenizer, TEXTS, words=1)
    encode = WordCertificate(model, tokenizer).encode
    rows = [{"input_ids": ids, "labels": n} for ids, n in zip(encode(TEXTS), LABELS, strict=True)]

    watch, collate = WellPosed(), DataCollatorWithPadding(tokenizer)
    trainer = Trainer(model, arguments, collate, rows, callbacks=[watch])
    penalty = wp.OrthogonalityPenalty(model, query=0.1, key=0.1)
    penalty.attach(trainer)
    trainer.train()

    trainer.save_model()  # under FSDP all processes give their shares
    if trainer.is_world_process_zero():
        print(f"penalty {sum(penalty.terms().values()):.4f}, error of the set {watch.error:.1e}")
        print(f"largest weight {watch.largest:.2f}, alarms {len(watch.monitor.alarms)}")
        loaded = AutoModelForSequenceClassification.from_pretrained(arguments.output_dir)
        certificate = WordCertificate(loaded, tokenizer)
        print(certificate.accuracy(TEXTS[:6], LABELS[:6], replaced=(1, 2)).table())


if __name__ == "__main__":
    main()
