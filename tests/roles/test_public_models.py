"""Models in the styles of public scripts, and every verb that finds roles: by name and by a pass
they have the roles that a reader of their code would name, and each error says what to type."""

import re
from fnmatch import fnmatchcase

import pytest
import torch
from tests.support.public_models import HEADS, STRANGE, STYLES, TOKENS, UNCOUNTED
from torch import nn

import wellposed as wp
from wellposed.constrain import MuonAndAdamW, parameter_groups
from wellposed.errors import ConfigError, RoleNotFoundError
from wellposed.roles import find_roles

pytestmark = [
    pytest.mark.slow,  # the whole table
    pytest.mark.filterwarnings("ignore:.*nested tensor"),
]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


VERBS = {
    "find_roles": lambda model, **batch: find_roles(model, **batch),
    "constrain_": lambda model, **batch: wp.constrain_(model, sgd(model), "query", **batch),
    "constrain_ spectral": lambda model, **batch: wp.constrain_(model, sgd(model), to="spectral", **batch),
    "constrain_ per head": lambda model, **batch: wp.constrain_(model, sgd(model), "value", per="head", **batch),
    "constrain_ logits": lambda model, **batch: wp.constrain_(model, sgd(model), to="logits", **batch),
    "OrthogonalityPenalty": lambda model, **batch: wp.OrthogonalityPenalty(model, query=1.0, **batch),
    "OrthogonalityPenalty joint": lambda model, **batch: wp.OrthogonalityPenalty(
        model, attention=1.0, attention_mode="separate", **batch),
    "OrthogonalityPenalty affinity": lambda model, **batch: wp.OrthogonalityPenalty(model, affinity=1.0, **batch),
    "Monitor": lambda model, **batch: wp.Monitor(model, **batch),
    "measure": lambda model, **batch: wp.measure(model, **batch),
    "t_fixup_": lambda model, **batch: wp.t_fixup_(model, **batch),
    "dt_fixup_": lambda model: wp.dt_fixup_(model, [TOKENS], layers="layers"),
    "parameter_groups": lambda model, **batch: parameter_groups(model, 0.1, where="query", **batch),
    "MuonAndAdamW": lambda model, **batch: MuonAndAdamW(model, **batch),
}  # fmt: skip
OF_HEADS = (
    "constrain_ per head",
    "constrain_ logits",
    "OrthogonalityPenalty affinity",
    "t_fixup_",
    "dt_fixup_",
)
"""Verbs that need the heads of attention, or whole blocks."""
WAYS = {"by name": {}, "by pass": {"batch": TOKENS}}


def is_refused_elsewhere(style, verb, way):
    """Say what the papers or a check without an input refuse, with any names."""
    if "fixup" in verb and "feedforward_gate" in style.labels:
        return "a gated feed-forward network"
    return (
        "give batch=, the input of the model" if verb == "constrain_ logits" and not way else None
    )


def remove(result):
    if isinstance(result, (wp.Monitor, wp.OrthogonalityPenalty)) or hasattr(result, "report"):
        result.remove()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STYLES)
def test_names_and_a_pass_give_the_roles_of_a_style(name, way):
    style = STYLES[name]
    roles = find_roles(style.build(), **WAYS[way])
    for layer in range(2):
        labels = {
            weight.role: weight.view.label for weight in roles.weights() if weight.layer == layer
        }
        assert labels == {role: f"layers.{layer}.{label}" for role, label in style.labels.items()}
    assert [part.num_heads for part in roles.attention] == [HEADS] * 2
    assert [part.num_key_value_heads for part in roles.attention] == [style.key_value_heads] * 2
    assert (len(roles.feedforward), roles.by_pass) == (2, way == "by pass")
    assert not roles.loose


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", STYLES)
def test_every_verb_takes_every_style(name, verb, way):
    style = STYLES[name]
    options = WAYS[way]
    if verb == "dt_fixup_":
        options = {}
    if refusal := is_refused_elsewhere(style, verb, options):
        with pytest.raises(ConfigError, match=refusal):
            VERBS[verb](style.build(), **options)
        return
    remove(VERBS[verb](style.build(), **options))


