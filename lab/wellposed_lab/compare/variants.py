"""Variants: functions from a base `RunConfig` to the `RunConfig` of one kind of Transformer.

A new one is a function here, or in a module that imports `VARIANTS`. ``name:value`` passes a number
(or a text if annotated ``str``): ``oc3:1e-4``. Options of the base that only apply to replaced
parts are dropped; `check_options` reports this, and refuses to drop others.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from wellposed import presets
from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed.options import flat_options
from wellposed.presets import zhang2021
from wellposed.registry import Registry
from wellposed_lab.tasks.task import TASKS
from wellposed_lab.training.config import STRENGTHS, PenaltyOptions, RunConfig, TrainOptions

PARTS = ["architecture", "attention", "feedforward", "norm", "residual", "qk_norm"]
PARTS += ["unit_embeddings", "ball_embeddings", "logit_gain"]
"""Parts of a model that a variant resets to the defaults, except those that it changes."""
REPLACEABLE = ("model.", "train.warmup_", "start.dt_fixup")
"""Options that a variant may set itself: architecture, initial weights and warm-up."""
SQUARED = ("attention", "feedforward")
"""Strengths whose penalty is a squared norm in the form ``paper``; the others use the norm."""
Variant = Callable[..., RunConfig]
VARIANTS: Registry[Variant] = Registry(
    "variant", entry_points="wellposed.variants", elsewhere={"lstm": "wellposed-studies"}
)


def apply_variant(spec: str, base: RunConfig) -> RunConfig:
    """Return the configuration of variant ``spec`` (``name`` or ``name:value``) built on ``base``.

    Raises:
        ConfigError: an unknown variant (nearest three named), a value that is no number or not
            taken, or an architecture if ``base`` starts from a model (usable variants are listed).

    >>> apply_variant("pre_ln", RunConfig(task="listops")).model.norm
    'pre'
    >>> apply_variant("oc1:1e-4", RunConfig(task="listops")).penalty.affinity
    0.0001
    """
    name, colon, text = spec.partition(":")
    variant = VARIANTS.get(name)
    values = [_value(spec, name, text, variant)] if colon else []
    try:
        return replace(variant(base, *values), variant=spec)
    except _OwnArchitectureError:
        raise ConfigError(
            f"variant {spec!r} makes its own architecture, but {base.start.model} already has one;"
            f" variants for such a model: {', '.join(_of_start_model(base))}"
        ) from None


def check_options(
    base: RunConfig, variants: Sequence[str], *, asked_of: RunConfig | None = None
) -> list[str]:
    """Refuse options of ``base`` that a variant would drop; return a line for each that it sets.

    Options that change ``asked_of``, the base before the command line, must reach a variant.

    Raises:
        ConfigError: all options that the first such variant drops, or that no variant reads.

    >>> base = RunConfig("listops", train=TrainOptions(warmup_steps=9))
    >>> check_options(base, ["post_ln", "t_fixup"])
    ['t_fixup: train.warmup_steps = 0 in the place of 9']
    """
    replaced = {spec: _replaced_options(base, spec) for spec in variants}
    problems = []
    for spec, options in replaced.items():
        lines = {
            k: f"{k} = {used!r} in the place of {value!r}" for k, (value, used) in options.items()
        }
        lost = [line for k, line in lines.items() if not k.startswith(REPLACEABLE)]
        if lost:
            raise ConfigError(
                f"variant {spec!r} would take {', '.join(lost)}, so the options would not reach"
                " every variant; leave them out, or the variant"
            )
        problems += [f"{spec}: {', '.join(lines.values())}"] if lines else []

    asked, before = (flat_options((config or base).to_dict()) for config in (base, asked_of))
    unread = sorted(
        name
        for name in set(asked).intersection(*replaced.values())
        if asked[name] != before.get(name)
    )
    if unread:
        names = ", ".join(f"{name} = {asked[name]!r}" for name in unread)
        raise ConfigError(f"{names}: no variant of {', '.join(variants)} reads it; leave it out")

    return problems


def _replaced_options(base: RunConfig, spec: str) -> dict[str, tuple[Any, Any]]:
    """Return old and new value of each option of ``base`` that a variant fixes otherwise."""
    fields = dataclasses.fields(TASKS.get(base.task).options)
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    start = replace(type(base.start)(base.start.model), from_scratch=base.start.from_scratch)
    usual = RunConfig(base.task, {**base.task_options, **defaults}, start=start)
    used = apply_variant(spec, base)
    applied = apply_variant(spec, usual)
    configs = (base, usual, used, applied)
    asked, plain, constrained, alone = (flat_options(config.to_dict()) for config in configs)
    replaced = {
        name: (value, constrained.get(name))
        for name, value in asked.items()
        if name != "variant" and value not in (plain.get(name), constrained.get(name))
        if constrained.get(name) == alone.get(name)
    }
    for name in STRENGTHS[1:]:  # the affinity has only one form
        forms = _form(base.penalty, name), _form(used.penalty, name)
        if asked[f"penalty.{name}"] and asked[f"penalty.{name}"] == constrained[f"penalty.{name}"]:
            replaced |= {f"penalty.{name}'s form": forms} if forms[0] != forms[1] else {}

    return replaced


def _form(penalty: PenaltyOptions, strength: str) -> str:
    chosen = penalty.feedforward_form if strength == "feedforward" else "same"
    form = penalty.form if chosen == "same" else chosen
    return form if form != "paper" else "gram_squared" if strength in SQUARED else "gram"


def variant_folder(spec: str) -> str:
    """Return the folder name of a variant, such as ``oc3-1e-4`` for ``oc3:1e-4``."""
    return spec.replace(":", "-")


def summary(name: str) -> str:
    """Return the first paragraph of the variant's description, as one line."""
    return (inspect.getdoc(VARIANTS.get(name)) or "").partition("\n\n")[0].replace("\n", " ")


