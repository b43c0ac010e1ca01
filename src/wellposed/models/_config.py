"""Hugging Face configurations of wellposed and TransJect models, checked when made and used."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from wellposed import model_options as parts
from wellposed import options
from wellposed.errors import ConfigError, NotLipschitzError, listed, nearest_names
from wellposed.model_options import PartOptions, SharedOptions
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

# Keys that Hugging Face writes into, or accepts in, a configuration, besides declared fields.
_HUGGING_FACE = (
    "model_type num_labels name_or_path torch_dtype output_attentions attn_implementation"
    " experts_implementation auto_map quantization_config custom_pipelines task_specific_params"
    " per_layer_config"
)
MOST_LABELS = 1_000_000
"""Hugging Face stores a name per label: with more, a configuration alone fills the memory."""
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
    """Base of the configurations: bad values and unknown keys are refused in one error.

    Attributes are the options of its architecture and parts, declared in `wellposed.model_options`.
    """

    family: ClassVar[str]
    """Architecture whose options it has."""
    own_options: ClassVar[tuple[type[PartOptions], ...]] = ()
    """Options that no command takes, or whose default differs there."""
    absent_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of another family, and what to use here instead."""
    named: ClassVar[Mapping[str, Registry[Any]]] = {}
    """The registry in which the value of an option is looked up."""

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
            kwargs = {**kwargs, "num_labels": 2}
            self.id2label = None
        super().__post_init__(**kwargs)
        self.check([*unknown, *unusable])

    @classmethod
    def part_classes(cls) -> list[type[PartOptions]]:
        """Return the classes that declare the options; a later one overrides."""
        kinds = [*parts.readers("architecture")[cls.family]]
        named = [classes for kind in cls.named for classes in parts.readers(kind).values()]
        kinds += [part for classes in named for part in classes]
        return [InputOptions, SharedOptions, *kinds, *cls.own_options]

    @classmethod
    def part_options(cls) -> dict[str, Field[Any]]:
        """Return the options by name."""
        return {item.name: item for part in cls.part_classes() for item in fields(part)}

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return the hint of each option, in the terms of `wellposed.options`."""
        hints = map(options.checked_hints, cls.part_classes())
        return {name: hint for part in hints for name, hint in part.items()}

    def check(self, problems: list[str] | None = None) -> None:
        """Raise `ConfigError` naming every value from which no model can be built."""
        problems = [*(problems or []), *self.problems()]
        if problems:
            count = "1 value is" if len(problems) == 1 else f"{len(problems)} values are"
            raise ConfigError(f"{type(self).__name__}: {count} not usable:\n{listed(problems)}")

    def problems(self) -> list[str]:
        """Return one line for each value from which no model can be built."""
        # Leave out options of parts that were registered after this configuration was made.
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
        """Return a line for each key, such as a misspelt option, that nothing reads."""
        option_names = {item.name for item in fields(self)} | set(self.part_options())
        accepted = {*option_names, *_HUGGING_FACE.split(), *GenerationConfig().to_dict()}
        return [
            f"{key}: unknown key;"
            f" {self.absent_keys.get(key) or 'nearest: ' + ', '.join(nearest_names(key, option_names))}"
            for key in kwargs
            if key not in accepted and not key.startswith("_")
        ]


def _label_problems(count: Any, names: Any) -> list[str]:
    """Return one line for labels that no head has, before Hugging Face makes a name for each."""
    problems = value_problems({"num_labels": count}, {"num_labels": _Labels | None})
    if names is not None and not (
        isinstance(names, Mapping) and names and all(str(key).isdigit() for key in names)
    ):
        problems.append(
            f"id2label = {repr(names)[:200]}, expected label names by number, such as"
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
    """Configuration of wellposed models; names are looked up in `wellposed.nn` and
    `wellposed.models`.

    Args:
        **options: those below, those of the named parts, and Hugging Face's (`num_labels`, ...).

    Keyword Args:
        vocab_size (int): number of tokens.
        max_position_embeddings (int): longest sequence, in tokens.
        hidden_size (int): D, the width of a token.
        num_hidden_layers (int): number of blocks; 0 is the control without any.
        num_attention_heads (int): number of heads; divides D.
        intermediate_size (int): width of the feed-forward layer; default 4 D.
        attention (str): a registered name.
        feedforward (str): a registered name.
        init (str): a registered name.
        unit_embeddings (bool): token vectors of norm 1, not scaled by sqrt(D).
        ball_embeddings (bool): token vectors of norm below 1, not scaled by sqrt(D).
        logit_gain (bool): multiply each logit of a language model by a learnt factor, 1 at the start.
        norm (str): LayerNorm in place pre, post or none; dyt and derf: `wellposed.nn.DynamicTanh` and
            `wellposed.nn.DynamicErf` in place pre.
        residual (str): `x + f(x)` (plain), or `x + a f(x)` with a learnt from 0 (rezero); ngpt:
            `wellposed.nn.NGPTResidual`.
        qk_norm (bool): normalise queries and keys per head.
        position (str): learned or sinusoidal.
        scale_embeddings (bool): multiply token and position vectors by sqrt(D) (Vaswani et al.
            2017, sec. 3.4): entries of variance one under `init="xavier"`.
        tie_word_embeddings (bool): share the token embedding with a language model's output layer.
        dropout (float): on embeddings and on both branches of a block, in [0, 1).
        attention_dropout (float): on attention weights, in [0, 1).
        pooling (str): how a classifier pools tokens: mean, first or max.
        num_decoder_layers (int): blocks of a decoder; default num_hidden_layers.
        share_embeddings (bool): one table of tokens for source and target.
        cross_attention (str): default the name of `attention`, or cosine for L2 attentions, whose
            cross form has no Lipschitz constant.
        decoder_start_token_id (int): first token of a target; default bos_token_id.
        is_causal (bool): hide later tokens; default: language models do, classifiers do not.
        layer_norm_eps (float): epsilon of every LayerNorm.
        pad_token_id (int): padding token.
        bos_token_id (int): first token of a text.
        eos_token_id (int | list[int]): token, or tokens, at which generation ends.
        use_cache (bool): whether `generate` keeps keys and values.

    Raises:
        ConfigError: values out of range, unregistered names or unknown keys, in one message.

    >>> WellposedConfig(norm="per")
    Traceback (most recent call last):
    wellposed.errors.ConfigError: WellposedConfig: 1 value is not usable:
      norm: unknown norm 'per'; nearest: pre, derf
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
        """Return one side's configuration of an encoder-decoder; its depth sizes the cache."""
        if not decoder or encoder or self.decoder_depth == self.num_hidden_layers:
            return self
        side = copy.copy(self)
        side.num_hidden_layers = self.decoder_depth
        return side

    def problems(self) -> list[str]:
        """Return one line for each value from which no model can be built."""
        problems = super().problems()
        unread = [] if problems else parts.unread_options(self, self._chosen())
        if fits(self.cross_attention, str | None):
            try:
                cross_attention_name(str(self.attention), self.cross_attention)
            except (ConfigError, NotLipschitzError) as error:
                problems.append(f"cross_attention: {str(error).removeprefix('cross_attention: ')}")

        problems += unread
        width = self.hidden_size
        heads = self.num_attention_heads
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
        """Return all values except options that no chosen part reads."""
        chosen = [(kind, name) for kind, names in self._chosen().items() for name in names]
        unread = {name for kind in self.named for name in parts.options_of(kind)}
        unread.difference_update(*(parts.options_read(*part) for part in chosen))
        return {name: value for name, value in super().to_dict().items() if name not in unread}

    def _chosen(self) -> dict[str, set[str]]:
        chosen = {kind: {getattr(self, kind)} for kind in self.named}
        # Cross-attentions have the names of the attentions and read the same options.
        chosen["attention"].add(self.cross_attention)
        return chosen


