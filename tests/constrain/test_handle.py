"""A constraint that no longer holds says so, once: another optimizer steps, or the optimizer is a copy."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from tests.support.constrained import NAMES, OPTIMIZERS, Mixed, errors, held, problem, train
from torch import nn

from wellposed.constrain import ConstraintWarning, constrain_


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
def test_another_optimizer_in_its_place_is_told_at_its_third_step(kind):
    model = Mixed()
    constrain_(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0), where="square")
    flags = {"foreach": kind == "foreach", "fused": kind == "fused"}
    other = torch.optim.AdamW(model.parameters(), lr=1e-3, **flags)
    train(model, other, 3)
    with pytest.warns(
        ConstraintWarning, match=r"took no step: another optimizer(.|\n)*square\.weight"
    ):
        train(model, other, 1)
    train(model, other, 4)  # a second warning would be an error


def test_no_word_without_cause():
    model, optimizer, handle = held("sgd", "square", lr=1e-2)
    x, y = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):  # gradients are gathered, nothing moves
            nn.functional.mse_loss(model(x), y).backward()
        for _ in range(2):  # edited twice before training begins
            model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()})
            nn.functional.mse_loss(model(x), y).backward()
        train(model, optimizer, 5)
        # Who has stepped is not watched any more.
        assert not model.square.weight._post_accumulate_grad_hooks
        handle.remove()
        constrain_(model, optimizer, where="square").remove()
        train(model, torch.optim.SGD(model.parameters(), lr=1e-2), 6)


def saved_and_loaded(pair):
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": saved_and_loaded,
}


def constrained(kind="adamw", where=NAMES):
    torch.manual_seed(0)
    model, optimizer, handle = held(kind, where)
    train(model, optimizer, 2)
    return model, optimizer, handle


@pytest.mark.parametrize("where", [NAMES, "tall"], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copied_pair_warns_at_its_first_step(how, kind, where):
    model, optimizer, _ = constrained(kind, where)
    other, copied = COPIES[how]((model, optimizer))
    with pytest.warns(
        ConstraintWarning, match=r"constraint is lost(.|\n)*constrain_\((.|\n)*tall\.weight"
    ):
        train(other, copied, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(other, copied, 3)  # said once
        train(model, optimizer, 3)  # the original is none the worse
    assert max(errors(model)[name] for name in NAMES if where is NAMES or name == where) <= 1e-5


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_that_is_constrained_again_goes_on_as_the_original(how):
    model, optimizer, handle = constrained()
    pair = COPIES[how]((model, optimizer))
    with_handle = COPIES[how]((model, optimizer, handle))
    constrain_(*pair, where=NAMES)
    assert not with_handle[2].active
    with_handle[2].attach()
    expected = train(model, optimizer, 5)
    for other, copied in (pair, with_handle[:2]):
        assert train(other, copied, 5) == pytest.approx(expected, rel=1e-6)
        assert max(errors(other).values()) <= 1e-5


def test_removed_constraints_are_silent():
    model, optimizer, handle = constrained()
    handle.remove()
    assert set(vars(optimizer)) == set(vars(OPTIMIZERS["adamw"](list(Mixed().parameters()))))
    train(*copy.deepcopy((model, optimizer)), 1)
