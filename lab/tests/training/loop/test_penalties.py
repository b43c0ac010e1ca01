"""The certified bound as a term of the loss: its value, its gradient in a run, its refusals, and the
variants that use it."""

import math
from dataclasses import replace

import pytest
import torch
from tests.support.words import words as typed

import wellposed as wp
from wellposed.errors import ConfigError, NotLipschitzError
from wellposed.model_options import ModelOptions
from wellposed_lab.cli.arguments import read_request
from wellposed_lab.cli.train import TrainArguments, with_variant
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.report.runs import read_metrics
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.config import PenaltyOptions, RunConfig, StartOptions, TrainOptions
from wellposed_lab.training.loop import penalties
from wellposed_lab.training.loop.build import build_run_model, load_run_model
from wellposed_lab.training.loop.penalties import Due, build_penalty
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
    (note,) = both.notes()
    assert note.startswith("the certified bound takes ")
    assert build_penalty(alone[1], model).notes() == []


def test_the_bound_and_the_others_have_periods_of_their_own():
    options = PenaltyOptions(value=0.1, affinity=0.1, bound=0.3, every=2, bound_every=3)
    several = build_penalty(options, model_of("lipschitz:3"))
    due = [several.of_step(step) for step in range(6)]
    # An affinity reads the batch; the bound is computed once a step.
    assert [step for step in range(6) if due[step].of_batch] == [0, 2, 4]
    assert [step for step in range(6) if due[step].of_weights] == [0, 3]
    alone = float(build_penalty(PenaltyOptions(bound=0.3), model_of("lipschitz:3"))().detach())
    assert float(due[3].of_weights().detach()) == pytest.approx(3 * alone, rel=1e-6)
    assert several.last_step(9) == 8
    weights = build_penalty(PenaltyOptions(value=0.1, bound=0.3), model_of("lipschitz:3"))
    assert weights.of_step(0).of_batch is None
    assert weights.of_step(1) == Due(None, weights.of_step(1).of_weights)


def test_every_part_keeps_its_mode():
    model = model_of("lipschitz:3").train()
    model.model.layers[0].eval()
    modes = [part.training for part in model.modules()]
    build_penalty(PenaltyOptions(bound=0.3), model)()
    assert [part.training for part in model.modules()] == modes


REFUSED = {
    "rezero": (
        "Lipschitz bound",
        "model.layers.0.attention",
        "give --penalty.bound 0, or a variant",
    ),
    "post_ln": ("penalty.bound", "model.layers.0.attention (DotProductAttention): dot"),
    "lipschitz:3": ("penalty.bound", "no weight is trained; give"),
}


@pytest.mark.parametrize("spec", REFUSED)
def test_a_model_without_a_bound_is_refused(spec):
    """ReZero is the identity at first, which has a bound."""
    model = model_of(spec).requires_grad_(not spec.startswith("lipschitz"))
    with pytest.raises(ConfigError) as refused:
        build_penalty(PenaltyOptions(bound=0.3), model)
    assert all(words in str(refused.value) for words in REFUSED[spec])


def test_a_bound_of_0_is_refused():
    model = model_of("lipschitz:3")
    torch.nn.init.zeros_(model.classifier.weight)
    with pytest.raises(ConfigError, match="it is 0, as some map"):
        build_penalty(PenaltyOptions(bound=0.3), model)


def test_a_run_without_a_bound_is_refused_before_training(tmp_path):
    config = replace(base(), penalty=PenaltyOptions(bound=0.3))
    with pytest.raises(ConfigError, match=r"penalty\.bound"):
        train(apply_variant("post_ln", config), tmp_path / "run", progress=False)
    with pytest.raises(ConfigError, match=r"bound = -1"):
        PenaltyOptions(bound=-1.0)


def windows():
    return RunConfig("text_classification", {"data": "ag_news/", "certified_windows": 2})


def penalised(**options):
    return replace(base(), penalty=PenaltyOptions(**options))


