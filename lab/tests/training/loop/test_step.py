"""One step against the slow formula in float64: accumulation, penalty shares, clipping, smoothing,
and losses of certified margins."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from lab.tests.support import stub_task as stub
from torch import nn

from wellposed.errors import ConfigError
from wellposed_lab.report.runs import read_metrics
from wellposed_lab.training.config import TrainOptions
from wellposed_lab.training.loop.batches import MicroBatches
from wellposed_lab.training.loop.build import build_optimizer
from wellposed_lab.training.loop.step import compute_gradients, rows_of


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(mixed_precision="no", cpu=True)


def gradients(model):
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.reshape(-1) for part in parts])


def concatenated(batches):
    """Return one batch that holds the sequences of all, padded to the longest."""
    values = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence([row for b in batches for row in b[name]], True, fill)
        for name, fill in values.items()
    }


def slow_gradients(model, batch):
    """Return the gradient of the mean loss per target, target by target."""
    model.zero_grad(set_to_none=True)
    log_probabilities = model(batch["input_ids"], batch["attention_mask"]).logits.log_softmax(-1)
    terms = [
        -log_probabilities[row, position, batch["labels"][row, position + 1]]
        for row in range(len(batch["labels"]))
        for position in range(batch["labels"].shape[1] - 1)
        if batch["labels"][row, position + 1] != -100
    ]
    (torch.stack(terms).sum() / len(terms)).backward()
    return gradients(model)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_accumulation_is_exact_wherever_targets_are(accelerator, count):
    task = stub.StubTask()
    model = stub.StubModel().double()
    batches = MicroBatches(task, 3, seed=0).take(count)
    assert count == 1 or len({int((b["labels"][:, 1:] != -100).sum()) for b in batches}) > 1
    expected = slow_gradients(model, concatenated(batches))
    model.zero_grad(set_to_none=True)
    numbers = compute_gradients(accelerator, model, task, batches, TrainOptions(max_grad_norm=0.0))
    scale = float(expected.abs().max())
    tolerance = 100 * torch.finfo(torch.float64).eps * scale
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=tolerance)
    assert numbers.grad_norm == pytest.approx(float(expected.norm()), rel=1e-12)
    assert numbers.not_finite() == []


def test_a_penalty_weighs_as_the_share_of_the_sequences(accelerator):
    task = stub.StubTask()
    model = stub.StubModel().double()
    batches = MicroBatches(task, 5, seed=0).take(5)  # 23 examples: the last micro-batch holds three
    values = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    weight = model.blocks[0].inner.weight

    def penalty():
        return next(values) * weight.square().sum()

    without = slow_gradients(model, concatenated(batches))
    mean = (5 * (1 + 2 + 3 + 4) + 3 * 5) / 23
    model.zero_grad(set_to_none=True)
    (mean * weight.square().sum()).backward()
    expected = without + gradients(model)
    model.zero_grad(set_to_none=True)
    options = TrainOptions(max_grad_norm=0.0)
    settings = {"penalty": penalty, "check_targets": True}
    numbers = compute_gradients(accelerator, model, task, batches, options, **settings)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-11, atol=1e-13)
    # The penalty is reported in float32.
    assert numbers.penalty == pytest.approx(mean * float(weight.detach().square().sum()), rel=1e-5)


def test_a_penalty_of_weights_alone_is_computed_once_a_step(accelerator):
    task = stub.StubTask()
    model = stub.StubModel().double()
    batches = MicroBatches(task, 5, seed=0).take(5)
    weight = model.blocks[0].inner.weight
    calls = []

    def computed():
        calls.append(1)
        return 2.0 * weight.square().sum()

    by_calls = {}
    for argument in ("penalty", "weights_penalty"):
        model.zero_grad(set_to_none=True)
        numbers = compute_gradients(
            accelerator,
            model,
            task,
            batches,
            TrainOptions(max_grad_norm=0.0),
            **{argument: computed},
        )
        by_calls[len(calls)] = (gradients(model), numbers.penalty)
        calls.clear()
    (in_each, reported_in_each), (once, reported) = by_calls[5], by_calls[1]
    torch.testing.assert_close(once, in_each, rtol=1e-11, atol=1e-13)
    # The penalty is reported in float32.
    assert reported == pytest.approx(reported_in_each, rel=1e-6)


def test_clipping_scales_the_whole_gradient(accelerator):
    task = stub.StubTask()
    model = stub.StubModel().double()
    batches = MicroBatches(task, 4, seed=0).take(2)
    free = slow_gradients(model, concatenated(batches))
    limit = 0.25 * float(free.norm())
    model.zero_grad(set_to_none=True)
    options = TrainOptions(max_grad_norm=limit)
    numbers = compute_gradients(accelerator, model, task, batches, options)
    # torch divides by norm + 1e-6.
    torch.testing.assert_close(gradients(model), 0.25 * free, rtol=1e-4, atol=0)
    assert numbers.grad_norm == pytest.approx(4 * limit, rel=1e-12)


def test_label_smoothing_and_precision_change_the_gradient(accelerator):
    task = stub.StubTask()
    model = stub.StubModel()
    batches = MicroBatches(task, 4, seed=0).take(1)

    def with_options(**changes):
        model.zero_grad(set_to_none=True)
        compute_gradients(accelerator, model, task, batches, TrainOptions(**changes))
        return gradients(model)

    plain = with_options()
    assert not torch.allclose(with_options(label_smoothing=0.3), plain, rtol=1e-2)
    half = with_options(precision="bf16")
    assert half.dtype == torch.float32
    assert not torch.equal(half, plain)
    torch.testing.assert_close(half, plain, rtol=0, atol=0.05 * float(plain.abs().max()))


def test_frozen_parameters_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    groups = build_optimizer(model, TrainOptions()).param_groups
    trained = {id(weight) for group in groups for weight in group["params"]}
    assert trained == {id(model[1].weight), id(model[1].bias)}


STRENGTH = 3.0


class WithAuxiliary(nn.Module):
    """A model whose own loss is the mean over sequences of (length * |w|)^2, so that sequences
    differ."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def own_loss(self, attention_mask):
        size = self.inner.blocks[0].inner.weight.square().sum()
        return STRENGTH * (attention_mask.sum(1) ** 2).to(size.dtype).mean() * size

    def forward(self, input_ids, attention_mask):
        logits = self.inner(input_ids, attention_mask).logits
        return SimpleNamespace(logits=logits, auxiliary_loss=self.own_loss(attention_mask))


