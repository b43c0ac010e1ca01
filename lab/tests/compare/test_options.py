"""Every option of a comparison reaches every variant, or is refused by name, or is what the variant
is about and said aloud."""

import dataclasses
import typing
from dataclasses import replace

import pytest

from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed.options import flat_options
from wellposed_lab.cli.arguments import read_request
from wellposed_lab.cli.train import SCALED, TrainArguments, with_variant
from wellposed_lab.compare.variants import VARIANTS, apply_variant, check_options
from wellposed_lab.training.config import RunConfig, StartOptions

BASE = RunConfig("listops")
DEFAULTS = flat_options(BASE.to_dict())
SECTIONS = ("model", "penalty", "constrain", "train")
NEEDED = {
    "penalty": {"penalty.embedding": 1e-6},
    "per": {"constrain.where": "mine.*"},
    "embeddings": {"constrain.where": "mine.*"},
    "schedule": {"train.warmup_steps": 3},
    "bound": {"constrain.to": "spectral"},
}
"""Options that others of a section, or of that name, say nothing without."""


def values_of(hint, default):
    """Return values other than the default that an option may have; none if it has no default."""
    parts = [v for part in typing.get_args(hint) or [hint] for v in typing.get_args(part) or [part]]
    if words := [value for value in parts if isinstance(value, str) and value != default]:
        return words
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int | float):
        return [2 * default + 1 if isinstance(default, int) else 0.75 * default + 1e-3]
    return []


def every_option():
    yield from {"constrain.where": "key", "constrain.bound": "rms:3", "train.epochs": 2.0}.items()
    yield from {"train.margin_loss": "words:2", "train.patience": 4, "train.device": "cpu"}.items()
    for section in SECTIONS:
        kind = type(getattr(BASE, section))
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            for value in values_of(hints[field.name], field.default):
                yield f"{section}.{field.name}", value


def with_options(base, values):
    """Return ``base`` with options by dotted names."""
    for section in SECTIONS:
        mine = {n.partition(".")[2]: v for n, v in values.items() if n.startswith(f"{section}.")}
        base = replace(base, **{section: replace(getattr(base, section), **mine)})
    return base


OPTIONS = list(every_option())


def typed_values(values):
    """The options as the parser of the command line returns them."""
    tables = {}
    for name, value in values.items():
        section, _, short = name.partition(".")
        tables.setdefault(section, {})[short] = value
    return tables


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_option_reaches_a_variant_or_is_refused_by_name(variant):
    """And train gives it to the variant as compare does."""
    reached = 0
    for name, value in OPTIONS:
        section, _, short = name.partition(".")
        needed = {**NEEDED.get(section, {}), **NEEDED.get(short, {})}
        values = {**needed, name: value}
        try:
            base = with_options(BASE, values)
            usual = with_options(BASE, {**needed, name: DEFAULTS.get(name)})
            applied, other = (apply_variant(variant, config) for config in (base, usual))
        except ConfigError:
            continue  # a pair of options that is refused by name
        if short not in SCALED:
            typed = {"command": {"variant": variant}, **typed_values(values)}
            assert with_variant(BASE, typed) == applied, (name, value)
        reached_value, other_value = (
            flat_options(config.to_dict()).get(name) for config in (applied, other)
        )
        try:
            message = "".join(check_options(base, [variant]))
        except ConfigError as refused:
            message = str(refused)
            if any(required in message for required in needed):
                continue
        reached += reached_value == value
        assert reached_value == value or reached_value != other_value or name in message, (
            name,
            value,
        )
    assert reached > 20


def read_train(variant, options):
    words = ["--variant", variant, *options.split()]
    return read_request("train", BASE.task, words, TrainArguments, "", changed=with_variant).config


TYPED = {
    "a width that a variant derives from another": (
        "ngpt",
        "--hidden-size 96 --num-attention-heads 4",
        "model.intermediate_size",
        256,
    ),
    "a share of the steps": ("post_ln_warmup", "--steps 50", "train.warmup_steps", 5),
    "a width of its own": (
        "ngpt",
        "--hidden-size 96 --intermediate-size 64",
        "model.intermediate_size",
        64,
    ),
    "a rate is not multiplied": ("lipschitz", "--learning-rate 0.5", "train.learning_rate", 0.5),
    "nor one that, multiplied, the optimizer refuses": (
        "lipschitz",
        "--learning-rate 0.5 --optimizer scion",
        "train.learning_rate",
        0.5,
    ),
    "a scale in place of a variant's": ("lipschitz", "--logit-scale 3", "train.logit_scale", 3.0),
    "an option that only the variant's model has": (
        "lipschitz:4",
        "--ball-temperature 0.7",
        "model.ball_temperature",
        0.7,
    ),
    "warm-up that a variant drops": ("t_fixup", "--warmup-steps 7", "train.warmup_steps", 7),
}


