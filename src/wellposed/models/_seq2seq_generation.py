"""Generation from an encoder-decoder: what transformers' `generate` does, with the length penalty
of GNMT besides."""

from __future__ import annotations

import math
from typing import Any, cast

from torch import Tensor
from transformers import EncoderDecoderCache, GenerationConfig, GenerationMixin

from wellposed.errors import ConfigError


class GNMTLengthPenalty(float):
    """A length penalty a with which beam search divides log-probabilities by ((5 + n) / 6)^a, n the
    new tokens.

    Exact. Wu et al. (2016), "Google's Neural Machine Translation System", eq. 14 without coverage;
    Vaswani et al. (2017) take a = 0.6 with it. transformers (and fairseq) divide by n^a. Both are 1
    at n = 1 and grow like n^a, but GNMT's is flatter for short outputs: from 5 to 10 tokens with a
    = 0.6 the divisor grows by 1.28 instead of 1.52, so an a tuned for one is wrong for the other. n
    counts the end token and not the start token, in both.

    transformers' beam search computes ``n ** length_penalty``, here and in its stopping rule, and
    nothing else from it: a number that answers ``n ** self`` with GNMT's divisor is all that it
    takes. Give it as ``model.generate(..., num_beams=4, length_penalty=GNMTLengthPenalty(0.6))`` to
    any model of transformers; our encoder-decoders take ``gnmt_length_penalty=0.6`` as well. A
    saved generation configuration keeps the bare number: to save the form, set
    ``model.generation_config.gnmt_length_penalty``.

    Raises:
        ConfigError: not a finite number.

    >>> round(10 ** GNMTLengthPenalty(0.6), 4), round(10 ** 0.6, 4)
    (1.7329, 3.9811)
    """

    def __new__(cls, value: float) -> GNMTLengthPenalty:
        if not math.isfinite(value):
            raise ConfigError(
                f"GNMTLengthPenalty: received {value!r}; expected a finite number, 0 for no penalty"
            )
        return super().__new__(cls, value)

    def __rpow__(self, length: Any, mod: None = None) -> Any:
        return ((5.0 + length) / 6.0) ** float(self)

    def __repr__(self) -> str:
        return f"GNMTLengthPenalty({float(self)!r})"


class Seq2SeqGeneration(GenerationMixin):
    """`generate` with `gnmt_length_penalty`, and beams that share the keys and values of their
    source."""

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Turn `gnmt_length_penalty`, an argument or a saved entry, into the length penalty of beam
        search."""
        given = kwargs.pop("gnmt_length_penalty", None)
        if given is not None and "length_penalty" in kwargs:
            raise ConfigError(
                f"generate: received length_penalty={kwargs['length_penalty']!r} (n^a) and "
                f"gnmt_length_penalty={given!r} (((5 + n) / 6)^a); give one"
            )
        prepared, others = cast(Any, super())._prepare_generation_config(
            generation_config, **kwargs
        )
        beams = prepared.num_beams or 1
        if given is not None and beams == 1:
            raise ConfigError(
                f"generate: received gnmt_length_penalty={given!r} without beams, where no scores"
                " are compared; give num_beams > 1"
            )
        saved = getattr(prepared, "gnmt_length_penalty", None)
        penalty = saved if given is None and "length_penalty" not in kwargs else given
        if penalty is not None and beams > 1:
            prepared.length_penalty = GNMTLengthPenalty(penalty)
        return prepared, others

    @staticmethod
    def _reorder_cache(
        past_key_values: EncoderDecoderCache, beam_idx: Tensor
    ) -> EncoderDecoderCache:
        """Beams of one sentence read the same source, so only the target's keys and values move."""
        past_key_values.self_attention_cache.reorder_cache(cast(Any, beam_idx))
        return past_key_values
