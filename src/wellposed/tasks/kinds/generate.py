"""Generation by an encoder-decoder: batches of similar length, results by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from wellposed.tasks.batches import pad_inputs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LENGTH_FACTOR, LENGTH_MARGIN = 2, 10


@dataclass(frozen=True)
class Decoding:
    """How texts are searched for. An output has at most 2 x source + 10 tokens, and never more than
    the positions."""

    beams: int = 4
    """Beams; 1 is greedy."""
    length_penalty: float = 1.0
    """Exponent a: a finished text scores log p / length^a, or log p / ((5 + length) / 6)^a by a
    `GNMTLengthPenalty`."""
    num_return: int = 1
    """Texts per input, best first; at most ``beams``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keywords of ``generate``."""


@dataclass(frozen=True)
class Hypothesis:
    """One output text and its score, log p / length^a; greedy search has no score."""

    text: str
    score: float | None


def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    batch_size: int,
    notify: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Yield ``(index, hypotheses)`` for every row of source ids, longest rows first; every index
    comes exactly once.

    The search is transformers' ``generate``; the ids of padding and unknown are never produced, nor
    that of a start that no target holds. ``model`` is an encoder-decoder in evaluation mode,
    ``rows`` are source ids with their end token. ``notify`` is called after every token with the
    rows that are done; what it raises ends the search.
    """
    import torch

    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        padded = pad_inputs(
            [{"input_ids": list(rows[member])} for member in members],
            pad_id=int(tokenizer.pad_token_id),  # type: ignore[arg-type]
        )
        inputs = {name: value.to(model.device) for name, value in padded.items()}
        longest = inputs["input_ids"].shape[1]
        keywords = generate_keywords(model, tokenizer, longest=longest, decoding=decoding)
        if notify is not None:
            keywords["stopping_criteria"] = [_never_stop(partial(notify, start))]
        with torch.inference_mode():
            out: Any = model.generate(**inputs, **keywords)  # type: ignore[operator]
        texts = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
        scores = getattr(out, "sequences_scores", None)
        numbers = [None] * len(texts) if scores is None else scores.tolist()
        found = [Hypothesis(text, score) for text, score in zip(texts, numbers, strict=True)]
        for place, member in enumerate(members):
            yield member, found[place * decoding.num_return :][: decoding.num_return]


def _never_stop(each_token: Callable[[], None]) -> Callable[..., Tensor]:
    """Return a criterion that stops no row and calls ``each_token``."""

    def criterion(input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        each_token()
        return input_ids.new_zeros(input_ids.shape[0]).bool()

    return criterion


def generate_keywords(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, longest: int, decoding: Decoding
) -> dict[str, Any]:
    """Return the keywords of ``generate`` for sources of at most ``longest`` tokens."""
    positions = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    wanted = LENGTH_FACTOR * longest + LENGTH_MARGIN
    end = tokenizer.eos_token_id
    special: list[Any] = [tokenizer.pad_token_id, tokenizer.unk_token_id]
    if tokenizer.bos_token_id not in tokenizer(text_target="")["input_ids"]:
        special.append(tokenizer.bos_token_id)
    beams = {"length_penalty": decoding.length_penalty, "early_stopping": False}
    return {
        "max_new_tokens": min(wanted, positions) if positions else wanted,
        "num_beams": decoding.beams,
        "do_sample": False,
        "num_return_sequences": decoding.num_return,
        "suppress_tokens": [number for number in special if number not in (None, end)],
        "return_dict_in_generate": True,
        "output_scores": decoding.beams > 1,
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
        **(beams if decoding.beams > 1 else {}),
        **decoding.options,
    }
