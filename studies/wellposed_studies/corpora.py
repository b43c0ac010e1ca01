"""Sentence pairs of Zhang et al. (2021) and Huang et al. (2020): each corpus as a configuration,
and a generated one.

What a paper prints is taken as printed. What it leaves to its framework (Tensor2Tensor for Zhang,
fairseq for Huang) is that framework's public setting of the name. What neither fixes is named in
``not_printed``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wellposed.compare.named import NAMED
from wellposed.compare.variants import apply_variant
from wellposed.errors import ConfigError, listed
from wellposed.recipes.recipe import Request
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions


class Size(NamedTuple):
    """Layers on each side, width, feed-forward width, heads, dropout."""

    layers: int
    width: int
    feedforward: int
    heads: int
    dropout: float


SIZES = {
    "t2t-small": Size(2, 256, 1024, 4, 0.1),
    "t2t-base": Size(6, 512, 2048, 8, 0.1),
    "t2t-big": Size(6, 1024, 4096, 16, 0.3),
    "fairseq-iwslt": Size(6, 512, 1024, 4, 0.3),
    "fairseq-deep": Size(20, 512, 2048, 8, 0.1),
}
"""The settings by the names the papers use; a corpus may have its own dropout."""


T2T_BEAMS = {
    "generate_beams": 4,
    "generate_length_penalty": 0.6,
    "generate_length_penalty_form": "gnmt",
}
"""How Tensor2Tensor searches, which the paper prints for dialogues: 4 beams and a length penalty of
0.6."""


@dataclass(frozen=True)
class Corpus:
    """One column of a table."""

    name: str
    """Of the preset, without the paper: ``corpus-source-target``, and the size where there are
    several."""
    origin: str
    """Where the sentences come from."""
    size: str
    """Name in `SIZES`."""
    steps: int
    data: str | None = None
    """``hf:`` id that carries train, validation and test; None where the user has to bring aligned
    files."""
    test: str | None = None
    """Where the test split is, if not in ``data``."""
    title: str = ""
    """As the table heads it, where that is not the languages and the size."""
    tokenizer: Literal["bpe", "char"] = "bpe"
    vocab_size: int = 32768
    tokens_per_batch: int = 4096
    """Padded tokens of one micro-batch on one side."""
    accumulation: int = 1
    """Micro-batches of a step."""
    max_tokens: int = 256
    dropout: float | None = None
    learning_rate: float | None = None
    """Start of T-Fixup's inverse square root; Zhang's runs have Tensor2Tensor's warm-up schedule
    instead."""
    bf16: bool = False
    not_printed: str = ""
    """What the paper does not say, and we took."""

    @property
    def src(self) -> str:
        """Source language."""
        return self.name.split("-")[1]

    @property
    def tgt(self) -> str:
        """Target language."""
        return self.name.split("-")[2]

    @property
    def pair(self) -> str:
        """The column as the table heads it."""
        size = self.name.split("-")[3:]
        return self.title or " ".join([f"{self.src.title()}-{self.tgt.title()}", *size])

    def run_config(self) -> RunConfig:
        """Return the run as the paper has it: post-LN with warm-up for Zhang, T-Fixup without for
        Huang."""
        size = SIZES[self.size]
        options: dict[str, Any] = {"src": self.src, "tgt": self.tgt, "tokenizer": self.tokenizer}
        options |= {
            "max_tokens": self.max_tokens,
            "tokens_per_batch": self.tokens_per_batch,
            "overflow": "drop",
        }
        options |= {"vocab_size": self.vocab_size} if self.tokenizer == "bpe" else {}
        options |= {} if self.data is None else {"data": self.data}
        options |= {} if self.test is None else {"test": self.test}
        options |= T2T_BEAMS if self.learning_rate is None else {}
        base = RunConfig(
            task="translation",
            task_options=options,
            variant="post_ln",
            model=ModelOptions(
                hidden_size=size.width,
                num_hidden_layers=size.layers,
                num_attention_heads=size.heads,
                intermediate_size=size.feedforward,
                activation="relu",
                position="sinusoidal",
                dropout=size.dropout if self.dropout is None else self.dropout,
            ),
            train=self._train(),
        )
        return base if self.learning_rate is None else apply_variant("t_fixup", base)

    def _train(self) -> TrainOptions:
        every = max(1, self.steps // 100)
        common = TrainOptions(
            steps=self.steps,
            batch_size=4096,
            gradient_accumulation=self.accumulation,
            label_smoothing=0.1,
            eval_every=every,
            checkpoint_every=every,
            log_every=100,
            precision="bf16" if self.bf16 else "fp32",
        )
        if self.learning_rate is None:
            # Tensor2Tensor: 2 d^-1/2 min(t^-1/2, t w^-3/2) with w = 8000, Adam (0.9, 0.997), no
            # decay, no clipping.
            adam: dict[str, Any] = {"adam_beta2": 0.997, "weight_decay": 0.0, "max_grad_norm": 0.0}
            return replace(common, schedule="kim2021", gamma=2.0, warmup_steps=8000, **adam)
        rest: dict[str, Any] = {
            "weight_decay": 1e-4,
            "max_grad_norm": 25.0,
            "average_checkpoints": 10,
        }
        return replace(
            common,
            schedule="inverse_sqrt",
            learning_rate=self.learning_rate,
            decay_steps=4000,
            **rest,
        )


_TED = "IWSLT'14, WIT3 (TED talks)"
_WMT16 = "WMT'16; the test set is newstest2014, that of WMT'14"
_STANFORD = "IWSLT'15 as Stanford prepared it, 133,000 pairs; valid is tst2012"
_PANL = (
    "IWSLT'17, 109,335 pairs, with the 24,024 of PANL-BPPT as Tensor2Tensor joins them; tst2017plus"
)
_ESTONIAN = (
    "called WMT'17; Estonian is a language of WMT'18, and Tensor2Tensor's problem takes that"
)
_SETIMES = "SETIMES; MULTEXT-East '1984', 4,986 pairs, for evaluation"
_SUBWORD: dict[str, Any] = {"steps": 200_000, "not_printed": "steps (200,000 taken)"}
_CHARACTERS: dict[str, Any] = {
    "size": "t2t-small",
    "steps": 200_000,
    "tokenizer": "char",
    "max_tokens": 1024,
}
_BIG_BATCH: dict[str, Any] = {
    "accumulation": 8,
    "data": "hf:wmt/wmt16:de-en",
    "test": "hf:wmt/wmt14:de-en",
}
SUBWORD = (
    Corpus("iwslt14-de-en", _TED, "t2t-small", **_SUBWORD),
    Corpus("iwslt14-ro-en", _TED, "t2t-small", **_SUBWORD),
    Corpus("iwslt15-en-vi", _STANFORD, "t2t-base", **_SUBWORD),
    Corpus("iwslt17-en-id", _PANL, "t2t-base", **_SUBWORD),
    Corpus("wmt17-en-et", _ESTONIAN, "t2t-base", data="hf:wmt/wmt18:et-en", **_SUBWORD),
    Corpus("setimes-en-mk", _SETIMES, "t2t-base", **_SUBWORD),
)
WMT16 = (
    Corpus("wmt16-en-de-base", _WMT16, "t2t-base", 2_000_000, **_BIG_BATCH),
    Corpus("wmt16-en-de-big", _WMT16, "t2t-big", 800_000, tokens_per_batch=2048, **_BIG_BATCH),
)
_YEAR: dict[str, Any] = {"data": "hf:wmt/wmt14:fr-en", "not_printed": "year of WMT"}
CHARACTERS = (
    Corpus("char-en-fr", "WMT, year not printed (2014 taken)", **_CHARACTERS, **_YEAR),
    Corpus("char-ro-en", _TED, **_CHARACTERS),
    Corpus("char-de-en", "IWSLT'15, WIT3 (TED talks)", **_CHARACTERS),
)


def _huang(title: str, rate: float, dropout: float, **other: Any) -> dict[str, Any]:
    printed = {"title": title, "learning_rate": rate, "dropout": dropout}
    return {**printed, "not_printed": "vocabulary, test set", **other}


_SMALL = _huang("IWSLT'14 De-En small", 5e-4, 0.5, vocab_size=10_000, tokens_per_batch=4000)
_FINNISH = _huang(
    "WMT'18 Fi-En base",
    6e-4,
    0.4,
    data="hf:wmt/wmt18:fi-en",
    tokens_per_batch=4000,
    accumulation=20,
)
_BASE = _huang("WMT'17 En-De base", 7e-4, 0.2)
_DEEP = _huang(
    "WMT'17 En-De deep", 4e-4, 0.4, bf16=True, not_printed="vocabulary, test set, depth (20 taken)"
)
_BIG = _huang("WMT'17 En-De big", 4e-4, 0.4, bf16=True)
_GERMAN: dict[str, Any] = {
    "data": "hf:wmt/wmt17:de-en",
    "tokens_per_batch": 5000,
    "accumulation": 5,
}
HUANG = (
    Corpus("iwslt14-de-en", _TED, "fairseq-iwslt", 300_000, **_SMALL),
    Corpus("wmt18-fi-en", "WMT'18", "t2t-base", 90_000, **_FINNISH),
    Corpus("wmt17-en-de-base", "WMT'17", "t2t-base", 1_000_000, **_BASE, **_GERMAN),
    Corpus("wmt17-en-de-deep", "WMT'17", "fairseq-deep", 500_000, **_DEEP, **_GERMAN),
    Corpus("wmt17-en-de-big", "WMT'17", "t2t-big", 500_000, **_BIG, **_GERMAN),
)
PRESETS = {f"zhang2021-{corpus.name}": corpus for corpus in (*SUBWORD, *WMT16, *CHARACTERS)}
PRESETS |= {f"huang2020-{corpus.name}": corpus for corpus in HUANG}
"""Every corpus by the name of its preset."""
for _name, _corpus in PRESETS.items():
    NAMED.register(_name)(_corpus.run_config)

SOURCE, TARGET = "source", "target"
_LETTERS = "abcdefgh"
_NOT_LANGUAGES = {"tsv", "csv", "jsonl", "txt", "md"}
GENERATED = (
    "below paper scale, walks over eight letters that mostly step by one, to be written backwards"
)


def paper_runs(request: Request, corpora: Sequence[Corpus]) -> list[RunConfig]:
    """Return the paper's run of each corpus; one without an ``hf:`` id is read from the folder of
    its name in the data.

    Raises:
        ConfigError: such a folder is missing; all are named. Or languages are given, which the
        paper fixes.
    """
    if request.languages is not None:
        raise ConfigError(
            f"languages = {request.languages!r} at paper scale: each corpus has its own; leave"
            " them out"
        )
    configs, missing = [], []
    for corpus in corpora:
        config = corpus.run_config()
        if corpus.data is None:
            folder = Path(request.data or ".") / corpus.name
            if request.data is None or not folder.is_dir():
                missing.append(
                    f"{corpus.name}: train, valid, test .{corpus.src} and .{corpus.tgt}"
                    f" ({corpus.origin})"
                )
            config = replace(config, task_options={**config.task_options, "data": str(folder)})
        configs.append(config)
    if missing:
        raise ConfigError(
            "give --data FOLDER with these folders of aligned files in it:\n" + listed(missing)
        )
    return configs


def small_corpus(
    request: Request,
    *,
    max_tokens: int,
    wanted: tuple[str, str] = ("de", "en"),
    vocab_size: int | None = 2000,
) -> dict[str, Any]:
    """Return the options of the task `translation` below paper scale: the user's sentences, or
    generated words."""
    return {
        **translation_data(
            request,
            wanted=wanted,
            words=True,
            pairs=request.pick(toy=60, mini=3000, medium=20_000, paper=0),
        ),
        "max_tokens": max_tokens,
        "overflow": "drop",
        "limit_pairs": request.pick(toy=6000, mini=6000, medium=100_000, paper=0),
        "generate_beams": 1,
        "generate_max_examples": request.pick(toy=4, mini=200, medium=500, paper=0),
        **({} if vocab_size is None else {"vocab_size": vocab_size}),
    }


def translation_data(
    request: Request,
    *,
    wanted: tuple[str, str] = ("de", "en"),
    pairs: int = 2000,
    words: bool = False,
) -> dict[str, Any]:
    """Return the options of the task `translation` that say where its data is: the user's, or
    generated in ``out``.

    Args:
        request: its ``data`` is a folder of aligned files, or where it names ``languages`` anything
            that the task reads; where None the corpus is generated.
        wanted: source and target language where the request names none; where the folder has other
            ones, the first two it has, in order of name.
        pairs: generated train pairs.
        words: separate the letters of the generated language by spaces, so that BLEU has words to
        count.

    Raises:
        ConfigError: a folder with fewer than two languages, or languages that are not two names or
        go with no data.
    """
    if request.languages is not None:
        return _named_languages(request.data, request.languages)
    if request.data is None:
        return {
            "data": str(_generate(request.out / "corpus", pairs, words)),
            "src": SOURCE,
            "tgt": TARGET,
        }
    if request.data.startswith("hf:"):
        return {"data": request.data, "src": wanted[0], "tgt": wanted[1]}
    root = Path(request.data)
    names = {
        path.name.removesuffix(".gz").rpartition(".")[2] for path in root.glob("*train*")
    } - _NOT_LANGUAGES
    if not set(wanted) <= names:
        if len(names) < 2:
            raise ConfigError(
                f"{root}: no aligned train files of two languages (train.{wanted[0]},"
                f" train.{wanted[1]}); found {', '.join(sorted(names)) or 'none'}; where a file"
                " holds both languages, give --languages SRC,TGT"
            )
        first, second = sorted(names)[:2]
        wanted = (first, second)
    return {"data": request.data, "src": wanted[0], "tgt": wanted[1]}


def _named_languages(data: str | None, languages: str) -> dict[str, Any]:
    """Return the options for languages that the user named, which are the columns of a tsv without
    a header too."""
    names = [name.strip() for name in languages.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise ConfigError(
            f"languages = {languages!r}: expected source and target, two names as en,fr"
        )
    if data is None:
        raise ConfigError(
            f"languages = {languages!r} without data: the generated corpus has none; give --data"
        )
    return {"data": data, "src": names[0], "tgt": names[1], "columns": ",".join(names)}


def _generate(folder: Path, pairs: int, words: bool) -> Path:
    """Write train, valid and test of the generated language, the same in every call, and return the
    train file."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {
        split: folder / f"{split}-{pairs}{'-words' if words else ''}.tsv"
        for split in ("train", "valid", "test")
    }
    for split, path in paths.items():
        rng = random.Random(f"{split}/{pairs}")
        lines = [f"{SOURCE}\t{TARGET}"]
        for _ in range(pairs if split == "train" else max(8, pairs // 10)):
            word = random_walk(rng)
            lines.append(
                "\t".join((" " if words else "").join(side) for side in (word, word[::-1]))
            )
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths["train"]


def random_walk(rng: random.Random) -> str:
    """Return four to eight letters, each one or two after the one before."""
    steps = [rng.randrange(len(_LETTERS))]
    while len(steps) < rng.randint(4, 8):
        steps.append((steps[-1] + rng.choice((1, 1, 1, 2))) % len(_LETTERS))
    return "".join(_LETTERS[step] for step in steps)