class _OwnArchitectureError(ConfigError):
    """A variant that makes an architecture was applied to a configuration with a start model."""


def _of_start_model(base: RunConfig) -> list[str]:
    names = []
    for name in VARIANTS:
        with suppress(ConfigError):
            VARIANTS.get(name)(base)
            names.append(name)
    return names


def _value(spec: str, name: str, text: str, variant: Variant) -> float | str:
    parameters = list(inspect.signature(variant).parameters.values())
    if len(parameters) < 2:
        raise ConfigError(f"variant {spec!r}: {name} takes no value; write {name!r}")
    if parameters[1].annotation in (str, "str"):
        return text
    with suppress(ValueError):
        value = float(text)
        if math.isfinite(value):
            return value
    received = f"{parameters[1].name} must be a finite number, received {text[:40]!r}"
    problem = f"{received}; write {name}:1e-2, for instance"
    raise ConfigError(f"variant {spec!r}: {problem}")


def _with_model(base: RunConfig, **changes: Any) -> RunConfig:
    if base.start.model:
        raise _OwnArchitectureError(f"{base.start.model} has its own architecture")
    plain = {name: getattr(ModelOptions(), name) for name in PARTS}
    if base.model.init == "t_fixup":
        # Only the variant of that name uses it; with norms it is refused.
        plain["init"] = "xavier"
    start = replace(base.start, dt_fixup=0)
    return replace(base, start=start, model=base.model.with_parts(**{**plain, **changes}))


def _baseline(base: RunConfig) -> RunConfig:
    return base if base.start.model else post_ln(base)


def _penalized(base: RunConfig, keywords: dict[str, Any]) -> RunConfig:
    """Add a penalty to the base's own penalties, which keep their strengths and forms."""
    if base.penalty.active and base.penalty.form == "paper":
        keywords = {
            **keywords,
            "form": "paper",
        }  # the same form as the preset for its strengths
    return replace(_baseline(base), penalty=replace(base.penalty, **keywords))


@VARIANTS.register("plain")
def plain(base: RunConfig) -> RunConfig:
    """The options as given: the baseline for a model of --from."""
    return base


@VARIANTS.register("windows")
def windows(base: RunConfig, words: str = "1") -> RunConfig:
    """The options as given, reading windows of 1 word (or value) that vote: certified in words."""
    count = int(words) if words.isdecimal() else words
    return replace(base, task_options={**base.task_options, "certified_windows": count})


@VARIANTS.register("post_ln")
def post_ln(base: RunConfig) -> RunConfig:
    """LayerNorm after each residual sum (Vaswani et al. 2017): the baseline."""
    return _with_model(base)


