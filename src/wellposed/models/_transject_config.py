"""The configuration of TransJect models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from wellposed.model_options import TransJectOptions
from wellposed.models._checked_config import CheckedConfig
from wellposed.models._config import Depth
from wellposed.models._pooling import POOLINGS
from wellposed.nn.checks import Eps
from wellposed.nn.transject.experts import Gating
from wellposed.nn.transject.injective_embedding import PositionKind
from wellposed.nn.transject.orthogonal import ResidualStart
from wellposed.options import Ge, Rate, Size, Strength, checked_hints, fits


class TransJectConfig(CheckedConfig):
    """What a TransJect model is made of; see `wellposed.nn.TransJectStack` for its parts.

    Args:
        vocab_size: number of tokens.
        max_position_embeddings: number of positions: the longest sequence where they are learnt;
            sines are computed beyond it.
        hidden_size: width d of a token, even: half for the token, half for its position.
        num_hidden_layers: L.
        spectrum_eps: added to that divisor, and to that of normalised gates; above 0.
        gating: pooled, or normalized where a certificate is asked for, or fixed, the same for every
            input.
        residual: rezero, the identity at the start, or sigmoid.
        position: sinusoidal or learned.
        dropout: between the two maps of the feed-forward, in [0, 1). Distances are kept in
            evaluation only.
        reconstruction_weight: of the loss that teaches a Gram spectrum its basis, added in
            training; 0 leaves it out.
        pooling: how a classifier pools tokens: mean, first or max.
        tie_word_embeddings: in a language model, share the token embedding with the output layer;
            as it is half as wide as a token, a projection d -> d/2 stands before it.
        is_causal: whether a token is kept from later ones; None lets the head say: a language model
            is causal, a classifier is not.
        pad_token_id: token that fills up a batch.
        bos_token_id: first token of a text.
        eos_token_id: token, or tokens, at which generation ends.
        use_cache: whether `generate` keeps the running sums of the prefix.
        **kwargs: `num_experts`, `spectrum` and `spectrum_norm` of
            `wellposed.model_options.TransJectOptions`, and what
            every Hugging Face configuration takes: `num_labels`, `id2label`, `dtype`, ...

    Raises:
        ConfigError: values out of range, names that are not known or keys that nobody reads, all in
            one message.

    >>> TransJectConfig(hidden_size=63, num_experts=0)
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: TransJectConfig: 2 values are not usable:
      num_experts: received 0; expected an integer >= 1
      hidden_size: received 63; expected an even number: half for a token, half for its position
    """

    model_type = "transject"
    named = {"pooling": POOLINGS}  # noqa: RUF012 (declared by the base)
    absent_keys: ClassVar[Mapping[str, str]] = {
        "intermediate_size": (
            "the feed-forward is orthogonal, so as wide as a token: set hidden_size"
        ),
        "num_attention_heads": "Gram attention has no heads: set num_experts",
    }
    keys_to_ignore_at_inference = [  # noqa: RUF012
        "past_key_values",
        "sigma",
        "gates",
    ]

    vocab_size: Size = 256
    max_position_embeddings: Size = 512
    hidden_size: Size = 128
    num_hidden_layers: Annotated[Depth, Ge(1)] = 2
    spectrum_eps: Eps = 1e-6
    gating: Gating = "pooled"
    residual: ResidualStart = "rezero"
    position: PositionKind = "sinusoidal"
    dropout: Rate = 0.0
    reconstruction_weight: Strength = 0.01
    pooling: str = "mean"
    tie_word_embeddings: bool = False
    is_causal: bool | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool | None = True

    if TYPE_CHECKING:  # options of parts are no fields

        def __init__(self, **options: Any) -> None: ...

    @classmethod
    def part_options(cls) -> dict[str, Field[Any]]:
        """Return the options that TransJect shares with the command line."""
        return {item.name: item for item in fields(TransJectOptions)}

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return what values must be, those shared with the command line included."""
        return {**super().hints(), **checked_hints(TransJectOptions)}

    def problems(self) -> list[str]:
        """Return one line for each value that no model can be built from."""
        problems = super().problems()
        if fits(self.hidden_size, Size) and self.hidden_size % 2:
            problems.append(
                f"hidden_size: received {self.hidden_size}; expected an even number: half for a"
                " token, half for its position"
            )
        return problems
