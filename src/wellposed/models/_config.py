"""The configuration of our models: Hugging Face's, with every value checked."""

from __future__ import annotations

import copy
from dataclasses import Field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from wellposed.errors import ConfigError, NotLipschitzError
from wellposed.model_options import hints_of, options_of, options_read, unread_options
from wellposed.models._checked_config import CheckedConfig
from wellposed.models._init import INITS
from wellposed.models._pooling import POOLINGS
from wellposed.nn import ACTIVATIONS, ATTENTIONS, FEEDFORWARDS, NORMS, POSITIONS, RESIDUALS
from wellposed.nn.block import cross_attention_name
from wellposed.options import Ge, Lt, Positive, Rate, Size, fits

_NAMED = {
    "attention": ATTENTIONS,
    "feedforward": FEEDFORWARDS,
    "residual": RESIDUALS,
    "norm": NORMS,
    "activation": ACTIVATIONS,
    "position": POSITIONS,
    "init": INITS,
    "pooling": POOLINGS,
}
Depth: TypeAlias = Annotated[int, Ge(0), Lt(1_000_000)]
"""A number of blocks; building more would not end."""


class WellposedConfig(CheckedConfig):
    """What a wellposed model is made of; each name is looked up in a registry of `wellposed.nn` or
    `wellposed.models`.

    Args:
        vocab_size: number of tokens.
        max_position_embeddings: longest sequence, in tokens.
        hidden_size: width D of a token.
        num_hidden_layers: number of blocks; 0 is the control without any.
        num_attention_heads: number of heads; divides D.
        intermediate_size: width of the feed-forward layer; 4 D where None.
        attention: registered attention.
        feedforward: registered feed-forward.
        unit_embeddings: token vectors of norm 1 (`wellposed.nn.UnitEmbedding`), not multiplied by
            sqrt(D).
        norm: where LayerNorm stands: pre, post or none.
        residual: plain is x + f(x), rezero is x + a f(x) with a learnt from 0.
        qk_norm: normalise queries and keys per head.
        position: learned or sinusoidal.
        scale_embeddings: multiply token and position vectors by sqrt(D) (Vaswani et al. 2017, sec.
            3.4), so that the entries of a token have variance one under `init="xavier"`.
        tie_word_embeddings: share the token embedding with the output layer of a language model.
        dropout: on embeddings and on both branches of a block, in [0, 1).
        attention_dropout: on attention weights, in [0, 1).
        init: registered initialisation.
        pooling: how a classifier pools tokens: mean, first or max.
        num_decoder_layers: number of blocks of the decoder of an encoder-decoder; num_hidden_layers
            where None.
        share_embeddings: one table of tokens for the source and the target of an encoder-decoder.
        cross_attention: registered cross-attention of an encoder-decoder. None is the one of the
            same name as `attention`; cosine beside the L2 attentions, whose cross form has no
            Lipschitz constant.
        decoder_start_token_id: first token of a target; bos_token_id where None.
        is_causal: whether a token is kept from later ones; None lets the head say: a language model
            is causal, a classifier is not.
        layer_norm_eps: epsilon of every LayerNorm.
        pad_token_id: token that fills up a batch.
        bos_token_id: first token of a text.
        eos_token_id: token, or tokens, at which generation ends.
        use_cache: whether `generate` keeps keys and values.
        **kwargs: the options of the named parts, as `wellposed.model_options` declares them
            (`contractive` of attention l2_contractive, ...), and what every Hugging Face
            configuration takes: `num_labels`, `id2label`, ...

    Raises:
        ConfigError: values out of range, names that are not registered or keys that nobody reads,
            all in one message.

    >>> WellposedConfig(hidden_size=64, num_attention_heads=4).intermediate_size
    256
    >>> WellposedConfig(norm="per")
    Traceback (most recent call last):
    ...
    wellposed.errors.ConfigError: WellposedConfig: 1 value is not usable:
      norm: unknown norm 'per'; nearest: pre, post, none
    """

    model_type = "wellposed"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)
    named = _NAMED

    vocab_size: Size = 256
    max_position_embeddings: Size = 512
    hidden_size: Size = 128
    num_hidden_layers: Depth = 2
    num_attention_heads: Size = 4
    intermediate_size: Size | None = None
    attention: str = "dot_product"
    feedforward: str = "mlp"
    norm: str = "post"
    residual: str = "plain"
    qk_norm: bool = False
    position: str = "learned"
    scale_embeddings: bool = True
    unit_embeddings: bool = False
    tie_word_embeddings: bool = True
    dropout: Rate = 0.0
    attention_dropout: Rate = 0.0
    init: str = "xavier"
    pooling: str = "mean"
    num_decoder_layers: Annotated[Depth, Ge(1)] | None = None
    share_embeddings: bool = True
    cross_attention: str | None = None
    decoder_start_token_id: int | None = None
    is_causal: bool | None = None
    layer_norm_eps: Positive = 1e-5
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool | None = True

    if TYPE_CHECKING:  # options of parts are no fields

        def __init__(self, **options: Any) -> None: ...

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None and fits(self.hidden_size, Size):
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    @classmethod
    def part_options(cls) -> dict[str, Field[Any]]:
        """Return the options that only some attentions, residuals, initialisations, ... read."""
        return {name: item for kind in _NAMED for name, item in options_of(kind).items()}

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return what values must be, those of the parts' options included."""
        parts = {name: hint for kind in _NAMED for name, hint in hints_of(kind).items()}
        return {**super().hints(), **parts}

    @property
    def decoder_depth(self) -> int:
        """Number of blocks of a decoder."""
        return (
            self.num_hidden_layers if self.num_decoder_layers is None else self.num_decoder_layers
        )

    def get_text_config(
        self, decoder: bool | None = None, encoder: bool | None = None
    ) -> WellposedConfig:
        """Return the configuration of one side of an encoder-decoder; caches are made for the depth
        it names."""
        if not decoder or encoder or self.decoder_depth == self.num_hidden_layers:
            return self
        side = copy.copy(self)
        side.num_hidden_layers = self.decoder_depth
        return side

    def problems(self) -> list[str]:
        """Return one line for each value that no model can be built from."""
        unusable = super().problems()
        return [
            *unusable,
            *_decoder_problems(self),
            *([] if unusable else unread_options(self, self._chosen())),
            *_shape_problems(self),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return all values but those of options that no chosen part reads."""
        chosen = [(kind, name) for kind, names in self._chosen().items() for name in names]
        unread = set(self.part_options()).difference(*(options_read(*part) for part in chosen))
        return {name: value for name, value in super().to_dict().items() if name not in unread}

    def _chosen(self) -> dict[str, set[str]]:
        chosen = {field: {getattr(self, field)} for field in _NAMED}
        # Cross-attentions carry the names of the attentions and read the same options.
        chosen["attention"].add(self.cross_attention)
        return chosen


def _decoder_problems(config: WellposedConfig) -> list[str]:
    try:
        if isinstance(config.cross_attention, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            cross_attention_name(str(config.attention), config.cross_attention)
    except (ConfigError, NotLipschitzError) as error:
        return [f"cross_attention: {str(error).removeprefix('cross_attention: ')}"]
    return []


def _shape_problems(config: WellposedConfig) -> list[str]:
    width, heads = config.hidden_size, config.num_attention_heads
    if not (fits(width, Size) and fits(heads, Size)):
        return []
    if width % heads:
        return [
            f"hidden_size: received {width}; expected a multiple of num_attention_heads = {heads}"
        ]
    if config.qk_norm and width == heads:
        return [
            "qk_norm: received True with heads of dimension 1, whose LayerNorm is 0; use fewer"
            " heads"
        ]
    return []