@pytest.mark.parametrize("verb", VERBS)
def test_whole_matrices_need_no_number_of_heads(verb):
    model = UNCOUNTED.build()
    if verb not in OF_HEADS:
        remove(VERBS[verb](model))
        return
    with pytest.raises((RoleNotFoundError, ConfigError)) as caught:
        VERBS[verb](model)
    text = str(caught.value)
    assert text.startswith(f"{verb.split()[0]}: ")
    assert "set the number of heads on the attention" in text.replace("Set", "set")
    assert ("batch=batch)" in text) == (verb != "dt_fixup_")
    assert "PATTERN" not in text  # patterns tell no heads
    if verb != "dt_fixup_":
        remove(VERBS[verb](model, batch=TOKENS))


def test_the_constraint_of_an_attention_without_a_number_of_heads_is_that_of_its_weights():
    model = UNCOUNTED.build()
    optimizer = sgd(model)
    handle = wp.constrain_(model, optimizer, ("query", "key"))
    for _ in range(3):
        model(TOKENS).square().mean().backward()
        optimizer.step()
    for layer in model.layers:
        for part in (layer.attn.q_proj, layer.attn.k_proj):
            weight = part.weight.detach().double()
            assert (weight.T @ weight - torch.eye(16).double()).abs().max() <= 1e-5
        values = layer.attn.v_proj.weight.detach().double()
        assert (values.T @ values - torch.eye(16).double()).abs().max() > 0.1
    handle.remove()


def test_the_penalty_of_an_attention_without_a_number_of_heads_is_that_of_its_weights():
    for mode in ("joint", "separate"):
        values = []
        for options in ({}, {"batch": TOKENS}):
            penalty = wp.OrthogonalityPenalty(
                UNCOUNTED.build(), attention=1.0, attention_mode=mode, **options
            )
            values.append(penalty().item())
        assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_that_finds_nothing_says_in_its_own_words_what_to_type(verb):
    model = STRANGE.build()
    with pytest.raises((RoleNotFoundError, ConfigError)) as caught:
        VERBS[verb](model)
    text = str(caught.value)
    call = verb.split()[0]
    layers = model.layers if verb == "dt_fixup_" else model
    assert text.startswith(f"{call}: ")
    others = {name.split()[0] for name in VERBS} - {
        call,
        "find_roles" if call == "measure" else call,
    }
    assert not any(f"{other}(" in re.sub(rf"\b{call}\(", "", text) for other in others)
    assert ("batch" in text.partition("\n  ")[0].replace("no batch was given", "")) == (
        verb != "dt_fixup_"
    )
    # The names are this model's, and each is a pattern that matches.
    patterns = re.findall(r"^  (\S+) \(", text, re.MULTILINE)
    names = [name for name, weight in layers.named_parameters() if weight.ndim == 2]
    assert patterns
    assert all(any(fnmatchcase(name, pattern) for name in names) for pattern in patterns)
    assert all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names)
    for pattern in re.findall(r"\*\.[\w.*]+", text):
        assert any(fnmatchcase(f".{name}", pattern) for name in names), pattern
    if verb != "dt_fixup_":  # and the advice is right
        remove(VERBS[verb](STRANGE.build(), batch=TOKENS))


def test_a_batch_is_not_advised_to_who_gave_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for call in (find_roles, wp.Monitor, wp.measure):
        with pytest.raises(RoleNotFoundError) as caught:
            call(model, batch=torch.ones(2, 4))
        assert "batch" not in str(caught.value)
        assert "*.weight (4, 4)" in str(caught.value)
    with pytest.raises(RoleNotFoundError, match="Sequential has no matrix"):
        find_roles(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize("roles", [("query",), ("value",), ("output",), ("query", "key")])
def test_patterns_of_some_roles_work_in_every_verb_that_takes_them(roles):
    """Of one token, attention is linear: it was read as a wrapper around a weight that has a role alone."""
    names = {
        "query": "*.alpha.weight",
        "key": "layers.*.attn.beta.weight",
        "value": "*.gamma.weight",
        "output": "*.omega.weight",
    }
    where = {role: names[role] for role in roles}
    model = STRANGE.build()
    found_roles = find_roles(model, where=where)
    assert not any(weight.view.deviation for weight in found_roles.weights())
    assert len(wp.measure(model, roles=found_roles).rows) == 2 * len(roles) + 1
    monitor = wp.Monitor(model, where=where)
    model(TOKENS).square().mean().backward()
    assert any(f".{roles[0]}" in name for name in monitor.step())
    monitor.remove()
    if "query" in roles:
        assert wp.OrthogonalityPenalty(model, query=1.0, where=where)().item() > 0