def test_its_gradient_does_not_depend_on_how_a_batch_is_cut():
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    task = stub.StubTask()
    model = WithAuxiliary(stub.StubModel()).double()
    batches = MicroBatches(task, 5, seed=0).take(5)  # 23 examples: the last micro-batch holds three
    options = TrainOptions(max_grad_norm=0.0)

    compute_gradients(accelerator, model.inner, task, batches, options)
    plain = gradients(model)
    model.zero_grad()
    numbers = compute_gradients(accelerator, model, task, batches, options)
    added = gradients(model) - plain
    lengths = [int(length) for batch in batches for length in batch["attention_mask"].sum(1)]
    assert len(lengths) == 23
    mean = STRENGTH * sum(length**2 for length in lengths) / 23
    expected = mean * model.inner.blocks[0].inner.weight.square().sum()
    model.zero_grad()
    expected.backward()
    torch.testing.assert_close(added, gradients(model), rtol=1e-11, atol=1e-12)
    assert numbers.auxiliary == pytest.approx(float(expected.detach()), rel=1e-5)
    assert compute_gradients(accelerator, model.inner, task, batches, options).auxiliary is None


def test_it_is_logged_and_left_out_of_evaluations(tmp_path):
    def build(config, task):
        return WithAuxiliary(stub.make_model(config, task))

    config = stub.make_config(learning_rate=1e-9)
    stub.run(config, tmp_path / "with", model=build)
    stub.run(config, tmp_path / "without")
    both = (read_metrics(tmp_path / name) for name in ("with", "without"))
    pairs = list(zip(*both, strict=True))
    for row, plain in pairs:
        assert row["loss"] == pytest.approx(plain["loss"], rel=1e-6)
        assert ("auxiliary_loss" in row) == (row["split"] == "train")
        assert "auxiliary_loss" not in plain
    assert all(row["auxiliary_loss"] > 1.0 for row, _ in pairs if row["split"] == "train")


def test_one_that_is_not_finite_stops_the_run_by_name(tmp_path):
    class Broken(WithAuxiliary):
        def own_loss(self, attention_mask):
            return super().own_loss(attention_mask) * float("inf")

    config = stub.make_config()
    broken = Broken(stub.make_model(config, None))
    result = stub.run(config, tmp_path / "run", model=lambda *_: broken)
    assert result.status == "failed"
    assert "auxiliary loss is inf" in result.result["failure"]["what"]
    assert result.result["failure"]["layer"] == "(the auxiliary loss)"


def test_an_encoder_decoder_has_no_margin():
    with pytest.raises(ConfigError, match="received an encoder-decoder"):
        rows_of("seq2seq_lm", torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin_loss": "ce", "margin_radius": 0.1}, "margin_radius = 0.1 with margin_loss = ce"),
        ({"margin_loss": "certified"}, "margin_loss = certified needs a margin_radius"),
        ({"margin_loss": "mse"}, "'mse', expected 'ce', 'certified', 'words:K' or None"),
        *(
            ({"margin_loss": loss}, "expected words:K with a number K above 0")
            for loss in ("words", "words:", "words:0", "words:-1", "words:two", "words:nan")
        ),
        ({"margin_loss": "words:2", "margin_radius": 0.1}, "margin_radius = 0.1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TrainOptions(**options)