@pytest.mark.parametrize("case", TYPED)
def test_typed_options_beside_a_variant(case):
    variant, options, name, expected = TYPED[case]
    assert flat_options(read_train(variant, options).to_dict())[name] == expected


@pytest.mark.parametrize(
    "options", ["--dropout 7", "--num-attention-heads 0", "--schedule kim2021"]
)
def test_a_wrong_option_beside_a_variant_is_refused_as_without_one(options):
    messages = set()
    for variant in ("post_ln", "lipschitz:4"):
        with pytest.raises(ConfigError) as refused:
            read_train(variant, options)
        messages.add(str(refused.value))
    with pytest.raises(ConfigError) as refused:
        read_request("train", BASE.task, options.split(), TrainArguments, "")
    assert messages == {str(refused.value)}


@pytest.mark.parametrize(
    "variant", ["oc1:1e-3", "oc3:1e-3", "key:1e-2", "query:1e-2", "t_fixup_oc3"]
)
def test_a_penalty_of_the_command_stays_beside_that_of_a_variant(variant):
    base = with_options(
        BASE, {"penalty.embedding": 1e-6, "penalty.value": 1e-5, "penalty.every": 3}
    )
    alone = apply_variant(variant, BASE).penalty  # whose form is that of its paper
    combined = replace(alone, embedding=1e-6, value=1e-5, every=3, form="paper")
    assert apply_variant(variant, base).penalty == combined
    options = "--penalty.embedding 1e-6 --penalty.value 1e-5 --penalty.every 3"
    assert read_train(variant, options).penalty == combined


REFUSED = [
    ("key:1e-2", {"penalty.key": 0.5}, "penalty.key = 0.01 in the place of 0.5"),
    ("oc1", {"penalty.embedding": 1.0, "penalty.form": "qr"}, "penalty.form = 'gram_squared'"),
    ("householder", {"penalty.embedding": 1.0}, "penalty.embedding's form = 'qr' in the place of"),
    ("householder_embedding", {"penalty.key": 1.0}, "penalty.key = 0.0 in the place of 1.0"),
    ("orthogonal", {"constrain.where": "*.k_proj"}, "constrain.where = "),
    (
        "spectral:2",
        {"constrain.to": "spectral", "constrain.bound": 3.0},
        "constrain.bound = 'rms:2'",
    ),
]


@pytest.mark.parametrize(("variant", "values", "expected"), REFUSED)
def test_two_values_of_one_option_are_refused_by_name(variant, values, expected):
    base = with_options(BASE, values)
    with pytest.raises(ConfigError, match=expected):
        check_options(base, ["plain", variant])


def test_an_option_of_the_task_or_of_the_start_is_one_as_well():
    texts = RunConfig("text_classification", {"data": "films.tsv", "certified_windows": 2})
    expected = "task_options.certified_windows = 1 in the place of 2"
    with pytest.raises(ConfigError, match=expected):
        check_options(texts, ["plain", "windows"])
    start = StartOptions("some-model", attention="l2")
    expected = "start.attention = 'cosine' in the place of 'l2'"
    with pytest.raises(ConfigError, match=expected):
        check_options(replace(BASE, start=start), ["plain", "cosine"])


def test_an_option_that_no_variant_reads_is_refused_on_the_command_line_alone():
    base = replace(BASE, model=ModelOptions(norm="pre"))
    expected = "model.norm = 'pre': no variant of post_ln, rezero reads it"
    with pytest.raises(ConfigError, match=expected):
        check_options(base, ["post_ln", "rezero"], asked_of=BASE)
    assert len(check_options(base, ["post_ln", "rezero"], asked_of=base)) == 2
    assert len(check_options(base, ["post_ln", "plain"], asked_of=BASE)) == 1
