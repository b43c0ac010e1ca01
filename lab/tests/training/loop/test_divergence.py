"""The layer that is blamed is the one that broke: in its weights, forward, inside a block, or
backward."""

import pytest
import torch
from lab.tests.support import stub_task as stub
from torch import nn

from wellposed.errors import ConvergenceError
from wellposed_lab.training.folder.result import read_result
from wellposed_lab.training.loop.divergence import first_nonfinite_module


class Attention(nn.Module):
    """Compute between the layers, so that no output of a module shows it."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.o_proj = nn.Linear(4, 4)
        self.divide_by = 1.0

    def forward(self, x, mask):
        scores = self.q_proj(x) @ x.mT + mask
        return self.o_proj((scores.softmax(-1) @ x) / self.divide_by)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        # Masks hold -inf by right.
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x, mask)
        return self.norm(x)


def weight(tower, x):
    tower.layers[1].o_proj.weight[2, 3] = float("nan")


def output(tower, x):
    x.mul_(100)
    for index in (1, 2):
        tower.layers[index].o_proj.weight.mul_(1e38)
        tower.layers[index].o_proj.bias.fill_(3e38)


def between(tower, x):
    tower.layers[2].divide_by = 0.0


def infinite_input(tower, x):
    x[0, 0, 0] = float("inf")


def blame(model, x, **extra):
    return first_nonfinite_module(model, lambda: {"(the loss)": model(x).square().mean(), **extra})


CASES = [
    (weight, "layers.1.o_proj"),
    (output, "layers.1.o_proj"),
    (between, "layers.2"),
    (infinite_input, "(the loss)"),
]


@pytest.mark.parametrize(("spoil", "layer"), CASES)
def test_the_first_place_that_is_not_finite_is_blamed(spoil, layer):
    tower = Tower()
    x = torch.randn(2, 5, 4, requires_grad=True)
    with torch.no_grad():
        spoil(tower, x)
    assert blame(tower, x)[0] == layer


def test_a_term_of_the_loss():
    tower = Tower()
    x = torch.randn(2, 5, 4)
    term = tower.embed.weight.sum() * float("inf")
    assert blame(tower, x, **{"(the penalty)": term})[0] == "(the penalty)"


def test_a_backward_pass_that_breaks():
    class Root(nn.Module):
        def forward(self, x):
            return (x * 0.0).abs().sqrt()  # the derivative of sqrt at 0 is infinite, times 0 is NaN

    model = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 4))
    assert blame(model, torch.randn(2, 5, 4)) is None


def test_a_run_stops_before_the_weights_are_touched(tmp_path):
    """The batch of step 6 breaks block 1; the run ends there with the step, the rate and the
    layer."""

    class Fragile(stub.Block):
        calls = 0

        def forward(self, x):
            if self.training and torch.is_grad_enabled():
                Fragile.calls += 1
            broken = self.training and Fragile.calls >= 6
            return super().forward(x) * (float("inf") if broken else 1.0)

    models = []

    def make(config, task):
        model = stub.make_model(config, task)
        model.blocks[1] = Fragile(8, 0.0)
        models.append(model)
        return model

    config = stub.make_config(steps=12, eval_every=5, checkpoint_every=5)
    result = stub.run(config, tmp_path / "run", model=make)
    assert (result.status, result.exit_code) == ("failed", 1)
    failure = result.result["failure"]
    assert (failure["step"], failure["layer"]) == (6, "blocks.1")
    from wellposed_lab.training.loop.schedules import learning_rate

    assert failure["learning_rate"] == learning_rate(6, config.train, 8)
    assert "blocks.1" in result.message
    assert "step 6" in result.message
    assert result.result["train_info"]["steps"] == 5
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "run" / "checkpoint-5" / "model.safetensors")
    for name, value in saved.items():
        assert torch.equal(models[0].state_dict()[name], value)


def overflowing(model):
    class Overflowing(nn.Module):
        def forward(self, x):
            return x if self.training else x * float("nan")

    model.blocks.append(Overflowing())


def with_a_head(model):
    model.lm_head = model.head


@pytest.mark.parametrize(
    ("change", "options", "layer", "what"),
    [
        (overflowing, {}, "blocks.2", "loss on valid"),
        (with_a_head, {"margin_radius": 3e38}, "(the loss)", "loss is"),
    ],
)
def test_a_bad_validation_loss_or_margin_stops_the_run_too(tmp_path, change, options, layer, what):
    def make(config, task):
        model = stub.make_model(config, task)
        change(model)
        return model

    result = stub.run(stub.make_config(**options), tmp_path / "run", model=make)
    assert result.status == "failed"
    assert result.result["failure"]["layer"] == layer
    assert what in result.result["failure"]["what"]


@pytest.mark.parametrize("when", ["start", "step"])
def test_a_convergence_error_is_a_failed_run(tmp_path, when):
    config = stub.make_config()

    def broken(*_):
        raise ConvergenceError("polar: the (8, 8) matrix holds values that are not finite")

    class Breaking(stub.StubTask):
        def loss_sum(self, *_, **__):
            broken()

    keywords = {"model": broken} if when == "start" else {"task": Breaking()}
    result = stub.run(config, tmp_path / "run", **keywords)
    assert result.status == "failed"
    assert "not finite" in result.message
    failed = read_result(tmp_path / "run")
    assert failed.status == "failed"
    # Nothing stands in the way.
    assert stub.run(config, tmp_path / "run", resume="auto").status == "success"
