"""The options of a model, free of torch: each part declares those it reads, once, and
`ModelOptions` is all of them.

A part is what a field of a configuration names: an attention, an initialisation, an architecture.
`read_by` says which parts read an options class, so that an option which no chosen part reads can
be refused, and one is dropped together with its part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from wellposed.options import CheckedOptions, Ge, Gt, Lt, Positive, Rate, Size

Options = TypeVar("Options", bound="PartOptions")
Depth: TypeAlias = Annotated[int, Ge(0), Lt(1_000_000)]
"""Number of blocks; building more would not end."""


@dataclass(frozen=True)
class PartOptions(CheckedOptions):
    """Options that some parts read: a frozen dataclass marked with `read_by`."""

    @classmethod
    def of(cls: type[Options], config: object) -> Options:
        """Return the options as ``config`` has them; those that it lacks are at their defaults."""
        return cls(**{item.name: getattr(config, item.name, item.default) for item in fields(cls)})


_READERS: dict[str, dict[str, list[type[PartOptions]]]] = {}


def read_by(**parts: str | tuple[str, ...]) -> Callable[[type[Options]], type[Options]]:
    """Return a decorator that says which parts read the options of a class.

    Args:
        parts: names of parts by the field that chooses one, such as ``attention=("l2",
            "l2_tied")``. Where parts of two fields read an option, each of the two must be chosen.

    >>> @read_by(attention="windowed")
    ... @dataclass(frozen=True)
    ... class WindowOptions(PartOptions):
    ...     window: Size = 64
    >>> options_read("attention", "windowed")
    {'window'}
    """

    def declare(options: type[Options]) -> type[Options]:
        for kind, names in parts.items():
            for name in (names,) if isinstance(names, str) else names:
                _READERS.setdefault(kind, {}).setdefault(name, []).append(options)
        return options

    return declare


def readers(kind: str) -> Mapping[str, list[type[PartOptions]]]:
    """Return the options classes of each part of this kind that has any."""
    return _READERS.get(kind, {})


def options_read(kind: str, name: str) -> set[str]:
    """Return the options that only some parts of this kind read, of those that the part ``name``
    reads."""
    return {item.name for options in readers(kind).get(name, ()) for item in fields(options)}


def options_of(kind: str) -> dict[str, Field[Any]]:
    """Return the options that only some parts of this kind read."""
    found = readers(kind).values()
    return {item.name: item for classes in found for each in classes for item in fields(each)}


def unread_options(config: object, chosen: Mapping[str, Collection[str]]) -> list[str]:
    """Return one line for each option of ``config`` that is off its default and that no chosen part
    reads.

    Args:
        config: what holds the options.
        chosen: names of the chosen parts by field, for instance ``{"attention": {"l2_tied"}}``.
    """
    missing: dict[str, list[str]] = {}
    defaults: dict[str, Any] = {}
    for kind, names in chosen.items():
        read = {option for name in names for option in options_read(kind, name)}
        for name, item in options_of(kind).items():
            if name not in read and getattr(config, name, item.default) != item.default:
                able = [reader for reader in readers(kind) if name in options_read(kind, reader)]
                missing.setdefault(name, []).append(f"{kind} {' or '.join(map(repr, able))}")
                defaults[name] = item.default
    return [
        f"{name} = {getattr(config, name)!r}, which only {' with '.join(parts)} reads; "
        f"leave it {defaults[name]!r}"
        for name, parts in missing.items()
    ]


def head_problems(width: int, heads: int) -> list[str]:
    """Return one line if a number of heads does not divide the width of a token."""
    if width % heads == 0:
        return []
    below = width - width % heads
    uneven = f"hidden_size = {width} is not divisible by num_attention_heads = {heads}"
    return [f"{uneven}; {below or heads} or {below + heads} would be"]


@dataclass(frozen=True)
class ArchitectureOptions(CheckedOptions):
    """The choice of an architecture."""

    architecture: str = "wellposed"
    """Registered architecture."""


@dataclass(frozen=True)
class SharedOptions(PartOptions):
    """Options of every architecture."""

    hidden_size: Size = 128
    """Width D of a token."""
    num_hidden_layers: Depth = 2
    """Number of blocks; 0 is the control without any, a bag of tokens."""
    tie_word_embeddings: bool = True
    """Share the token embedding with the output layer of a language model."""
    dropout: Rate = 0.0
    """Dropout on embeddings and sublayer outputs."""


@read_by(architecture="wellposed")
@dataclass(frozen=True)
class HeadOptions(PartOptions):
    """Sizes of a Transformer's block."""

    num_attention_heads: Size = field(default=4, metadata={"neutral": 1})
    """Number of heads; must divide hidden_size."""
    intermediate_size: Size | None = None
    """Width of the feed-forward layer; 4 x hidden_size where not given."""


