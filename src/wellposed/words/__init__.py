"""Certified accuracy against replaced words, for any classifier of texts, however trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wellposed.lazy import import_on_first_use

if TYPE_CHECKING:
    from wellposed.words._attack import WordAttack as WordAttack
    from wellposed.words._attack import WordSwaps as WordSwaps
    from wellposed.words._certificate import CertifiedText as CertifiedText
    from wellposed.words._certificate import TextReport as TextReport
    from wellposed.words._certificate import WordAccuracy as WordAccuracy
    from wellposed.words._certificate import WordCertificate as WordCertificate
    from wellposed.words._certificate import read_in_windows as read_in_windows
    from wellposed.words._certificate import text_limit as text_limit
    from wellposed.words._loss import word_logits as word_logits
    from wellposed.words._texts import encode_words as encode_words
    from wellposed.words._texts import split_words as split_words
    from wellposed.words._texts import window_options as window_options
else:
    # Tasks split texts without torch.
    __getattr__, __dir__ = import_on_first_use(
        __name__,
        {
            "_attack": "WordAttack WordSwaps",
            "_certificate": (
                "CertifiedText TextReport WordAccuracy WordCertificate read_in_windows text_limit"
            ),
            "_loss": "word_logits",
            "_texts": "encode_words split_words window_options",
        },
    )
