"""A penalty reads the weights that its model has now: after each change it equals a penalty made
afresh, or names what changed."""

import copy
import re

import pytest
import torch
from tests.support.penalized import after_forward, batch, bert
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.nn.utils import parametrizations, parametrize

from wellposed.errors import ConfigError, RoleNotFoundError, ShapeError
from wellposed.penalize import OrthogonalityPenalty

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def tied():
    model = bert()
    of_layer(model, 0).key.weight = of_layer(model, 1).key.weight
    return model


def adapted(names=("key",), **more):
    config = peft.LoraConfig(target_modules=list(names), r=2, init_lora_weights=False, **more)
    return peft.get_peft_model(bert(), config)


def of_layer(model, number):
    return model.encoder.layer[number].attention.self


def assigned(model):
    fresh = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(fresh, assign=True)


def reordered(model):
    model.encoder.layer = nn.ModuleList([model.encoder.layer[number] for number in (1, 0, 2)])


def cut(model):
    model.encoder.layer = model.encoder.layer[:2]


def parametrised(model):
    parametrizations.weight_norm(of_layer(model, 1).key)


def parametrised_and_back(model):
    parametrised(model)
    OrthogonalityPenalty(model, key=1.0, form="paper")()
    parametrize.remove_parametrizations(of_layer(model, 1).key, "weight")


def other_kind(model):
    """Train an adapter that does not add B A to the weight."""
    config = peft.LoraConfig(target_modules=["key"], r=2, init_lora_weights=False, use_dora=True)
    model.add_adapter("other", config)
    model.set_adapter("other")
    for name, scales in model.named_parameters():
        if "magnitude" in name:
            scales.data.mul_(3)


def resized(layer):
    layer.self_attn.in_proj_weight = nn.Parameter(torch.randn(36, 8))


# Change -> (model, what is done to it, what a refusal names; None: the value is right).
KEY = r"encoder\.layer\.1\.attention\.self\.key"
CHANGES = {
    "dtype": (bert, lambda m: m.double(), None),
    "assigned": (bert, assigned, None),
    "parametrised": (bert, parametrised, None),
    "parametrised and back": (bert, parametrised_and_back, None),
    "compiled": (bert, torch.compile, None),
    "wrapped": (bert, nn.DataParallel, None),
    "checkpointed": (bert, lambda m: apply_activation_checkpointing(
        m, check_fn=lambda part: isinstance(part, type(m.encoder.layer[0]))), None),
    "another head": (bert, lambda m: setattr(m, "pooler", nn.Linear(16, 3)), None),
    "new vocabulary": (bert, lambda m: m.resize_token_embeddings(50, mean_resizing=False), None),
    "one layer twice": (bert, lambda m: m.encoder.layer.append(m.encoder.layer[0]), None),
    "untied": (tied, lambda m: setattr(of_layer(m, 0).key, "weight", nn.Parameter(torch.randn(16, 16))), None),
    "tied later": (bert, lambda m: setattr(of_layer(m, 0).key, "weight", of_layer(m, 1).key.weight), None),
    "cut": (bert, cut, r"layer\.2\.attention\.self\.key: the model no longer has it"),
    "reordered": (bert, reordered, KEY),
    "replaced": (bert, lambda m: setattr(of_layer(m, 1), "key", nn.Linear(16, 16)), KEY + ": now another"),
    "grown": (bert, lambda m: m.encoder.layer.append(copy.deepcopy(m.encoder.layer[0])),
              r"layer\.3\.attention\.self\.key: new in the model"),
    "half": (bert, lambda m: m.half(), "float16"),
    "resized": (lambda: nn.TransformerEncoderLayer(8, 2, 12), resized, r"in_proj_weight: its shape was \(24, 8\)"),
    "adapters": (bert, lambda m: peft.get_peft_model(m, peft.LoraConfig(target_modules=["key"])), KEY),
}  # fmt: skip
ADAPTED = {  # of a model with adapters, which are penalised
    "second adapter": (lambda m: m.add_adapter("other", m.peft_config["default"]), None),
    "switched": (lambda m: (m.add_adapter("other", m.peft_config["default"]), m.set_adapter("other")), None),
    "another kind": (other_kind, "as fresh"),
    "both": (lambda m: (m.add_adapter("other", m.peft_config["default"]),
                        m.base_model.set_adapter(["default", "other"])), None),
    "merged": (lambda m: m.merge_adapter(), "as fresh"),
    "merged and back": (lambda m: (m.merge_adapter(), m.unmerge_adapter()), None),
    "switched off": (lambda m: m.base_model.disable_adapter_layers(), "as fresh"),
    "merged away": (lambda m: m.merge_and_unload(), KEY),
    "unloaded": (lambda m: m.unload(), KEY),
    "more adapters": (lambda m: m.add_adapter("other", peft.LoraConfig(target_modules=["query"])), None),
}  # fmt: skip


