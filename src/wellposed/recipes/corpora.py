"""Every corpus of Zhang et al. (2021) and Huang et al. (2020) as a configuration: data, tokenizer, sizes, steps.

What a paper prints is taken as printed. What it leaves to its framework (Tensor2Tensor for Zhang, fairseq for Huang) is
that framework's public setting of the name. What neither fixes is named in ``not_printed``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from wellposed.recipes.named import NAMED
from wellposed.recipes.variants import apply_variant
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions


@dataclass(frozen=True)
class Size:
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


@dataclass(frozen=True)
class Corpus:
    """One column of a table."""

    name: str
    """Of the preset, without the paper."""
    pair: str
    """As the table heads it."""
    src: str
    tgt: str
    data: str | None
    """``hf:`` id that carries train, validation and test; None where the user has to bring aligned files."""
    origin: str
    """Where the sentences come from."""
    size: str
    """Name in `SIZES`."""
    steps: int
    tokenizer: Literal["bpe", "char"] = "bpe"
    vocab_size: int = 32768
    tokens_per_batch: int = 4096
    """Padded tokens of one micro-batch on one side."""
    accumulation: int = 1
    """Micro-batches of a step."""
    max_tokens: int = 256
    dropout: float | None = None
    learning_rate: float | None = None
    """Start of T-Fixup's inverse square root; Zhang's runs have Tensor2Tensor's warm-up schedule instead."""
    bf16: bool = False
    not_printed: str = ""
    """What the paper does not say, and we took."""

    def run_config(self) -> RunConfig:
        """Return the run as the paper has it: post-LN with warm-up for Zhang, T-Fixup without for Huang."""
        size = SIZES[self.size]
        options: dict[str, Any] = {"src": self.src, "tgt": self.tgt, "tokenizer": self.tokenizer}
        options |= {"max_tokens": self.max_tokens, "tokens_per_batch": self.tokens_per_batch, "overflow": "drop"}
        options |= {"vocab_size": self.vocab_size} if self.tokenizer == "bpe" else {}
        options |= {} if self.data is None else {"data": self.data}
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
            # Tensor2Tensor: 2 d^-1/2 min(t^-1/2, t w^-3/2) with w = 8000, Adam (0.9, 0.997), no decay, no clipping.
            return replace(
                common, schedule="kim2021", gamma=2.0, warmup_steps=8000, adam_beta2=0.997, weight_decay=0.0,
                max_grad_norm=0.0,
            )  # fmt: skip
        return replace(
            common, schedule="inverse_sqrt", learning_rate=self.learning_rate, decay_steps=4000, weight_decay=1e-4,
            max_grad_norm=25.0, average_checkpoints=10,
        )  # fmt: skip


_STEPS = "steps (200,000 taken)"
_WIT3 = "WIT3 (TED talks)"
SUBWORD = (
    Corpus("iwslt14-de-en", "De-En", "de", "en", None, f"IWSLT'14, {_WIT3}", "t2t-small", 200_000, not_printed=_STEPS),
    Corpus("iwslt14-ro-en", "Ro-En", "ro", "en", None, f"IWSLT'14, {_WIT3}", "t2t-small", 200_000, not_printed=_STEPS),
    Corpus(
        "iwslt15-en-vi", "En-Vi", "en", "vi", None, "IWSLT'15 as Stanford prepared it, 133,000 pairs; valid is tst2012",
        "t2t-base", 200_000, not_printed=_STEPS,
    ),
    Corpus(
        "iwslt17-en-id", "En-Id", "en", "id", None,
        "IWSLT'17, 109,335 pairs, with the 24,024 of PANL-BPPT as Tensor2Tensor joins them; tst2017plus",
        "t2t-base", 200_000, not_printed=_STEPS,
    ),
    Corpus(
        "wmt17-en-et", "En-Et", "en", "et", "hf:wmt/wmt18:et-en",
        "called WMT'17; Estonian is a language of WMT'18, and Tensor2Tensor's problem takes that", "t2t-base", 200_000,
        not_printed=_STEPS,
    ),
    Corpus(
        "setimes-en-mk", "En-Mk", "en", "mk", None, "SETIMES; MULTEXT-East '1984', 4,986 pairs, for evaluation",
        "t2t-base", 200_000, not_printed=_STEPS,
    ),
)  # fmt: skip
WMT16 = (
    Corpus(
        "wmt16-en-de-base", "En-De base", "en", "de", "hf:wmt/wmt16:de-en", "WMT'16; the paper tests on newstest2014",
        "t2t-base", 2_000_000, accumulation=8,
    ),
    Corpus(
        "wmt16-en-de-big", "En-De big", "en", "de", "hf:wmt/wmt16:de-en", "WMT'16; the paper tests on newstest2014",
        "t2t-big", 800_000, tokens_per_batch=2048, accumulation=8,
    ),
)  # fmt: skip
CHARACTERS = (
    Corpus(
        "char-en-fr", "En-Fr", "en", "fr", "hf:wmt/wmt14:fr-en", "WMT, year not printed (2014 taken)", "t2t-small",
        200_000, "char", max_tokens=1024, not_printed="year of WMT",
    ),
    Corpus(
        "char-ro-en", "Ro-En", "ro", "en", None, f"IWSLT'14, {_WIT3}", "t2t-small", 200_000, "char", max_tokens=1024
    ),
    Corpus(
        "char-de-en", "De-En", "de", "en", None, f"IWSLT'15, {_WIT3}", "t2t-small", 200_000, "char", max_tokens=1024
    ),
)  # fmt: skip
_VOCABULARY = "vocabulary, test set"
HUANG = (
    Corpus(
        "iwslt14-de-en", "IWSLT'14 De-En small", "de", "en", None, f"IWSLT'14, {_WIT3}", "fairseq-iwslt", 300_000,
        vocab_size=10_000, tokens_per_batch=4000, dropout=0.5, learning_rate=5e-4, not_printed=_VOCABULARY,
    ),
    Corpus(
        "wmt18-fi-en", "WMT'18 Fi-En base", "fi", "en", "hf:wmt/wmt18:fi-en", "WMT'18", "t2t-base", 90_000,
        tokens_per_batch=4000, accumulation=20, dropout=0.4, learning_rate=6e-4, not_printed=_VOCABULARY,
    ),
    Corpus(
        "wmt17-en-de-base", "WMT'17 En-De base", "en", "de", "hf:wmt/wmt17:de-en", "WMT'17", "t2t-base", 1_000_000,
        tokens_per_batch=5000, accumulation=5, dropout=0.2, learning_rate=7e-4, not_printed=_VOCABULARY,
    ),
    Corpus(
        "wmt17-en-de-deep", "WMT'17 En-De deep", "en", "de", "hf:wmt/wmt17:de-en", "WMT'17", "fairseq-deep", 500_000,
        tokens_per_batch=5000, accumulation=5, dropout=0.4, learning_rate=4e-4, bf16=True,
        not_printed=f"{_VOCABULARY}, depth (20 taken)",
    ),
    Corpus(
        "wmt17-en-de-big", "WMT'17 En-De big", "en", "de", "hf:wmt/wmt17:de-en", "WMT'17", "t2t-big", 500_000,
        tokens_per_batch=5000, accumulation=5, dropout=0.4, learning_rate=4e-4, bf16=True, not_printed=_VOCABULARY,
    ),
)  # fmt: skip

for _paper, _corpora in (("zhang2021", (*SUBWORD, *WMT16, *CHARACTERS)), ("huang2020", HUANG)):
    for _corpus in _corpora:
        NAMED.register(f"{_paper}-{_corpus.name}")(_corpus.run_config)