CHOICES = {
    "a budget of 1": ("lipschitz", base(), "", None),
    "a larger budget": ("lipschitz:4", base(), "", 0.3),
    "pairs": ("lipschitz:4", base("retrieval"), "", 0.3),
    "none, asked for": ("lipschitz:4", penalised(bound=0.0), "--penalty.bound 0", 0.0),
    "asked for": ("lipschitz", penalised(bound=0.1), "--penalty.bound 0.1", 0.1),
    "beside another": ("lipschitz:4", penalised(value=1e-6), "--penalty.value 1e-6", 0.3),
    "others less often": ("lipschitz:4", penalised(every=2), "--penalty.every 2", 0.3),
    "a margin of words": (
        "lipschitz:4",
        base(margin_loss="words:2"),
        "--margin-loss words:2",
        None,
    ),
    "windows that vote": ("lipschitz:4", windows(), "--data ag_news/ --certified-windows 2", None),
    "checkpointing": (
        "lipschitz:4",
        base(gradient_checkpointing=True),
        "--gradient-checkpointing",
        None,
    ),
    "a language model": ("lipschitz:4", base("char_lm"), "", None),
    "another variant": ("rezero", base(), "", None),
}


@pytest.mark.parametrize("case", CHOICES)
def test_where_a_variant_trains_with_it_in_python_and_on_the_command_line(case):
    spec, asked, options, expected = CHOICES[case]
    in_python = apply_variant(spec, asked).penalty
    words = ["--variant", spec, *typed(options)]
    request = read_request("train", asked.task, words, TrainArguments, "", changed=with_variant)
    for penalty in (in_python, request.config.penalty):
        assert penalty.bound == expected
        assert penalty.bound_every == 5
        assert penalty.every == asked.penalty.every


def test_it_is_computed_once_in_its_steps_however_the_batch_is_cut(tmp_path, monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(1)
        return certified_bound(*args, **options)

    certified_bound = penalties.certified_bound
    monkeypatch.setattr(penalties, "certified_bound", counted)
    cut = base(steps=4, gradient_accumulation=3)
    options = PenaltyOptions(bound=0.3, bound_every=2, value=1e-3)
    config = apply_variant("lipschitz:4", replace(cut, penalty=options))
    assert train(config, tmp_path / "run", progress=False).status == "success"
    assert len(calls) == 2  # in the first and the third step


def test_a_warning_of_large_penalties_does_not_depend_on_their_periods(tmp_path, caplog):
    for every, bound_every in ((1, 1), (3, 5)):
        options = PenaltyOptions(bound=30.0, bound_every=bound_every, value=100.0, every=every)
        config = apply_variant("lipschitz:4", replace(base(steps=1), penalty=options))
        train(config, tmp_path / f"every{every}", progress=False)
    one, other = [row.message for row in caplog.records if "the first penalty" in row.message]
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation": 2, "monitor": 2}])
def test_a_run_with_it_ends_with_a_smaller_bound(options, tmp_path):
    totals = {}
    for strength in (0.0, 3.0):
        asked = replace(base(steps=30, **options), penalty=PenaltyOptions(bound=strength))
        folder = tmp_path / f"{strength:g}"
        result = train(apply_variant("lipschitz:4", asked), folder, progress=False)
        assert result.status == "success"
        model, _ = load_run_model(folder)
        totals[strength] = wp.certify(model.eval(), seq_len=12).total
        rows = [row for row in read_metrics(folder) if row.get("split") == "train"]
        assert all(bool(row["penalty"]) == bool(strength) for row in rows)
        assert ("penalty_moves" in result.result["train_info"]) == bool(strength)
    assert totals[3.0] < 0.9 * totals[0.0]


def test_a_run_that_diverges_ends_as_without_it(tmp_path):
    """Its step runs again with hooks, of which no certificate knows."""
    failures = {}
    for strength in (0.0, 0.3):
        asked = replace(base(steps=2, logit_scale=1e39), penalty=PenaltyOptions(bound=strength))
        run = train(apply_variant("lipschitz:4", asked), tmp_path / f"{strength}", progress=False)
        assert run.status == "failed"
        failures[strength] = run.result["failure"]["layer"]
    assert failures[0.0] == failures[0.3] == "(the loss)"


def test_weights_that_lost_their_bound_are_a_divergence(tmp_path, monkeypatch):
    config = apply_variant("lipschitz:4", base(steps=8))
    bounded = penalties.certified_bound
    calls = []

    def lost(*args, **options):
        calls.append(1)
        if len(calls) > 1:
            raise NotLipschitzError("no bound")
        return bounded(*args, **options)

    monkeypatch.setattr(penalties, "certified_bound", lost)
    run = train(config, tmp_path / "run", progress=False)
    assert run.status == "failed"
    assert run.result["failure"]["layer"] == "(the penalty)"
    assert run.result["failure"]["step"] == 6


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