@VARIANTS.register("pre_ln")
def pre_ln(base: RunConfig) -> RunConfig:
    """LayerNorm before each sublayer and one at the end (Xiong et al. 2020)."""
    return _with_model(base, norm="pre")


@VARIANTS.register("rezero")
def rezero(base: RunConfig) -> RunConfig:
    """x + a f(x) with a learnt from zero and no LayerNorm (Bachlechner et al. 2021)."""
    return _with_model(base, norm="none", residual="rezero")


@VARIANTS.register("dyt")
def dyt(base: RunConfig, alpha: float = 0.5) -> RunConfig:
    """pre_ln with gamma tanh(alpha x) + beta in place of LayerNorm; alpha starts at 0.5 or value
    (Zhu et al. 2025)."""
    return _with_model(base, norm="dyt", dyt_alpha=alpha)


@VARIANTS.register("derf")
def derf(base: RunConfig, alpha: float = 0.5) -> RunConfig:
    """pre_ln with gamma erf(alpha x + s) + beta in place of LayerNorm; alpha starts at 0.5 or value
    (Chen et al. 2025)."""
    return _with_model(base, norm="derf", derf_alpha=alpha)


@VARIANTS.register("ngpt")
def ngpt(base: RunConfig, alpha: float = 0.05) -> RunConfig:
    """States, embeddings and weights of norm 1, with learnt scales; eigen learning rates start at
    0.05 or value; no LayerNorm and no warm-up (Loshchilov et al. 2025).

    A feed-forward of three matrices is two thirds as wide, unless the base names its width: it has
    about as many parameters. A head that is not tied to the embedding is free.
    """
    parts = presets.ngpt(alpha)
    width = base.model.intermediate_size or max(1, round(8 * base.model.hidden_size / 3))
    config = _with_model(base, **parts, intermediate_size=width)
    return _constrained(_without_warmup(config), ("layers", "token_embedding"), to="hypersphere")


@VARIANTS.register("t_fixup")
def t_fixup(base: RunConfig) -> RunConfig:
    """x + f(x) with T-Fixup's initial weights, no LayerNorm and no warm-up (Huang et al. 2020).

    The base's warm-up is dropped; a schedule that is a warm-up becomes the paper's inverse_sqrt,
    with its ``decay_steps``. A model of --from needs ``--from-scratch``.
    """
    if base.start.model:
        scratch = base.start.from_scratch or Path(base.start.model).is_file()
        config = replace(base, start=replace(base.start, init="t_fixup", from_scratch=scratch))
    else:
        config = _with_model(base, norm="none", init="t_fixup")
    return _without_warmup(config)


@VARIANTS.register("mimetic")
def mimetic(base: RunConfig) -> RunConfig:
    """pre_ln with products of attention weights near multiples of the identity (Trockman and Kolter
    2023)."""
    return _with_model(base, norm="pre", init="mimetic")


@VARIANTS.register("dt_fixup")
def dt_fixup(base: RunConfig, batches: float = 20) -> RunConfig:
    """x + f(x) with DT-Fixup's weights from 20 (or value) batches of train, no LayerNorm and no
    warm-up (Xu et al. 2021).

    Warm-up and schedule are those of t_fixup. A model of --from keeps its embeddings; its layers
    and its head are drawn anew.
    """
    if batches < 1 or batches != int(batches):
        raise ConfigError(f"dt_fixup:{batches:g}: expected a whole number; write dt_fixup:20")
    config = base if base.start.model else _with_model(base, norm="none")
    return _without_warmup(replace(config, start=replace(config.start, dt_fixup=int(batches))))


def _without_warmup(config: RunConfig) -> RunConfig:
    warm = config.train.schedule in ("inverse_sqrt_warmup", "kim2021")
    schedule = "inverse_sqrt" if warm else config.train.schedule
    train = replace(config.train, warmup_steps=0, warmup_share=0.0, schedule=schedule)
    return replace(config, train=train)


@VARIANTS.register("qk_norm")
def qk_norm(base: RunConfig) -> RunConfig:
    """Pre-LN with queries and keys normalised per head (Henry et al. 2020; Dehghani et al. 2023)."""
    return _with_model(base, norm="pre", qk_norm=True)


@VARIANTS.register("l2")
def l2(base: RunConfig) -> RunConfig:
    """post_ln (with --from: plain) and L2 attention, free queries and keys (Kim et al. 2021): not Lipschitz."""
    return _with_attention(base, "l2")


