"""The configurations of wellposed and TransJect models: Hugging Face's, with every value checked when
one is made, and again when a model is made of it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from transformers import GenerationConfig, PreTrainedConfig

from wellposed.errors import ConfigError, NotLipschitzError, listed, nearest_names
from wellposed.model_options import (
    PartOptions,
    TransJectOptions,
    options_read,
    readers,
    unread_options,
)
from wellposed.models._init import INITS, POOLINGS
from wellposed.nn import ACTIVATIONS, ATTENTIONS, FEEDFORWARDS, NORMS, POSITIONS, RESIDUALS
from wellposed.nn.block import cross_attention_name
from wellposed.nn.checks import Eps
from wellposed.nn.transject.gram import Gating
from wellposed.nn.transject.parts import PositionKind, ResidualStart
from wellposed.options import Ge, Lt, Positive, Rate, Size, Strength, checked_hints, fits, misfits
from wellposed.registry import Registry

# What Hugging Face itself writes into, or accepts in, a configuration beside its declared fields.
_HUGGING_FACE = {
    "model_type",
    "num_labels",
    "name_or_path",
    "torch_dtype",
    "output_attentions",
    "attn_implementation",
    "experts_implementation",
    "auto_map",
    "quantization_config",
    "custom_pipelines",
    "task_specific_params",
    "use_cache",
}
MOST_LABELS = 1_000_000
"""Hugging Face keeps a name for each label: beyond this a configuration alone fills the memory."""
_Labels = Annotated[int, Ge(1), Lt(MOST_LABELS + 1)]


class CheckedConfig(PreTrainedConfig):
    """Base of the configurations: bad values, and keys that nobody reads, are refused in one error.

    The annotations of the fields say what their values must be. The options that only some parts
    read are declared with the parts; a configuration has them as attributes.
    """

    absent_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that another family has, and what to do without them here."""
    named: ClassVar[Mapping[str, Registry[Any]]] = {}
    """Where the names that fields give are looked up."""
    vocab_size: Size = 256
    max_position_embeddings: Size = 512
    hidden_size: Size = 128
    dropout: Rate = 0.0
    pooling: str = "mean"
    is_causal: bool | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool | None = True

    if TYPE_CHECKING:  # options of parts are no fields

        def __init__(self, **options: Any) -> None: ...

    def __post_init__(self, **kwargs: Any) -> None:
        for name, item in self.part_options().items():
            setattr(self, name, kwargs.pop(name, item.default))
        if kwargs.get("num_labels", 0) is None:
            del kwargs["num_labels"]
        unusable = _label_problems(kwargs.get("num_labels"), self.id2label)
        unknown = self._unknown_keys(kwargs)
        if unusable:
            kwargs, self.id2label = {**kwargs, "num_labels": 2}, None
        super().__post_init__(**kwargs)
        self.check([*unknown, *unusable])

    @classmethod
    def part_classes(cls) -> list[type[PartOptions]]:
        """Return the classes of the options that only some parts read."""
        return []

    @classmethod
    def part_options(cls) -> dict[str, Field[Any]]:
        """Return the options that only some parts read."""
        return {item.name: item for options in cls.part_classes() for item in fields(options)}

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return what values must be, by name, as `wellposed.options` writes it."""
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, CheckedConfig):
                found |= inspect.get_annotations(base, eval_str=True)
        own = {item.name: found[item.name] for item in fields(cls) if item.name in found}
        for options in cls.part_classes():
            own |= checked_hints(options)
        return own

    def check(self, problems: list[str] | None = None) -> None:
        """Raise `ConfigError` naming every value that no model can be built from."""
        problems = [*(problems or []), *self.problems()]
        if problems:
            count = "1 value is" if len(problems) == 1 else f"{len(problems)} values are"
            raise ConfigError(f"{type(self).__name__}: {count} not usable:\n{listed(problems)}")

    def problems(self) -> list[str]:
        """Return one line for each value that no model can be built from."""
        # An option that a part registered after this configuration was made is not its own.
        hints = {name: hint for name, hint in self.hints().items() if hasattr(self, name)}
        values = {name: getattr(self, name) for name in hints}
        wrong = {
            name: f"{name}: received {value!r}; expected {expected}"
            for name, value, expected in misfits(values, hints)
            if name not in self.named
        }
        return [
            *wrong.values(),
            *(
                f"{name}: unknown {registry.kind} {values[name]!r}; "
                f"nearest: {', '.join(nearest_names(str(values[name]), registry))}"
                for name, registry in self.named.items()
                if not (isinstance(values[name], str) and values[name] in registry)
            ),
            *(
                f"{name}: received {token!r}; expected a token in [0, {self.vocab_size})"
                for name in values
                if name.endswith("_token_id") and name not in wrong and "vocab_size" not in wrong
                for token in _tokens(values[name])
                if not fits(token, Annotated[int, Ge(0), Lt(self.vocab_size)])
            ),
        ]

    def _unknown_keys(self, kwargs: Mapping[str, Any]) -> list[str]:
        """List keys that neither the class nor Hugging Face reads; a misspelt option must not pass
        in silence."""
        known = {item.name for item in fields(self)} | set(self.part_options())
        accepted = known | _HUGGING_FACE | {"per_layer_config", *GenerationConfig().to_dict()}
        return [
            f"{key}: unknown key;"
            f" {self.absent_keys.get(key) or 'nearest: ' + ', '.join(nearest_names(key, known))}"
            for key in kwargs
            if key not in accepted and not key.startswith("_")
        ]


def _tokens(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _label_problems(count: Any, names: Any) -> list[str]:
    """Return one line for labels that no head has; before Hugging Face makes a name for each."""
    wrong = misfits({"num_labels": count}, {"num_labels": _Labels | None})
    problems = [f"{name}: received {value!r}; expected {words}" for name, value, words in wrong]
    if names is not None and not (
        isinstance(names, Mapping) and names and all(str(key).isdigit() for key in names)
    ):
        problems.append(
            f"id2label: received {names!r:.200}; expected names of labels by number, such as"
            " {0: 'bad', 1: 'good'}"
        )
    return problems


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
        ball_embeddings: token vectors of norm below 1 (`wellposed.nn.BallEmbedding`), likewise.
        norm: where LayerNorm stands: pre, post or none; dyt: a tanh where pre has one
            (`wellposed.nn.DynamicTanh`).
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
      norm: unknown norm 'per'; nearest: pre
    """

    model_type = "wellposed"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)
    named = _NAMED

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
    ball_embeddings: bool = False
    tie_word_embeddings: bool = True
    attention_dropout: Rate = 0.0
    init: str = "xavier"
    num_decoder_layers: Annotated[Depth, Ge(1)] | None = None
    share_embeddings: bool = True
    cross_attention: str | None = None
    decoder_start_token_id: int | None = None
    layer_norm_eps: Positive = 1e-5

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None and fits(self.hidden_size, Size):
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    @classmethod
    def part_classes(cls) -> list[type[PartOptions]]:
        """Return the options that only some attentions, residuals, initialisations, ... read."""
        return [each for kind in _NAMED for found in readers(kind).values() for each in found]

    @property
    def decoder_depth(self) -> int:
        """Number of blocks of a decoder."""
        depth = self.num_decoder_layers
        return self.num_hidden_layers if depth is None else depth

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
        found = super().problems()
        unread = [] if found else unread_options(self, self._chosen())
        if fits(self.cross_attention, str | None):
            try:
                cross_attention_name(str(self.attention), self.cross_attention)
            except (ConfigError, NotLipschitzError) as error:
                found.append(f"cross_attention: {str(error).removeprefix('cross_attention: ')}")
        found += unread
        width, heads = self.hidden_size, self.num_attention_heads
        if not (fits(width, Size) and fits(heads, Size)):
            return found
        if self.unit_embeddings and self.ball_embeddings:
            found.append("unit_embeddings and ball_embeddings: received both, expected one of them")
        if width % heads:
            found.append(f"hidden_size: received {width}; expected a multiple of {heads} heads")
        elif self.qk_norm and width == heads:
            found.append(
                "qk_norm: received True with heads of dimension 1, whose LayerNorm is 0; use fewer"
                " heads"
            )
        return found

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
    keys_to_ignore_at_inference = ["past_key_values", "sigma", "gates"]  # noqa: RUF012

    num_hidden_layers: Annotated[Depth, Ge(1)] = 2
    spectrum_eps: Eps = 1e-6
    gating: Gating = "pooled"
    residual: ResidualStart = "rezero"
    position: PositionKind = "sinusoidal"
    reconstruction_weight: Strength = 0.01
    tie_word_embeddings: bool = False

    @classmethod
    def part_classes(cls) -> list[type[PartOptions]]:
        """Return the options that TransJect shares with the command line."""
        return [TransJectOptions]

    def problems(self) -> list[str]:
        """Return one line for each value that no model can be built from."""
        problems = super().problems()
        if fits(self.hidden_size, Size) and self.hidden_size % 2:
            problems.append(
                f"hidden_size: received {self.hidden_size}; expected an even number: half for a"
                " token, half for its position"
            )
        return problems
