"""The configurations of wellposed and TransJect models: Hugging Face's, with every value checked when
one is made, and again when a model is made of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from wellposed import model_options as parts
from wellposed import options
from wellposed.errors import ConfigError, NotLipschitzError, listed, nearest_names
from wellposed.model_options import Depth, PartOptions, SharedOptions
from wellposed.models._init import INITS, POOLINGS
from wellposed.nn import (
    ACTIVATIONS,
    ATTENTIONS,
    FEEDFORWARDS,
    NORMS,
    POSITIONS,
    RESIDUALS,
    Eps,
    cross_attention_name,
)
from wellposed.nn.transject import Gating, PositionKind, ResidualStart
from wellposed.options import Ge, Lt, Positive, Size, Strength, fits, value_problems
from wellposed.registry import Registry

# What Hugging Face itself writes into, or accepts in, a configuration beside its declared fields.
_HUGGING_FACE = (
    "model_type num_labels name_or_path torch_dtype output_attentions attn_implementation"
    " experts_implementation auto_map quantization_config custom_pipelines task_specific_params"
    " per_layer_config"
)
MOST_LABELS = 1_000_000
"""Hugging Face keeps a name for each label: beyond this a configuration alone fills the memory."""
_Labels = Annotated[int, Ge(1), Lt(MOST_LABELS + 1)]


@dataclass(frozen=True)
class InputOptions(PartOptions):
    """Tokens of every model."""

    vocab_size: Size = 256
    max_position_embeddings: Size = 512
    is_causal: bool | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool | None = True


class CheckedConfig(PreTrainedConfig):
    """Base of the configurations: bad values, and keys that nobody reads, are refused in one error.

    A configuration has as attributes the options that its architecture and the parts it can name
    read, as `wellposed.model_options` declares them.
    """

    family: ClassVar[str]
    """Architecture whose options it has."""
    own_options: ClassVar[tuple[type[PartOptions], ...]] = ()
    """Options that no command takes, or with another default than there."""
    absent_keys: ClassVar[Mapping[str, str]] = {}
    """Keys that another family has, and what to do without them here."""
    named: ClassVar[Mapping[str, Registry[Any]]] = {}
    """Where the names that options give are looked up."""

    if TYPE_CHECKING:  # options are no fields

        def __init__(self, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

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
        """Return the classes that declare the options; a later one overrides."""
        kinds = [*parts.readers("architecture")[cls.family]]
        kinds += [
            each for kind in cls.named for found in parts.readers(kind).values() for each in found
        ]
        return [InputOptions, SharedOptions, *kinds, *cls.own_options]

    @classmethod
    def part_options(cls) -> dict[str, Field[Any]]:
        """Return the options by name."""
        return {item.name: item for part in cls.part_classes() for item in fields(part)}

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return what values must be, by name, as `wellposed.options` writes it."""
        hints = map(options.checked_hints, cls.part_classes())
        return {name: hint for each in hints for name, hint in each.items()}

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
        unnamed = {name: value for name, value in values.items() if name not in self.named}
        problems = value_problems(unnamed, hints)
        for name, registry in self.named.items():
            if not (isinstance(values[name], str) and values[name] in registry):
                near = ", ".join(nearest_names(str(values[name]), registry))
                problems.append(
                    f"{name}: unknown {registry.kind} {values[name]!r}; nearest: {near}"
                )
        size = self.vocab_size
        tokens = [
            (name, token)
            for name, value in values.items()
            for token in (value if isinstance(value, list) else [value])
            if name.endswith("_token_id") and fits(size, Size) and token is not None
        ]
        problems += [
            f"{name} = {token!r}, expected a token in [0, {size})"
            for name, token in tokens
            if not fits(token, Annotated[int, Ge(0), Lt(size)])
        ]
        return problems

    def _unknown_keys(self, kwargs: Mapping[str, Any]) -> list[str]:
        """List keys that neither the class nor Hugging Face reads; a misspelt option must not pass
        in silence."""
        known = {item.name for item in fields(self)} | set(self.part_options())
        accepted = {*known, *_HUGGING_FACE.split(), *GenerationConfig().to_dict()}
        return [
            f"{key}: unknown key;"
            f" {self.absent_keys.get(key) or 'nearest: ' + ', '.join(nearest_names(key, known))}"
            for key in kwargs
            if key not in accepted and not key.startswith("_")
        ]