@VARIANTS.register("l2_tied")
def l2_tied(base: RunConfig) -> RunConfig:
    """post_ln with L2 attention whose queries are its keys (Kim et al. 2021): Lipschitz."""
    return _with_model(base, attention="l2_tied")


@VARIANTS.register("l2_contractive")
def l2_contractive(base: RunConfig) -> RunConfig:
    """post_ln with L2 attention divided by its certified bound (Kim et al. 2021): a contraction."""
    return _with_model(base, attention="l2_contractive")


@VARIANTS.register("cosine")
def cosine(base: RunConfig) -> RunConfig:
    """post_ln (with --from: plain) and scaled cosine attention (Qi et al. 2023): Lipschitz under any mask."""
    return _with_attention(base, "cosine")


def _with_attention(base: RunConfig, name: Literal["l2", "cosine"]) -> RunConfig:
    if base.start.model:
        return replace(base, start=replace(base.start, attention=name))
    return _with_model(base, attention=name)


@VARIANTS.register("oc1")
def oc1(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """post_ln (with --from: plain) + VAR-I of Zhang et al. (2021): affinities, |A^T A - I|_F^2."""
    return _penalized(base, zhang2021("I", strength))


@VARIANTS.register("oc2")
def oc2(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """post_ln (with --from: plain) + VAR-II of Zhang et al. (2021): VAR-I and orthogonal attention weights."""
    return _penalized(base, zhang2021("II", strength))


@VARIANTS.register("oc3")
def oc3(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """post_ln (with --from: plain) + VAR-III of Zhang et al. (2021): VAR-II and orthogonal
    feed-forward weights."""
    return _penalized(base, zhang2021("III", strength))


@VARIANTS.register("oc3_printed")
def oc3_printed(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """oc3 with the feed-forward norms unsquared, as Zhang et al. (2021) print them."""
    config = oc3(base, strength)
    return replace(config, penalty=replace(config.penalty, feedforward_form="gram"))


def _of_role(role: str, form: str, strength: float, penalty: str) -> Variant:
    """Register and return the variant of a penalty on the weights of one role."""

    def variant(base: RunConfig, strength: float = strength) -> RunConfig:
        if not strength > 0:
            raise ConfigError(f"{role}:{strength:g}: expected a number above 0; write {role}:1e-2")
        return _penalized(base, {role: strength, "form": form})

    variant.__doc__ = f"post_ln (with --from: plain) + {penalty}."
    return VARIANTS.register(role)(variant)


key = _of_role("key", "gram", 1e-4, "|K K^T - I|_F on key weights K (McGrath 2024)")
_of_role("query", "gram", 1e-4, "|Q Q^T - I|_F on query weights Q (McGrath 2024)")
_of_role("value", "gram", 1e-4, "|V V^T - I|_F on value weights V (form of McGrath 2024)")
_of_role("embedding", "gram", 1e-4, "|E E^T - I|_F on token embeddings E (form of McGrath 2024)")
_ZHANG = "|W^T W - I|_F^2 on {} weights W: one term of oc3 alone"
_of_role("attention", "gram_squared", 1e-6, _ZHANG.format("attention"))
_of_role("feedforward", "gram_squared", 1e-6, _ZHANG.format("feed-forward"))


PAPER_WARMUP_STEPS = 4000
WARMUP_SHARE = 10


@VARIANTS.register("post_ln_warmup")
def post_ln_warmup(base: RunConfig, warmup_steps: float = 0) -> RunConfig:
    """post_ln with linear warm-up: of the base, else a tenth of the steps and at most 4,000
    (Vaswani et al. 2017).

    The value is the number of steps. inverse_sqrt, without warm-up, becomes inverse_sqrt_warmup.
    """
    config = post_ln(base)
    steps = config.train.steps
    if warmup_steps != int(warmup_steps) or warmup_steps < 0:
        problem = f"warmup_steps = {warmup_steps}, expected a whole number of steps, 1 or more"
        raise ConfigError(f"post_ln_warmup: {problem}")
    automatic = config.train.warmup_steps or min(PAPER_WARMUP_STEPS, max(1, steps // WARMUP_SHARE))
    schedule = config.train.schedule
    schedule = "inverse_sqrt_warmup" if schedule == "inverse_sqrt" else schedule
    train = replace(config.train, warmup_steps=int(warmup_steps) or automatic, schedule=schedule)
    return replace(config, train=train)


@VARIANTS.register("t_fixup_oc3")
def t_fixup_oc3(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """t_fixup + VAR-III of Zhang et al. (2021): no LayerNorm, no warm-up, orthogonality constraints."""
    return replace(t_fixup(base), penalty=oc3(base, strength).penalty)


TRANSFORMER_WEIGHTS = ("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj", "*.up_proj", "*.down_proj")
# Part of wellposed.nn.ORTHOGONAL_WEIGHTS, repeated here as that module imports torch.
TRANSJECT_WEIGHTS = ("*.left", "*.right", "*.up_proj", "*.down_proj")
SPECTRUM_WEIGHTS = ("*.basis",)
EMBEDDING = ("*.embeddings.token",)
# Its weights only rotate, and its branches are divided by L and start from zero, so it learns
# slowly at a Transformer's rate. Accuracy after 200 steps at 5, 20, 50 and 100 times 1e-3, width 64,
# three seeds: AG News 0.59, 0.80, 0.84, 0.83; IMDb 0.63, 0.74, 0.77, 0.76; ListOps 0.34, 0.38, 0.36,
# 0.35 (majority 0.26, 0.50, 0.12).
TRANSJECT_RATE = 50.0


# One pattern, so that it matches at least the head of a model without blocks.
LIPSCHITZ_WEIGHTS = (
    r"re:(.*\.)?([qkvo]_proj|up_proj|down_proj|classifier(\.(hidden|output))?|lm_head)",
)
# Logits of a 1-Lipschitz model are small, so their softmax is nearly uniform.
LIPSCHITZ_LOGIT_SCALE = 10.0
# Weights stay small, so rates are high. AG News, width 64, 200 steps, rates 0.005, 0.02 and 0.1:
# accuracy 0.823, 0.831 and 0.818, certified at 0.1 of a token's norm 0.38, 0.50 and 0.53 of it.
LIPSCHITZ_RATE = 20.0
# Initial temperature for a margin loss of words.
COOL = 0.25
BOUND_STRENGTH = 0.3


@VARIANTS.register("lipschitz")
def lipschitz(base: RunConfig, budget: float = 1.0) -> RunConfig:
    """Lipschitz bound 1 (or value) on a change of a token: ball attention, MaxMin, unit weights, no
    norms.

    The value is the budget L: 1 makes convex residuals, more makes sums that share L. No singular
    value of a weight exceeds 1, so the certified total is at most L after every step. The learning
    rate is 20 x the base's, and the loss multiplies the logits by ten unless there is a
    ``logit_scale``. ``num_hidden_layers=0`` is the control without blocks. With ``margin_loss =
    words:k``, embeddings lie in the ball (not on the sphere), tokens have no positions, and
    attention starts cool, since the effect of a word grows as e^(2 t). A classifier with L > 1 trains
    with the bound as a loss unless there is a ``penalty.bound``, that margin loss, windows that vote
    or gradient checkpointing.
    """
    if not 1 <= budget < float("inf"):
        problem = f"budget = {budget}, expected a finite number, 1 or more"
        raise ConfigError(f"lipschitz: {problem}: a residual keeps its input")

    residual: dict[str, Any] = {"residual": "convex"}
    if budget > 1:
        residual = {"residual": "budget", "budget": budget}

    embeddings: dict[str, Any] = {"unit_embeddings": True}
    if _counts_words(base):
        embeddings = {"ball_embeddings": True, "position": "none", "ball_temperature": COOL}

    parts = {"attention": "ball", "feedforward": "maxmin", "norm": "none", "attention_dropout": 0.0}
    config = _with_model(base, **parts, **embeddings, **residual)
    scale = LIPSCHITZ_LOGIT_SCALE if base.train.logit_scale == 1 else base.train.logit_scale
    train = replace(_faster(config.train, LIPSCHITZ_RATE), logit_scale=scale)
    config = replace(config, train=train, penalty=_bound_as_a_loss(base, budget))
    return _constrained(config, LIPSCHITZ_WEIGHTS, to="spectral")


def _bound_as_a_loss(base: RunConfig, budget: float) -> PenaltyOptions:
    """Return the base's penalties, and that of the bound where it gains (docs/howto/classifier.md)."""
    penalty = base.penalty
    is_classifier = TASKS.get(base.task).kind.endswith("classification")
    is_voted = bool(base.task_options.get("certified_windows"))
    # The inputs of a checkpointed model have a hook, which no certificate covers.
    has_bound = not (is_voted or _counts_words(base) or base.train.gradient_checkpointing)
    if penalty.bound is not None or budget == 1 or not (is_classifier and has_bound):
        return penalty
    return replace(penalty, bound=BOUND_STRENGTH)


def _counts_words(base: RunConfig) -> bool:
    return (base.train.margin_loss or "").startswith("words")


@VARIANTS.register("orthogonal")
def orthogonal(base: RunConfig) -> RunConfig:
    """post_ln, all layer matrices orthogonal (Sengupta et al. 2023); with --from: queries and keys.

    This moves pretrained weights far, so they need more training than a fine-tuning.
    """
    return _constrained(
        _baseline(base), ("query", "key") if base.start.model else TRANSFORMER_WEIGHTS
    )


@VARIANTS.register("spectral")
def spectral(base: RunConfig, radius: float = 1.0) -> RunConfig:
    """post_ln (with --from: plain) with |W|_2 at most 1 (or value) x sqrt(fan_out / fan_in) for all
    layer matrices."""
    where = ("query", "key", "value", "output", "feedforward_in", "feedforward_out")
    return _constrained(_baseline(base), where, to="spectral", bound=f"rms:{radius:g}")


@VARIANTS.register("sigma_reparam")
def sigma_reparam(base: RunConfig) -> RunConfig:
    """post_ln (with --from: plain) with every layer matrix trained as g W / sigma(W), g learnt
    (Zhai et al. 2023)."""
    config = _baseline(base)
    return replace(config, start=replace(config.start, sigma_reparam=True))


@VARIANTS.register("qk_clip")
def qk_clip(base: RunConfig, largest: float = 100.0) -> RunConfig:
    """post_ln (with --from: plain) with attention logits clipped at 100 (or value): QK-clip (Kimi K2, 2025)."""
    return _constrained(_baseline(base), ("query",), to="logits", bound=largest)


@VARIANTS.register("transject")
def transject(base: RunConfig, rate: float = TRANSJECT_RATE) -> RunConfig:
    """TransJect (Sengupta et al. 2023) with a Gram spectrum; learning rate 50 (or value) x the base's."""
    return _constrained(
        _transject(base, "gram", rate), TRANSJECT_WEIGHTS + SPECTRUM_WEIGHTS + EMBEDDING
    )


@VARIANTS.register("transject_random")
def transject_random(base: RunConfig, rate: float = TRANSJECT_RATE) -> RunConfig:
    """TransJect with a learnt vector as the spectrum; learning rate 50 (or value) x the base's."""
    return _constrained(_transject(base, "random", rate), TRANSJECT_WEIGHTS + EMBEDDING)


@VARIANTS.register("transject_redrawn")
def transject_redrawn(base: RunConfig, rate: float = TRANSJECT_RATE) -> RunConfig:
    """TransJect, its spectrum drawn in each pass as in the authors' code; rate 50 (or value) x the base's."""
    return _constrained(_transject(base, "redrawn", rate), TRANSJECT_WEIGHTS + EMBEDDING)


def _transject(
    base: RunConfig, spectrum: Literal["gram", "random", "redrawn"], rate: float
) -> RunConfig:
    config = _with_model(base, architecture="transject", residual="rezero", spectrum=spectrum)
    return replace(config, train=_faster(base.train, rate))


def _faster(options: TrainOptions, rate: float) -> TrainOptions:
    """Scale the learning rate, and gamma for the schedule kim2021."""
    return replace(options, learning_rate=rate * options.learning_rate, gamma=rate * options.gamma)


def _constrained(
    config: RunConfig,
    weights: tuple[str, ...],
    to: Literal["orthogonal", "spectral", "hypersphere", "logits"] = "orthogonal",
    bound: float | str | None = None,
) -> RunConfig:
    embeddings = "fit" if EMBEDDING[0] in weights else "refuse"
    chosen: dict[str, Any] = {"where": ",".join(weights), "to": to, "bound": bound}
    constrain = replace(config.constrain, **chosen, embeddings=embeddings)
    return replace(config, constrain=constrain)
