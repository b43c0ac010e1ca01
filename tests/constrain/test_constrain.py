"""`constrain_`: weights stay orthogonal under any optimizer, from the nearest start, and leave no
trace."""

import copy
import warnings

import pytest
import torch
from tests.support.constrained import (
    NAMES,
    WIDTH,
    Mixed,
    constrained,
    distance,
    errors,
    isometry_error,
    problem,
    same_state,
    train,
)  # fmt: skip
from tests.support.launches import Launches
from torch import nn

from wellposed.constrain import ConstraintWarning, MatrixSet, constrain_, select_weights

hf = pytest.importorskip("transformers")


@pytest.mark.parametrize("size", [0.01, 0.1, 0.3, 1.0, 3.0])
def test_steps_of_any_size_stay_orthogonal_and_on_their_component(size):
    model, optimizer, handle = constrained(model=Mixed(32), lr=1.0)
    sign = float(torch.linalg.det(model.square.weight.detach().double()))
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstraintWarning)
        for _ in range(300 if size == 0.1 else 60):
            for name in NAMES:
                noise = torch.randn(getattr(model, name).weight.shape, generator=generator)
                getattr(model, name).weight.grad = noise / torch.linalg.matrix_norm(noise, 2) * size
            optimizer.step()
    assert handle.error().worst <= 1e-5
    assert max(isometry_error(getattr(model, name).weight) for name in ("tall", "wide")) <= 1e-5
    after = float(torch.linalg.det(model.square.weight.detach().double()))
    assert after == pytest.approx(sign, abs=1e-4)


def test_a_large_step_is_said_once():
    model, optimizer, _ = constrained("sgd", "square", lr=1.0)
    model.square.weight.grad = 20 * torch.randn(WIDTH, WIDTH)
    with pytest.warns(ConstraintWarning, match=r"square\.weight.*lower the learning rate"):
        optimizer.step()
    optimizer.step()  # a second warning would be an error
    assert isometry_error(model.square.weight) <= 1e-5


def nearest(weight, to):
    if to == "columns":
        return weight / weight.norm(dim=0)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    return (left * (values.clamp(max=1.0) if to == "spectral" else 1.0)) @ right


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
def test_attaching_moves_to_the_nearest_and_says_how_far(to, dtype):
    model = Mixed().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    before = {name: getattr(model, name).weight.detach().double().clone() for name in NAMES}
    for row in constrained(model=model, to=to)[2].report.rows:
        name = row.path.removesuffix(".weight")
        start = before[name]
        after = getattr(model, name).weight.detach().double()
        assert torch.allclose(after, nearest(start, to), atol=1e-5)
        assert (row.shape, row.size) == (tuple(start.shape), 1.0)
        assert row.moved_frobenius == pytest.approx(
            float((after - start).norm() / start.norm()), rel=1e-4
        )
        assert row.error_before == pytest.approx(distance(start, to), rel=1e-5)
        assert row.error_after <= (0.0 if to == "spectral" else 1e-6)


def test_gain_scales_the_isometry_and_fit_moves_least():
    model = Mixed()
    before = model.square.weight.detach().double().clone()
    _, optimizer, handle = constrained("adamw", model=model, gain="fit")
    row = handle.report.rows[0]
    values = torch.linalg.svdvals(before)
    assert row.size == float(f"{float(values.mean()):.3g}")
    assert row.moved_frobenius < float((values - 1).norm() / values.norm())
    train(model, optimizer, 50)
    assert isometry_error(model.square.weight / row.size) <= 1e-5
    assert handle.error().worst <= 1e-5


def test_dry_run_prints_the_plan_and_changes_nothing(capsys):
    model = Mixed()
    before = copy.deepcopy(model.state_dict())
    _, optimizer, handle = constrained(model=model, dry_run=True)
    assert "\ntall.weight: would move by " in capsys.readouterr().out
    assert not handle.active
    assert not optimizer._optimizer_step_pre_hooks
    assert same_state(model, before)


