"""Experts in a stack cannot be tried one by one, so what may change them is named, at once or when it comes."""

import pytest
import torch
import transformers

import wellposed as wp
from wellposed.roles import current_roles, find_roles


def of_forward(call):
    def edit(experts):
        plain = experts.forward
        experts.forward = lambda *a, **k: call(plain(*a, **k))

    return edit


EXPERTS = {
    "nothing": (lambda _: None, None),
    "forward hook": (lambda e: e.register_forward_hook(lambda _m, _a, out: 10 * out), "hook"),
    "pre-hook": (lambda e: e.register_forward_pre_hook(lambda _m, a: (10 * a[0], *a[1:])), "hook"),
    "forward": (of_forward(lambda out: 10 * out), "its forward was replaced"),
}


def mixtral():
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=3, vocab_size=30, pad_token_id=0,
    )  # fmt: skip
    return transformers.MixtralModel(config).eval()


@pytest.mark.parametrize("edit", EXPERTS)
@pytest.mark.parametrize("run", [True, False])
def test_what_may_change_experts_in_a_stack_is_named(edit, run):
    model = mixtral()
    roles = find_roles(model)
    change, message = EXPERTS[edit]
    change(model.layers[0].mlp.experts)
    notes = (find_roles(model) if run else current_roles(model, roles)).notes
    named = [note for note in notes if note.startswith("layers.0.mlp.experts (MixtralExperts): ")]
    assert len(named) == (message is not None)
    assert all(message in note and "not tried" in note for note in named)


VERBS = {
    "penalty": lambda model, optimizer: wp.OrthogonalityPenalty(model, feedforward=1e-3),
    "constraint": lambda model, optimizer: wp.constrain_(
        model, optimizer, to="spectral", where="layers"
    ),
    "monitor": lambda model, optimizer: wp.Monitor(model, optimizer, every=1),
}


def look(verb, watcher, model, ids):
    if verb == "penalty":
        watcher()
        watcher.terms()
    elif verb == "constraint":
        watcher.error()
    else:
        model(ids).last_hidden_state.sum().backward()
        watcher.step()


@pytest.mark.parametrize("edit", EXPERTS)
@pytest.mark.parametrize("verb", VERBS)
def test_what_comes_on_experts_in_a_stack_later_is_named_once(verb, edit, caplog):
    model = mixtral()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 30, (1, 5))
    watcher = VERBS[verb](model, optimizer)
    look(verb, watcher, model, ids)
    change, message = EXPERTS[edit]
    change(model.layers[0].mlp.experts)
    caplog.clear()
    for _ in range(2):
        look(verb, watcher, model, ids)
    named = [text for text in caplog.messages if text.startswith("layers.0.mlp.experts (MixtralE")]
    assert len(named) == (message is not None)
    assert all(message in text and "not tried" in text for text in named)
