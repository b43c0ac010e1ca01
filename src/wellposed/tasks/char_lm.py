"""Task ``char_lm``: predict the next character of a text; nats and bits per character."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from wellposed.errors import ConfigError, DataError
from wellposed.tasks.batches.batching import bucketed_batches, shuffle_key
from wellposed.tasks.task import SPLITS, TASKS, Example, Kind, Split, Task, TaskSpec
from wellposed.tasks.text.spaced import looks_spaced, unspace

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from wellposed.tasks.batches.blocks import BlockDataset
    from wellposed.tasks.data.files import TextFile

SUFFIXES = (".txt", ".text", ".raw", ".tokens", ".md")
VALID_SHARE = TEST_SHARE = 0.05


@dataclass(frozen=True)
class CharLMOptions:
    """Options of the task `char_lm`."""

    data: str = "builtin"
    """builtin (English prose that ships with Python), a text file (.gz too), a folder, or hf:name[:config]."""
    valid: str | None = None
    """Text file of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """Text file of the test split; found beside the train file, or cut from it, where not given."""
    format: Literal["auto", "plain", "spaced"] = "auto"
    """spaced has a space between characters and _ for a space, as in Penn Treebank; auto looks at the first lines."""
    seq_len: int = 256
    """Tokens in a block, of which all but the first are predicted."""
    limit_chars: int | None = None
    """Keep only the first characters of the train text."""


