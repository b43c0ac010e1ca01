"""Options are declared once, with the parts that read them; each has a range; parts from outside
bring their own."""

from dataclasses import dataclass, fields

import pytest
import torch

from wellposed import model_options
from wellposed.errors import ConfigError
from wellposed.models import ARCHITECTURES, INITS, WellposedConfig, WellposedModel
from wellposed.nn import ATTENTIONS, FEEDFORWARDS, POSITIONS, RESIDUALS
from wellposed.options import Size

REGISTRIES = {
    "architecture": ARCHITECTURES,
    "attention": ATTENTIONS,
    "feedforward": FEEDFORWARDS,
    "init": INITS,
    "position": POSITIONS,
    "residual": RESIDUALS,
}
OPTIONS = {item.name: str(item.type) for item in fields(model_options.ModelOptions)}
NUMBERS = [name for name, kind in OPTIONS.items() if "int" in kind or "float" in kind]


def test_every_part_that_reads_options_is_registered():
    for kind, registry in REGISTRIES.items():
        assert set(model_options.readers(kind)) <= set(registry.names())


def test_no_option_is_declared_twice():
    owners = {}
    declared = {
        options
        for kind in REGISTRIES
        for read in model_options.readers(kind).values()
        for options in read
    }
    for base in {base for options in declared for base in options.__mro__}:
        for name in vars(base).get("__annotations__", {}):
            owners.setdefault(name, set()).add(base)
    assert len(owners) > 20
    assert {name for name, classes in owners.items() if len(classes) > 1} == set()


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_of_a_run_has_a_range(name):
    with pytest.raises(ConfigError, match=f"{name} = -1, expected"):
        model_options.ModelOptions(**{name: -1})


def test_heads_must_divide_the_width_of_a_model_that_has_heads():
    problem = "hidden_size = 30 is not divisible by num_attention_heads = 4"
    with pytest.raises(ConfigError, match=problem):
        model_options.ModelOptions(hidden_size=30)
    headless = model_options.ModelOptions(architecture="transject", hidden_size=30)
    assert headless.num_attention_heads == 4


def test_an_option_leaves_with_the_part_that_read_it():
    options = model_options.ModelOptions(attention="l2_contractive", contractive=0.5, query_width=2)
    changed = options.with_parts(attention="l2")
    assert (changed.attention, changed.contractive, changed.query_width) == ("l2", None, 2)
    assert options.with_parts(attention="dot_product") == model_options.ModelOptions()
    other = model_options.ModelOptions(norm="none", position="sinusoidal", dropout=0.1)
    other = other.with_parts(architecture="transject")
    assert (other.norm, other.position, other.dropout) == ("post", "sinusoidal", 0.1)


NAME = "windowed-for-this-test"


@model_options.read_by(attention=NAME)
@dataclass(frozen=True)
class WindowOptions(model_options.PartOptions):
    window_for_this_test: Size = 64


class Window(torch.nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, x, **_):
        return x


if NAME not in ATTENTIONS:
    ATTENTIONS.register(NAME)(
        lambda config: Window(WindowOptions.from_config(config).window_for_this_test)
    )


def test_an_attention_from_outside_brings_its_options(tmp_path):
    sizes = {"hidden_size": 8, "num_attention_heads": 2}
    config = WellposedConfig(attention=NAME, window_for_this_test=3, **sizes)
    layer = WellposedModel(config).layers[0]
    assert layer.attention.window == 3
    config.save_pretrained(str(tmp_path))
    assert WellposedConfig.from_pretrained(str(tmp_path)).to_dict()["window_for_this_test"] == 3
    wrong = "window_for_this_test = 0, expected an integer >= 1"
    with pytest.raises(ConfigError, match=wrong):
        WellposedConfig(attention=NAME, window_for_this_test=0)
    with pytest.raises(ConfigError, match=f"which only attention {NAME!r} reads; leave it 64"):
        WellposedConfig(window_for_this_test=3)
    assert "window_for_this_test" not in WellposedConfig(**sizes).to_dict()
    assert "window_for_this_test" in model_options.options_of("attention")
    assert model_options.options_read("attention", NAME) == {"window_for_this_test"}
