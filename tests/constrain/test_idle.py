"""A constraint whose optimizer never steps while another trains the weights says so, once, and only
then."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.support.constrained import Mixed, held, problem, train
from tests.support.zoo import PLAIN
from torch import nn

from wellposed.constrain import ConstraintWarning, constrain_


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
def test_another_optimizer_in_its_place_is_told_at_its_third_step(kind: str) -> None:
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


def test_no_word_without_cause() -> None:
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


def test_the_trainer_that_makes_its_own_optimizer_is_noticed(tmp_path: object) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**PLAIN))
    held("adamw", None, model=model, roles=("query", "key"))
    rows = [
        {"input_ids": torch.randint(0, 30, (5,)), "labels": torch.tensor(index % 2)}
        for index in range(12)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=5, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    with pytest.warns(ConstraintWarning, match="a Trainer makes its own"):
        transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