def _label_problems(count: Any, names: Any) -> list[str]:
    """Return one line for labels that no head has; before Hugging Face makes a name for each."""
    problems = value_problems({"num_labels": count}, {"num_labels": _Labels | None})
    if names is not None and not (
        isinstance(names, Mapping) and names and all(str(key).isdigit() for key in names)
    ):
        problems.append(
            f"id2label = {names!r:.200}, expected names of labels by number, such as"
            " {0: 'bad', 1: 'good'}"
        )
    return problems


@dataclass(frozen=True)
class WellposedOptions(PartOptions):
    """Options of wellposed models that no command takes."""

    cross_attention: str | None = None
    decoder_start_token_id: int | None = None
    layer_norm_eps: Positive = 1e-5


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
    family = "wellposed"
    own_options = (WellposedOptions,)
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (a class attribute by Hugging Face's rule)
    named = {  # noqa: RUF012 (declared by the base)
        "attention": ATTENTIONS,
        "feedforward": FEEDFORWARDS,
        "residual": RESIDUALS,
        "norm": NORMS,
        "activation": ACTIVATIONS,
        "position": POSITIONS,
        "init": INITS,
        "pooling": POOLINGS,
    }

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size

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
        problems = super().problems()
        unread = [] if problems else parts.unread_options(self, self._chosen())
        if fits(self.cross_attention, str | None):
            try:
                cross_attention_name(str(self.attention), self.cross_attention)
            except (ConfigError, NotLipschitzError) as error:
                problems.append(f"cross_attention: {str(error).removeprefix('cross_attention: ')}")
        problems += unread
        width, heads = self.hidden_size, self.num_attention_heads
        if not (fits(width, Size) and fits(heads, Size)):
            return problems
        problems += parts.head_problems(width, heads)
        if self.unit_embeddings and self.ball_embeddings:
            problems.append("unit_embeddings and ball_embeddings: received both, expected one")
        if self.qk_norm and width == heads:
            problems.append(
                "qk_norm = True with heads of dimension 1, whose LayerNorm is 0; use fewer heads"
            )
        return problems

    def to_dict(self) -> dict[str, Any]:
        """Return all values but those of options that no chosen part reads."""
        chosen = [(kind, name) for kind, names in self._chosen().items() for name in names]
        unread = {name for kind in self.named for name in parts.options_of(kind)}
        unread.difference_update(*(parts.options_read(*part) for part in chosen))
        return {name: value for name, value in super().to_dict().items() if name not in unread}

    def _chosen(self) -> dict[str, set[str]]:
        chosen = {kind: {getattr(self, kind)} for kind in self.named}
        # Cross-attentions carry the names of the attentions and read the same options.
        chosen["attention"].add(self.cross_attention)
        return chosen


@dataclass(frozen=True)
class TransJectSizes(PartOptions):
    """Options of TransJect models that no command takes, or with another default there."""

    num_hidden_layers: Annotated[Depth, Ge(1)] = 2
    spectrum_eps: Eps = 1e-6
    gating: Gating = "pooled"
    residual: ResidualStart = "rezero"
    position: PositionKind = "sinusoidal"
    reconstruction_weight: Strength = 0.01
    tie_word_embeddings: bool = False


class TransJectConfig(CheckedConfig):
    """What a TransJect model is made of; see `wellposed.nn.TransJectStack` for its parts.

    Args:
        vocab_size: number of tokens.
        max_position_embeddings: number of positions: the longest sequence where they are learnt;
            sines are computed beyond it.
        hidden_size: width d of a token, even: half for the token, half for its position.
        num_hidden_layers: L.
        spectrum_eps: added to that divisor, and to that of normalised gates; above 0.
        gating: pooled, or normalized where a certificate is asked for.
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
      num_experts = 0, expected an integer >= 1
      hidden_size = 63, expected an even number: half for a token, half for its position
    """

    model_type = "transject"
    family = "transject"
    own_options = (TransJectSizes,)
    named = {"pooling": POOLINGS}  # noqa: RUF012 (declared by the base)
    absent_keys: ClassVar[Mapping[str, str]] = {
        "intermediate_size": (
            "the feed-forward is orthogonal, so as wide as a token: set hidden_size"
        ),
        "num_attention_heads": "Gram attention has no heads: set num_experts",
    }
    keys_to_ignore_at_inference = ["past_key_values", "sigma", "gates"]  # noqa: RUF012

    def problems(self) -> list[str]:
        """Return one line for each value that no model can be built from."""
        problems = super().problems()
        if fits(self.hidden_size, Size) and self.hidden_size % 2:
            problems.append(
                f"hidden_size = {self.hidden_size}, expected an even number: half for a token, half"
                " for its position"
            )
        return problems
