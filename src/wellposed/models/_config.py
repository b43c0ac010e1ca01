"""The configuration of our models: Hugging Face's, with every value checked."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from wellposed.errors import ConfigError, listed, nearest_names
from wellposed.models._init import INITS
from wellposed.models._part_options import part_option_problems
from wellposed.models._pooling import POOLINGS
from wellposed.nn import ACTIVATIONS, ATTENTIONS, FEEDFORWARDS, NORMS, POSITIONS, RESIDUALS
from wellposed.registry import Registry

_NAMED: dict[str, Registry[Any]] = {
    "attention": ATTENTIONS,
    "feedforward": FEEDFORWARDS,
    "residual": RESIDUALS,
    "norm": NORMS,
    "activation": ACTIVATIONS,
    "position": POSITIONS,
    "init": INITS,
    "pooling": POOLINGS,
}
_SIZES = (
    "vocab_size",
    "max_position_embeddings",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
_PROBABILITIES = ("dropout", "attention_dropout")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

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


class WellposedConfig(PreTrainedConfig):
    """What a wellposed model is made of; each name is looked up in a registry of `wellposed.nn` or `wellposed.models`.

    Args:
        vocab_size: number of tokens.
        max_position_embeddings: longest sequence, in tokens.
        hidden_size: width D of a token.
        num_hidden_layers: number of blocks.
        num_attention_heads: number of heads; divides D.
        intermediate_size: width of the feed-forward layer; 4 D where None.
        activation: relu or gelu.
        attention: registered attention.
        feedforward: registered feed-forward.
        norm: where LayerNorm stands: pre, post or none.
        residual: plain is x + f(x), rezero is x + a f(x) with a learnt from 0.
        qk_norm: normalise queries and keys per head.
        position: learned or sinusoidal.
        scale_embeddings: multiply token and position vectors by sqrt(D) (Vaswani et al. 2017, sec. 3.4), so that the
            entries of a token have variance one under `init="xavier"`.
        tie_word_embeddings: share the token embedding with the output layer of a language model.
        dropout: on embeddings and on both branches of a block, in [0, 1).
        attention_dropout: on attention weights, in [0, 1).
        init: registered initialisation.
        pooling: how a classifier pools tokens: mean, first or max.
        contractive: Lipschitz constant below 1 of attention l2_contractive; 0.9 where None.
        lipschitz_norm: norm of that constant: tok, inf or 2.
        query_width: 1 or 2: columns of the shared query and key projection of an L2 attention, in widths of a head.
        l2_init_scale: s of init kim2021; 2^-4 where None.
        cosine_eps: eps of attention cosine, > 0.
        is_causal: whether a token is kept from later ones; None lets the head say: a language model is causal, a
            classifier is not.
        layer_norm_eps: epsilon of every LayerNorm.
        pad_token_id: token that fills up a batch.
        bos_token_id: first token of a text.
        eos_token_id: token, or tokens, at which generation ends.
        use_cache: whether `generate` keeps keys and values.
        **kwargs: what every Hugging Face configuration takes: `num_labels`, `id2label`, `dtype`, ...

    Raises:
        ConfigError: values out of range, names that are not registered or keys that nobody reads, all in one message.

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

    vocab_size: int = 256
    max_position_embeddings: int = 512
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int | None = None
    activation: str = "gelu"
    attention: str = "dot_product"
    feedforward: str = "mlp"
    norm: str = "post"
    residual: str = "plain"
    qk_norm: bool = False
    position: str = "learned"
    scale_embeddings: bool = True
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init: str = "xavier"
    pooling: str = "mean"
    contractive: float | None = None
    lipschitz_norm: str = "tok"
    query_width: int = 1
    l2_init_scale: float | None = None
    cosine_eps: float = 0.01
    is_causal: bool | None = None
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        unknown = _unknown_keys(self, kwargs)
        if self.intermediate_size is None and _is_size(self.hidden_size):
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)
        self.check(unknown)

    def check(self, problems: list[str] | None = None) -> None:
        """Raise `ConfigError` naming every value that no model can be built from."""
        problems = [*(problems or []), *_problems(self)]
        if problems:
            count = "1 value is" if len(problems) == 1 else f"{len(problems)} values are"
            raise ConfigError(f"{type(self).__name__}: {count} not usable:\n{listed(problems)}")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _problems(config: WellposedConfig) -> list[str]:
    problems = []
    for name in _SIZES:
        value = getattr(config, name)
        if not _is_size(value):
            problems.append(f"{name}: received {value!r}; expected an integer >= 1")
    for name in _PROBABILITIES:
        value = getattr(config, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
            problems.append(f"{name}: received {value!r}; expected a number in [0, 1)")
    for name, registry in _NAMED.items():
        value = getattr(config, name)
        if value not in registry:
            nearest = ", ".join(nearest_names(str(value), registry))
            problems.append(f"{name}: unknown {registry.kind} {value!r}; nearest: {nearest}")
    return [*problems, *_token_problems(config), *_combination_problems(config)]


def _token_problems(config: WellposedConfig) -> list[str]:
    if not _is_size(config.vocab_size):
        return []
    problems = []
    for name in _TOKENS:
        value = getattr(config, name)
        problems += [
            f"{name}: received {token!r}; expected a token in [0, {config.vocab_size})"
            for token in (value if isinstance(value, (list, tuple)) else [value])
            if token is not None and not 0 <= token < config.vocab_size
        ]
    return problems


def _combination_problems(config: WellposedConfig) -> list[str]:
    problems = part_option_problems(config, _NAMED)
    width, heads = config.hidden_size, config.num_attention_heads
    if _is_size(width) and _is_size(heads):
        if width % heads:
            problems.append(f"hidden_size: received {width}; expected a multiple of num_attention_heads = {heads}")
        elif config.qk_norm and width == heads:
            problems.append("qk_norm: received True with heads of dimension 1, whose LayerNorm is 0; use fewer heads")
    if not config.layer_norm_eps > 0:
        problems.append(f"layer_norm_eps: received {config.layer_norm_eps!r}; expected a number > 0")
    labels = config.num_labels
    if labels is not None and labels < 1:
        problems.append(f"num_labels: received {labels}; expected at least 1")
    return problems


def _unknown_keys(config: WellposedConfig, kwargs: dict[str, Any]) -> list[str]:
    """List keys that neither this class nor Hugging Face reads; a misspelt option must not pass in silence."""
    fields = set(type(config).__dataclass_fields__)
    accepted = fields | _HUGGING_FACE | set(GenerationConfig().to_dict())
    return [
        f"{key}: unknown key; nearest: {', '.join(nearest_names(key, fields))}"
        for key in kwargs
        if key not in accepted and not key.startswith("_") and key != "per_layer_config"
    ]