class CharLMTask(Task):
    """Next-character prediction, each character of a split predicted once from the characters before it in its block.

    ``nats_per_char`` is the mean of -ln p over all characters but the first of the split; ``bits_per_char`` is that
    over ln 2. The context restarts at every block, so the numbers are upper bounds on those of a longer context.
    A character that train does not hold becomes the unknown token, is predicted like any other and is counted in the
    description. Train blocks are cut at an offset drawn by (seed, epoch).

    Not for comparing with published numbers of models that carry their state over the whole text: give those a context
    as long as theirs with ``seq_len``.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("char_lm", {"limit_chars": 5000, "seq_len": 100})
    >>> task.collate([task.dataset("train")[0]])["input_ids"].shape
    torch.Size([1, 100])
    """

    name: ClassVar[str] = "char_lm"
    kind: ClassVar[Kind] = "causal_lm"
    headline: ClassVar[str] = "nats_per_char"
    higher_is_better: ClassVar[bool] = False

    def __init__(self, options: CharLMOptions) -> None:
        from wellposed.tasks.batches.blocks import BlockDataset
        from wellposed.tasks.text.tokenizers import CharacterEncoder

        self.options = options
        texts, self._source = load_texts(options)
        full_train = len(texts["train"])
        if options.limit_chars is not None:
            if options.limit_chars < 2:
                raise ConfigError(f"limit_chars = {options.limit_chars}, expected at least 2")
            texts["train"] = texts["train"][: options.limit_chars]
        self._characters = {split: len(texts[split]) for split in SPLITS}
        self._limited = full_train - len(texts["train"])
        self._encoder = CharacterEncoder(set(texts["train"]))
        encoded = {split: self._encoder.encode([texts[split]]) for split in SPLITS}
        self._unknown = {split: encoded[split].unknown_description() for split in SPLITS}
        self._blocks = {
            split: BlockDataset(encoded[split].ids.flat, seq_len=options.seq_len, where=f"{options.data} ({split})")
            for split in SPLITS
        }

    def _build_tokenizer(self) -> PreTrainedTokenizerFast:
        return self._encoder.tokenizer(max_length=self.options.seq_len)

    def model_kwargs(self) -> dict[str, Any]:
        return {
            "vocab_size": self._encoder.vocab_size,
            "max_position_embeddings": self.options.seq_len,
            "pad_token_id": self._encoder.pad_id,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def dataset(self, split: Split) -> BlockDataset:
        return self._blocks[split]

    def lengths(self, split: Split) -> Sequence[int]:
        from wellposed.tasks.batches.blocks import BlockLengths

        return BlockLengths(self._blocks[split])

    def batches(self, split: Split, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        blocks, key = self._blocks[split], shuffle_key(split, seed, epoch)
        offset = random.Random(f"offset/{key}").randrange(blocks.num_offsets) if split == "train" else 0
        return bucketed_batches(self.lengths(split), batch_size, shuffle=key, indices=blocks.indices(offset))

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        from wellposed.tasks.batches.collate import collate_causal_lm

        return collate_causal_lm(examples, pad_id=self._encoder.pad_id)

    def loss_sum(
        self, logits: Tensor, batch: Mapping[str, Tensor], *, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        from wellposed.tasks.kinds.objectives import causal_cross_entropy_sum

        return causal_cross_entropy_sum(logits, batch["labels"], label_smoothing=label_smoothing)

    def metric_sums(self, logits: Tensor, batch: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        from wellposed.tasks.kinds.objectives import causal_cross_entropy_sum

        total, count = causal_cross_entropy_sum(logits.detach(), batch["labels"])
        return {"nats_per_char": (float(total), float(count))}

    def summarize(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        total, count = totals["nats_per_char"]
        nats = total / count
        return {"nats_per_char": nats, "bits_per_char": nats / math.log(2)}

    def reference(self) -> dict[str, float]:
        """Return the entropy of valid's own character frequencies: no predictor that ignores context is below it."""
        import numpy as np

        counts = np.bincount(self._blocks["valid"].tokens[1:])
        shares = counts[counts > 0] / counts.sum()
        nats = float(-(shares * np.log(shares)).sum())
        return {"nats_per_char": nats, "bits_per_char": nats / math.log(2)}

    def description(self) -> dict[str, Any]:
        return {
            "task": self.name,
            **self._source,
            "tokenizer": self._encoder.description(),
            "characters": self._characters,
            "train_characters_left_out_by_limit_chars": self._limited,
            "unknown_characters": self._unknown,
            "seq_len": self.options.seq_len,
            "blocks": {split: len(self._blocks[split]) for split in SPLITS},
            "predicted": "every character of a split but its first, once; context restarts at every block",
        }


def load_texts(options: CharLMOptions) -> tuple[dict[Split, str], dict[str, Any]]:
    """Return the text of each split and the description of where it came from."""
    if options.data == "builtin":
        return _load_builtin(options)
    if options.data.startswith("hf:"):
        return _load_hub(options)
    from wellposed.tasks.data.files import find_split_files, read_text

    found = find_split_files(options.data, valid=options.valid, test=options.test, suffixes=SUFFIXES)
    files: dict[Split, TextFile] = {split: read_text(path) for split, path in found.paths.items()}
    texts: dict[Split, str] = {}
    spaced: list[str] = []
    for split, file in files.items():
        is_spaced = options.format == "spaced" or (options.format == "auto" and looks_spaced(file.text))
        texts[split] = unspace(file.text, str(file.path)) if is_spaced else file.text
        spaced += [split] if is_spaced else []
    described: dict[str, Any] = {
        "source": options.data,
        "files": {split: file.description() for split, file in files.items()},
        "splits": found.how,
    }
    if spaced:
        described["spaced_format"] = f"space between characters removed, _ read as a space, in: {', '.join(spaced)}"
    return _cut_missing(texts, described, options.data)


def _load_builtin(options: CharLMOptions) -> tuple[dict[Split, str], dict[str, Any]]:
    given = [name for name in ("valid", "test") if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"option {' and '.join(given)} needs data=FILE; builtin prose brings its own splits")
    from wellposed.tasks.data.prose import GENERATOR_VERSION, gather_prose

    prose = gather_prose()
    described: dict[str, Any] = {
        "source": "builtin: documentation topics and library docstrings of CPython",
        "python": prose.python,
        "sha256": prose.sha256,
        "documents": prose.documents,
        "missing_modules": list(prose.missing_modules),
        "generator_version": GENERATOR_VERSION,
    }
    return _cut_missing({"train": prose.text}, described, "builtin prose")


def _load_hub(options: CharLMOptions) -> tuple[dict[Split, str], dict[str, Any]]:
    from wellposed.tasks.data.files import load_hub_dataset

    texts: dict[Split, str] = {}
    fingerprints: dict[Split, Any] = {}
    for split, rows in load_hub_dataset(options.data).items():
        if "text" not in rows.column_names:
            raise DataError(f"{options.data} ({split}): no column 'text'; it has {', '.join(rows.column_names)}")
        lines = rows["text"]
        texts[split] = "".join(line if line.endswith("\n") else line + "\n" for line in lines)
        fingerprints[split] = {"rows": len(rows), "fingerprint": getattr(rows, "_fingerprint", None)}
    return _cut_missing(texts, {"source": options.data, "files": fingerprints, "splits": "published"}, options.data)


def _cut_missing(
    texts: dict[Split, str], described: dict[str, Any], where: str
) -> tuple[dict[Split, str], dict[str, Any]]:
    """Cut the splits that have no text from the end of train: contiguous, valid before test, 5 % of train each."""
    train, total = texts["train"], len(texts["train"])
    shares: dict[Split, float] = {"valid": VALID_SHARE, "test": TEST_SHARE}
    missing: list[Split] = [split for split in shares if split not in texts]
    if missing and total < 20 * 2:
        raise DataError(f"{where}: {total} characters are too few to cut {' and '.join(missing)} from; expected >= 40")
    end = total
    for split in reversed(missing):
        start = end - round(total * shares[split])
        texts[split] = train[start:end]
        end = start
    texts["train"] = train[:end]
    if missing:
        described = {**described, "cut_from_train": {split: f"contiguous {shares[split]:.0%}" for split in missing}}
    return texts, described


TASKS.register("char_lm")(
    TaskSpec("char_lm", CharLMOptions, CharLMTask, "predict the next character of a text (nats per character)")
)