def outcome(penalty):
    try:
        with torch.no_grad():
            return float(penalty())
    except (ConfigError, RoleNotFoundError, ShapeError) as error:
        return str(error)


@pytest.mark.parametrize("name", [*CHANGES, *ADAPTED])
@pytest.mark.filterwarnings("ignore:weights shared between roles:UserWarning")
@pytest.mark.filterwarnings("ignore:Merging lora module")
def test_a_call_reads_the_model_as_it_is_or_names_the_change(name):
    torch.manual_seed(0)
    options = {"key": 1.0, "form": "gram_squared"}
    if name in CHANGES:
        build, change, refused = CHANGES[name]
        options["feedforward"] = 0.5
    else:
        build = adapted
        (change, refused) = ADAPTED[name]
    model = build()
    penalty = OrthogonalityPenalty(model, **options)
    outcome(penalty)
    change(model)
    fresh = outcome(lambda: OrthogonalityPenalty(model, **options)())
    step = penalty.step
    now = outcome(penalty)
    if refused in (None, "as fresh"):
        assert now == pytest.approx(fresh, rel=1e-6) if isinstance(fresh, float) else now == fresh
        assert refused or isinstance(now, float)
        return
    assert re.search(refused, now), now
    assert penalty.step == step, "a refused call counts no step"
    if isinstance(fresh, float):
        assert "penalty.rebind(model)" in now
        penalty.rebind(model)
        assert outcome(penalty) == pytest.approx(fresh, rel=1e-6)


@pytest.mark.parametrize("change", [cut, reordered])
def test_affinities_are_of_the_attention_that_the_model_has(change):
    model = bert()
    inputs = batch()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    change(model)
    model(**inputs)
    with pytest.raises(ConfigError, match=r"layer\.\d\.attention: "):
        penalty()
    penalty.rebind(model)
    value = after_forward(model, penalty, inputs)
    penalty.remove()
    expected = after_forward(model, OrthogonalityPenalty(model, affinity=1.0), inputs)
    torch.testing.assert_close(value, expected)


def test_a_copy_of_both_reads_the_copy():
    model = bert()
    penalty = OrthogonalityPenalty(model, key=1.0, form="gram_squared")
    twin, duplicate = copy.deepcopy((model, penalty))
    with torch.no_grad():
        of_layer(twin, 0).key.weight.zero_()
    assert duplicate().item() == OrthogonalityPenalty(twin, key=1.0, form="gram_squared")().item()
    cut(twin)
    assert "layer.2" in outcome(duplicate)
    assert isinstance(outcome(penalty), float)


@pytest.mark.filterwarnings("ignore:weights shared between roles:UserWarning")
def test_looking_for_changes_computes_nothing_and_reads_nothing():
    """No operation of torch runs while nothing changed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    for model in (bert(), adapted(), tied()):
        penalty = OrthogonalityPenalty(model, value=1.0, key=1.0, form="paper")
        with Counts() as counts:
            penalty._check_live()
        assert counts.calls == 0
