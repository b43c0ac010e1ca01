"""The certified bound as a term of the loss: its value, its gradient in a run, its refusals, and the
variants that use it."""

import math
from dataclasses import replace

import pytest
import torch

import wellposed as wp
from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.report.runs import read_metrics
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.config import PenaltyOptions, RunConfig, StartOptions, TrainOptions
from wellposed_lab.training.loop.build import build_run_model, load_run_model
from wellposed_lab.training.loop.penalties import build_penalty, notes_on_cost
from wellposed_lab.training.loop.train import train

SIZES = ModelOptions(hidden_size=16, num_attention_heads=2, num_hidden_layers=2)
TASKS = {
    "listops": {"max_depth": 2, "max_length": 12, "num_train": 200},
    "retrieval": {},
    "char_lm": {"limit_chars": 9000, "seq_len": 16},
}


def base(task="listops", **options):
    settings = {"steps": 6, "batch_size": 8, "eval_batches": 1, "schedule": "constant"}
    return RunConfig(
        task, TASKS.get(task, {}), model=SIZES, train=TrainOptions(**settings | options)
    )


def model_of(spec, task="listops"):
    torch.manual_seed(0)
    return build_run_model(apply_variant(spec, base(task)), build_task(task, TASKS[task]))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("spec", ["lipschitz", "lipschitz:3"])
def test_it_is_the_logarithm_of_the_certificate_whatever_the_mode(spec, task):
    model = model_of(spec, task)
    total = wp.certify(model.eval(), seq_len=model.config.max_position_embeddings).total
    penalty = build_penalty(PenaltyOptions(bound=0.7), model.train())
    torch.testing.assert_close(penalty().detach(), torch.tensor(0.7 * math.log(total)))
    assert model.training


def test_a_step_along_its_gradient_lowers_the_certificate():
    model = model_of("lipschitz:3")
    length = model.config.max_position_embeddings
    before = wp.certify(model.eval(), seq_len=length).total
    build_penalty(PenaltyOptions(bound=1.0), model)().backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight -= 0.01 * weight.grad
    assert wp.certify(model, seq_len=length).total < before


def test_it_is_added_to_an_orthogonality_penalty():
    model = model_of("lipschitz:3")
    alone = [PenaltyOptions(bound=0.3), PenaltyOptions(value=0.1)]
    both = build_penalty(PenaltyOptions(bound=0.3, value=0.1), model)
    expected = sum(float(build_penalty(options, model)().detach()) for options in alone)
    assert float(both().detach()) == pytest.approx(expected, rel=1e-6)
    (note,) = notes_on_cost(both, 5)
    assert note.startswith("the certified bound takes ")
    assert notes_on_cost(build_penalty(alone[1], model), 5) == notes_on_cost(None, 5) == []


REFUSED = {
    "rezero": r"no Lipschitz .* model\.layers\.0\.attention \(DotProductAttention\), .*; leave the",
    "post_ln": r"penalty\.bound = 0\.3: no Lipschitz bound on all inputs is known for model\.layers\.0",
    "lipschitz:3": r"penalty\.bound = 0\.3: .* has no gradient, as no linear map",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_a_model_without_a_bound_is_refused(spec):
    """ReZero is the identity at first, which has a bound."""
    model = model_of(spec).requires_grad_(not spec.startswith("lipschitz"))
    with pytest.raises(ConfigError, match=REFUSED[spec]):
        build_penalty(PenaltyOptions(bound=0.3), model)


def test_a_run_without_a_bound_is_refused_before_training(tmp_path):
    config = replace(base(), penalty=PenaltyOptions(bound=0.3))
    with pytest.raises(ConfigError, match=r"penalty\.bound"):
        train(apply_variant("post_ln", config), tmp_path / "run", progress=False)
    with pytest.raises(ConfigError, match=r"bound = -1"):
        PenaltyOptions(bound=-1.0)


def windows():
    return RunConfig("text_classification", {"data": "ag_news/", "certified_windows": 2})


ACTIVE = PenaltyOptions(value=1e-6)
CHOICES = {
    "a budget of 1": ("lipschitz", base(), (None, 1)),
    "a larger budget": ("lipschitz:4", base(), (0.3, 5)),
    "pairs": ("lipschitz:4", base("retrieval"), (0.3, 5)),
    "none, asked for": (
        "lipschitz:4",
        replace(base(), penalty=PenaltyOptions(bound=0.0)),
        (0.0, 1),
    ),
    "asked for": ("lipschitz", replace(base(), penalty=PenaltyOptions(bound=0.1)), (0.1, 1)),
    "every, asked for": ("lipschitz:4", replace(base(), penalty=PenaltyOptions(every=2)), (0.3, 2)),
    "beside another": ("lipschitz:4", replace(base(), penalty=ACTIVE), (0.3, 1)),
    "a margin of words": ("lipschitz:4", base(margin_loss="words:2"), (None, 1)),
    "windows that vote": ("lipschitz:4", windows(), (None, 1)),
    "a language model": ("lipschitz:4", base("char_lm"), (None, 1)),
    "another variant": ("rezero", base(), (None, 1)),
}


@pytest.mark.parametrize("case", CHOICES)
def test_where_a_variant_trains_with_it(case):
    spec, asked, expected = CHOICES[case]
    penalty = apply_variant(spec, asked).penalty
    assert (penalty.bound, penalty.every) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation": 2, "monitor": 2}])
def test_a_run_with_it_ends_with_a_smaller_bound(options, tmp_path):
    totals = {}
    for strength in (0.0, 3.0):
        asked = replace(base(steps=30, **options), penalty=PenaltyOptions(bound=strength, every=5))
        folder = tmp_path / f"{strength:g}"
        result = train(apply_variant("lipschitz:4", asked), folder, progress=False)
        assert result.status == "success"
        model, _ = load_run_model(folder)
        totals[strength] = wp.certify(model.eval(), seq_len=12).total
        rows = [row for row in read_metrics(folder) if row.get("split") == "train"]
        assert all(bool(row["penalty"]) == bool(strength) for row in rows)
        assert ("penalty_moves" in result.result["train_info"]) == bool(strength)
    assert totals[3.0] < 0.9 * totals[0.0]


@pytest.mark.slow
def test_a_start_model_with_a_bound_trains_with_it(tmp_path):
    config = apply_variant("lipschitz:4", base(steps=3))
    train(config, tmp_path / "first", progress=False)
    start = StartOptions(str(tmp_path / "first" / "final"))
    asked = replace(
        base(steps=3), model=ModelOptions(), start=start, penalty=PenaltyOptions(bound=0.3)
    )
    assert (
        train(apply_variant("plain", asked), tmp_path / "next", progress=False).status == "success"
    )
