"""Options of a model; imports no torch.

Each part (an attention, an initialisation) declares the options that it reads, marked by `read_by`;
`ModelOptions` has all. An option that no chosen part reads is refused, and goes with its part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from wellposed.options import CheckedOptions, Ge, Gt, Lt, Positive, Rate, Size

Options = TypeVar("Options", bound="PartOptions")
Depth: TypeAlias = Annotated[int, Ge(0), Lt(1_000_000)]
"""Number of blocks; more would take forever to build."""


@dataclass(frozen=True)
class PartOptions(CheckedOptions):
    """Options that some parts read: a frozen dataclass marked with `read_by`."""

    @classmethod
    def from_config(cls: type[Options], config: object) -> Options:
        """Return the options as in ``config``; missing ones have their defaults."""
        return cls(**{item.name: getattr(config, item.name, item.default) for item in fields(cls)})


_READERS: dict[str, dict[str, list[type[PartOptions]]]] = {}


def read_by(**parts: str | tuple[str, ...]) -> Callable[[type[Options]], type[Options]]:
    """Return a decorator that records which parts read the options of a class.

    ``parts`` maps fields to names, as ``attention=("l2", "l2_tied")``. With several fields, a
    chosen part of each must read the option.

    >>> options_read("attention", "cosine")
    {'cosine_eps'}
    """

    def declare(options: type[Options]) -> type[Options]:
        for kind, names in parts.items():
            for name in (names,) if isinstance(names, str) else names:
                _READERS.setdefault(kind, {}).setdefault(name, []).append(options)
        return options

    return declare


def readers(kind: str) -> Mapping[str, list[type[PartOptions]]]:
    """Return the options classes of each part of this kind, if it has any."""
    return _READERS.get(kind, {})


def options_read(kind: str, name: str) -> set[str]:
    """Return the part-specific options that the part ``name`` of this kind reads."""
    return {item.name for options in readers(kind).get(name, ()) for item in fields(options)}


def options_of(kind: str) -> dict[str, Field[Any]]:
    """Return the options that only some parts of this kind read."""
    by_part = readers(kind).values()
    return {item.name: item for classes in by_part for kinds in classes for item in fields(kinds)}


def unread_options(config: object, chosen: Mapping[str, Collection[str]]) -> list[str]:
    """Return one line per changed option that no part in ``chosen`` (names by field) reads."""
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
    """Return one line if the number of heads does not divide the width of a token."""
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
    """Width of the feed-forward layer; default: 4 x hidden_size."""


@read_by(architecture=("wellposed", "transject"))
@dataclass(frozen=True)
class TokenOptions(PartOptions):
    """Position codes, and how a classifier pools tokens into one vector."""

    position: Literal["learned", "sinusoidal", "none"] = "learned"
    """Position code; use none if the attention encodes positions."""
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
    norm: Literal["pre", "post", "none", "dyt", "derf"] = "post"
    """Position of LayerNorm; dyt is pre with gamma tanh(alpha x) + beta (Zhu et al. 2025), derf with
    gamma erf(alpha x + s) + beta (Chen et al. 2025)."""
    residual: str = "plain"
    """Registered residual: plain x + f(x); rezero x + a f(x); convex (1 - a) x + a f(x), with learnt
    a; mean: convex with a = 1/n for n residuals; ngpt: x + a (n(f(x)) - x), divided by its norm."""
    qk_norm: bool = False
    """Normalise queries and keys per head."""
    attention_dropout: Rate = 0.0
    """Dropout on attention weights."""
    init: str = "xavier"
    """Initial weights."""
    num_decoder_layers: Annotated[Depth, Ge(1)] | None = None
    """Number of decoder blocks of an encoder-decoder; default: num_hidden_layers."""
    share_embeddings: bool = True
    """One token embedding for source and target of an encoder-decoder."""
    scale_embeddings: bool = True
    """Multiply token and position vectors by sqrt(D)."""
    unit_embeddings: bool = False
    """Token vectors of norm 1, not multiplied by sqrt(D)."""
    ball_embeddings: bool = False
    """Token vectors in the unit ball (uninformative words are short), not multiplied by sqrt(D)."""
    logit_gain: bool = False
    """Multiply each logit of a language model by a learnt factor, 1 at the start."""


@read_by(architecture="wellposed", feedforward="mlp")
@dataclass(frozen=True)
class MLPOptions(PartOptions):
    """Options of the feed-forward with a scalar nonlinearity."""

    activation: Literal["relu", "gelu", "unit_gelu"] = "gelu"
    """Feed-forward nonlinearity; unit_gelu is gelu over its largest slope."""


@read_by(norm="dyt")
@dataclass(frozen=True)
class DynamicTanhOptions(PartOptions):
    """Options of the tanh that replaces LayerNorm."""

    dyt_alpha: Positive = 0.5
    """Initial alpha of norm dyt."""


@read_by(norm="derf")
@dataclass(frozen=True)
class DynamicErfOptions(PartOptions):
    """Options of the error function that replaces LayerNorm."""

    derf_alpha: Positive = 0.5
    """Initial alpha of norm derf."""


@read_by(position="sinusoidal")
@dataclass(frozen=True)
class SinusoidalOptions(PartOptions):
    """Options of sinusoidal position codes."""

    position_scale: Positive | None = None
    """Factor on sinusoidal positions; default: 1, or with init t_fixup the factor of T-Fixup on the
    token embeddings of the stack, which keeps their proportion. The code of Huang et al. 2020 adds
    positions unscaled, twice as long as tokens."""


@read_by(init="kim2021")
@dataclass(frozen=True)
class Kim2021Options(PartOptions):
    """The initial weights of Kim et al. (2021), appendix I."""

    l2_init_scale: Positive | None = None
    """s of init kim2021: L2 attention starts from U(-s, s) / sqrt(D); default: 2^-4."""


@read_by(attention=("l2", "l2_tied"))
@dataclass(frozen=True)
class L2Options(Kim2021Options):
    """Options of every L2 attention."""

    query_width: Literal[1, 2] = 1
    """Columns of the shared query and key projection of L2 attention, in head widths: 1 or 2."""


@read_by(attention="l2_contractive")
@dataclass(frozen=True)
class ContractiveOptions(L2Options):
    """Options of contractive L2 attention, which is divided by its Lipschitz bound."""

    contractive: Annotated[float, Gt(0), Lt(1)] | None = None
    """Lipschitz constant, below 1, that l2_contractive is scaled to; default: 0.9."""
    lipschitz_norm: Literal["tok", "inf", "2"] = "tok"
    """Norm in which l2_contractive is a contraction."""
    contractive_bound: Literal["sharp", "kim2021"] = "sharp"
    """Divisor of l2_contractive: the smallest bound proved here, or that of Kim et al. (2021), Theorem
    3.2, for norms inf and 2 only."""


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
    """Initial temperature of each head of attention ball, learnt between 0 and the maximum."""
    ball_max_temperature: Positive = 10.0
    """Largest temperature of a head of attention ball."""


@read_by(residual="ngpt")
@dataclass(frozen=True)
class NGPTOptions(PartOptions):
    """Options of the residual that keeps states on the unit sphere."""

    ngpt_alpha: Positive = 0.05
    """First value of the eigen learning rates of residual ngpt."""


@read_by(residual="budget")
@dataclass(frozen=True)
class BudgetOptions(PartOptions):
    """Options of the residual with a share of a Lipschitz budget."""

    budget: Annotated[float, Gt(1)] = 2.0
    """L of residual budget: all residuals together expand distances at most L-fold, if no branch does."""


@read_by(architecture="transject")
@dataclass(frozen=True)
class TransJectOptions(PartOptions):
    """Options of TransJect alone."""

    num_experts: Size = 1
    """Number of experts in a layer of TransJect."""
    spectrum: Literal["gram", "random", "redrawn"] = "gram"
    """Spectrum of TransJect's attention: estimated from embedded tokens, a learnt vector, or a vector
    drawn anew in each pass, in evaluation too."""
    spectrum_norm: Literal["max", "trace"] = "max"
    """Divisor of a Gram spectrum; trace gives the whole map a certificate."""
    feedforward_bias: bool = False
    """Whether TransJect's feed-forward has the biases b1 and b2 of Sengupta et al. 2023."""


@dataclass(frozen=True)
class ModelOptions(
    TransJectOptions,
    BudgetOptions,
    NGPTOptions,
    BallOptions,
    CosineOptions,
    ContractiveOptions,
    DynamicErfOptions,
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
        """Return a line if the heads, if any, do not divide the width."""
        has_heads = "num_attention_heads" in options_read("architecture", self.architecture)
        return head_problems(self.hidden_size, self.num_attention_heads) if has_heads else []

    def with_parts(self, **changes: Any) -> ModelOptions:
        """Return the options with ``changes``; options of replaced parts get their defaults.

        >>> options = ModelOptions(attention="l2_contractive", contractive=0.5)
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