def test_remove_leaves_no_trace():
    model = Mixed()
    plain = copy.deepcopy(model)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    _, optimizer, handle = constrained("adamw", model=model)
    train(model, optimizer, 3)
    assert repr(handle) == "Constraint(3 weights, active)"
    handle.remove()
    assert not handle.active
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not any("wellposed" in str(key) for state in optimizer.state.values() for key in state)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    x, _ = problem()
    assert torch.equal(model(x), plain(x))
    # And the optimizer is an ordinary one again: the next step leaves the manifold.
    train(model, optimizer, 20)
    assert max(errors(model).values()) > 1e-3


def verbs_of(matrix_set):
    names = (name for name in dir(matrix_set) if name[0] != "_")
    return {name for name in names if callable(getattr(matrix_set, name))}


@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
def test_a_set_has_the_verbs_of_every_set_and_no_more(to):
    """The machinery, once for all of them, is no part of a set."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    handle = constrain_(model, torch.optim.SGD(model.parameters()), where="query", to=to)
    assert verbs_of(type(handle.weights[0].set)) == verbs_of(MatrixSet)
    measuring = {"error", "spectral_error", "nearest", "nearest_stack", "nearest_late"}
    steps = {"memory", "state", "retract"}
    choice = {
        "check_bound",
        "reads_orientation",
        "refusal",
        "refusal_of_zeros",
        "chosen",
        "for_weight",
    }
    assert verbs_of(MatrixSet) == measuring | steps | choice


def layers_of(name):
    """A model, and how many matrices its two layers (torch: one) have in attention and feed-forward."""
    if name == "torch":
        return nn.TransformerEncoderLayer(8, 2, 16), 6
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
    config = getattr(hf, f"{name}Config")
    if name == "GPT2":
        return hf.GPT2LMHeadModel(config(n_embd=16, n_layer=2, n_head=2, vocab_size=20)), 12
    if name == "Mixtral":
        sizes |= {"num_local_experts": 3, "num_key_value_heads": 2}
    model = getattr(hf, "BertForSequenceClassification" if name == "Bert" else f"{name}ForCausalLM")
    count = {"Bert": 12, "Llama": 14, "Mixtral": 2 * (4 + 3 * 3)}[name]
    return model(config(intermediate_size=24, **sizes)), count


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Bert", "Mixtral", "torch"])
def test_spectral_holds_every_matrix_of_the_layers_by_default(name, caplog):
    caplog.set_level("INFO")
    model, count = layers_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters())
    handle = constrain_(model, optimizer, to="spectral", bound="rms:0.01")
    assert (len(handle.weights), handle.error().worst) == (count, 0.0)
    if name == "Mixtral":  # its routers are matrices of the layers, and play no role
        assert "unconstrained inside the layers: model.layers.0.mlp.gate.weight" in caplog.text
    else:
        assert "every matrix of the layers; unconstrained: " in caplog.text
    assert handle.paths == tuple(
        weight_slice.label for weight_slice in select_weights(model, where="layers")
    )
    for key, value in model.named_parameters():
        is_layer = any(part in key for part in (".layer", ".h.", "self_attn", "linear"))
        is_matrix = is_layer and value.ndim > 1 and ".gate." not in key
        assert is_matrix != torch.equal(value, before[key]), key


@pytest.mark.parametrize(
    ("to", "launches", "reads"), [("orthogonal", 16, 1), ("spectral", 16, 1), ("columns", 48, 4)]
)
def test_attaching_asks_little_more_of_a_device_for_a_layer_more(to, launches, reads):
    counts = []
    for layers in (4, 24):
        model = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(layers))
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 3.0)
        optimizer = torch.optim.SGD(model.parameters())
        with Launches() as count:
            constrain_(model, optimizer, where="*", to=to)
        counts.append((count.total, count.reads))
    (few, seldom), (many, often) = counts
    assert many - few <= 20 * launches
    assert often - seldom <= 20 * reads