@dataclass(frozen=True)
class TransJectSizes(PartOptions):
    """Options of TransJect models that no command takes, or whose default differs there."""

    spectrum_eps: Eps = 1e-6
    gating: Gating = "pooled"
    residual: ResidualStart = "rezero"
    position: PositionKind = "sinusoidal"
    reconstruction_weight: Strength = 0.01
    tie_word_embeddings: bool = False


class TransJectConfig(CheckedConfig):
    """Configuration of TransJect models; see `wellposed.nn.TransJectStack` for the parts.

    Args:
        **options: those below, those of `wellposed.model_options.TransJectOptions`, and Hugging
            Face's.

    Keyword Args:
        vocab_size (int): number of tokens.
        max_position_embeddings (int): longest sequence if positions are learned; sines have no
            limit.
        hidden_size (int): width d of a token, even: half for the token, half for its position.
        num_hidden_layers (int): number of layers, L.
        spectrum_eps (float): added to the divisors of the spectrum and of normalised gates; above
            0.
        gating (str): pooled, or normalized (needed for a certificate).
        residual (str): rezero, the identity at the start, or sigmoid.
        position (str): sinusoidal or learned.
        dropout (float): in the feed-forward, in [0, 1). Distances are preserved in evaluation only.
        reconstruction_weight (float): of the training loss that fits a Gram spectrum's basis; 0: no
            loss.
        pooling (str): how a classifier pools tokens: mean, first or max.
        tie_word_embeddings (bool): share the token embedding with the output layer, after a map
            d -> d/2.
        is_causal (bool): hide later tokens; default: language models do, classifiers do not.
        pad_token_id (int): padding token.
        bos_token_id (int): first token of a text.
        eos_token_id (int | list[int]): token, or tokens, at which generation ends.
        use_cache (bool): whether `generate` keeps the running sums of the prefix.

    Raises:
        ConfigError: values out of range, unknown names or keys, in one message.

    >>> TransJectConfig(hidden_size=63)
    Traceback (most recent call last):
    wellposed.errors.ConfigError: TransJectConfig: 1 value is not usable:
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
        """Return one line for each value from which no model can be built."""
        problems = super().problems()
        if fits(self.hidden_size, Size) and self.hidden_size % 2:
            problems.append(
                f"hidden_size = {self.hidden_size}, expected an even number: half for a token, half"
                " for its position"
            )
        return problems