@read_by(architecture=("wellposed", "transject"))
@dataclass(frozen=True)
class TokenOptions(PartOptions):
    """Position codes, and how a classifier pools tokens into one vector."""

    position: Literal["learned", "sinusoidal", "none"] = "learned"
    """Position code; none where the attention knows positions."""
    pooling: Literal["mean", "first", "max"] = "mean"
    """How a classifier pools tokens."""


@read_by(architecture="wellposed")
@dataclass(frozen=True)
class TransformerOptions(PartOptions):
    """The parts of a Transformer."""

    attention: str = "dot_product"
    """Registered attention."""
    feedforward: str = "mlp"
    """Registered feed-forward."""
    norm: Literal["pre", "post", "none", "dyt"] = "post"
    """Where LayerNorm stands; dyt: where pre has one, gamma tanh(alpha x) + beta (Zhu et al. 2025)."""
    residual: str = "plain"
    """Registered residual: plain is x + f(x), rezero is x + a f(x), convex is (1 - a) x + a f(x), a
    learnt, and mean that with a = 1/n for n residuals."""
    qk_norm: bool = False
    """Normalise queries and keys per head."""
    attention_dropout: Rate = 0.0
    """Dropout on attention weights."""
    init: str = "xavier"
    """Initial weights."""
    num_decoder_layers: Annotated[Depth, Ge(1)] | None = None
    """Number of decoder blocks of an encoder-decoder; num_hidden_layers where not given."""
    share_embeddings: bool = True
    """One token embedding for source and target of an encoder-decoder."""
    scale_embeddings: bool = True
    """Multiply token and position vectors by sqrt(D)."""
    unit_embeddings: bool = False
    """Token vectors of norm 1, which are then not multiplied by sqrt(D)."""
    ball_embeddings: bool = False
    """Token vectors inside the unit ball, words that say nothing short; not multiplied by sqrt(D) either."""


@read_by(architecture="wellposed", feedforward="mlp")
@dataclass(frozen=True)
class MLPOptions(PartOptions):
    """Options of the feed-forward with a scalar nonlinearity."""

    activation: Literal["relu", "gelu", "unit_gelu"] = "gelu"
    """Feed-forward nonlinearity; unit_gelu is gelu over its largest slope."""


@read_by(norm="dyt")
@dataclass(frozen=True)
class DynamicTanhOptions(PartOptions):
    """Options of the tanh that stands in the place of LayerNorm."""

    dyt_alpha: Positive = 0.5
    """alpha of norm dyt at the start."""


@read_by(position="sinusoidal")
@dataclass(frozen=True)
class SinusoidalOptions(PartOptions):
    """Options of sinusoidal position codes."""

    position_scale: Positive | None = None
    """Factor on sinusoidal positions. None is 1, and under init t_fixup the factor that T-Fixup
    puts on the token embeddings of the same stack, so that tokens and positions keep their
    proportion (in the code of Huang et al. 2020 positions are added unscaled and are twice as long
    as tokens)."""


@read_by(init="kim2021")
@dataclass(frozen=True)
class Kim2021Options(PartOptions):
    """The initial weights of Kim et al. (2021), appendix I."""

    l2_init_scale: Positive | None = None
    """s of init kim2021: L2 attention starts from U(-s, s) / sqrt(D); 2^-4 where not given."""


@read_by(attention=("l2", "l2_tied"))
@dataclass(frozen=True)
class L2Options(Kim2021Options):
    """Options of every L2 attention."""

    query_width: Literal[1, 2] = 1
    """1 or 2: columns of the shared query and key projection of an L2 attention, in widths of a head."""


@read_by(attention="l2_contractive")
@dataclass(frozen=True)
class ContractiveOptions(L2Options):
    """Options of contractive L2 attention, which is divided by its Lipschitz bound."""

    contractive: Annotated[float, Gt(0), Lt(1)] | None = None
    """Lipschitz constant, below 1, that attention l2_contractive is scaled to; 0.9 where not given."""
    lipschitz_norm: Literal["tok", "inf", "2"] = "tok"
    """Norm in which l2_contractive is a contraction."""
    contractive_bound: Literal["sharp", "kim2021"] = "sharp"
    """What l2_contractive divides by: the least bound that is proved here, or that of Kim et al.
    (2021), Theorem 3.2, which has norms inf and 2 only."""


@read_by(attention="cosine")
@dataclass(frozen=True)
class CosineOptions(PartOptions):
    """Options of cosine attention."""

    cosine_eps: Positive = 0.01
    """eps of cosine attention: a vector a is replaced by a / sqrt(|a|^2 + eps)."""


@read_by(attention="ball")
@dataclass(frozen=True)
class BallOptions(PartOptions):
    """Options of attention on the unit ball."""

    ball_temperature: Positive = 2.0
    """Temperature of every head of attention ball at the start; it is learnt between 0 and ball_max_temperature."""
    ball_max_temperature: Positive = 10.0
    """No head of attention ball has a larger temperature."""


@read_by(residual="budget")
@dataclass(frozen=True)
class BudgetOptions(PartOptions):
    """Options of the residual that has a share of a Lipschitz budget."""

    budget: Annotated[float, Gt(1)] = 2.0
    """L of residual budget: all residuals together multiply distances by at most L, if no branch multiplies any."""


@read_by(architecture="transject")
@dataclass(frozen=True)
class TransJectOptions(PartOptions):
    """Options of TransJect alone."""

    num_experts: Size = 1
    """Expert mixtures of TransJect: number of experts in a layer."""
    spectrum: Literal["gram", "random"] = "gram"
    """Spectrum of TransJect's attention: estimated from the embedded tokens, or a learnt vector."""
    spectrum_norm: Literal["max", "trace"] = "max"
    """What a Gram spectrum is divided by; trace gives the whole map a certificate."""


@dataclass(frozen=True)
class ModelOptions(
    TransJectOptions,
    BudgetOptions,
    BallOptions,
    CosineOptions,
    ContractiveOptions,
    DynamicTanhOptions,
    MLPOptions,
    TransformerOptions,
    TokenOptions,
    HeadOptions,
    SharedOptions,
    ArchitectureOptions,
):
    """The model to build; the names are those of `wellposed.models.WellposedConfig`."""

    def problems(self) -> list[str]:
        """Return a line if the heads of an architecture that has any do not divide its width."""
        has_heads = "num_attention_heads" in options_read("architecture", self.architecture)
        return head_problems(self.hidden_size, self.num_attention_heads) if has_heads else []

    def with_parts(self, **changes: Any) -> ModelOptions:
        """Return the options with ``changes``; those that only the parts given up read are at their
        defaults again.

        >>> options = ModelOptions(attention="l2_contractive", contractive=0.5, query_width=2)
        >>> options.with_parts(attention="l2_tied").query_width, options.with_parts(attention="l2_tied").contractive
        (2, None)
        >>> options.with_parts(attention="dot_product") == ModelOptions()
        True
        """
        dropped = {}
        for kind, chosen in changes.items():
            left = options_of(kind).keys() - options_read(kind, chosen)
            dropped |= {
                name: options_of(kind)[name].default for name in left if hasattr(self, name)
            }
        return replace(self, **{**dropped, **changes})
