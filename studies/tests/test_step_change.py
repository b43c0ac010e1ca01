"""One step moves the output alike at any depth after T-Fixup and DT-Fixup; after plain Xavier it
does not."""

import pytest
import torch
from torch import nn

from wellposed.errors import ConfigError
from wellposed.initialize import dt_fixup_
from wellposed.models import WellposedConfig, WellposedModel, WellposedSeq2SeqModel
from wellposed_studies.huang2020.step_change import step_change


def change_per_step(model_class, layers, init):
    """Return the change of the output over the rate of one step on the matrices, in float64."""
    torch.manual_seed(layers)
    config = WellposedConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=8, norm="none", scale_embeddings=False, init=init,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(0, 40, (2, 6))}
    if model_class is WellposedSeq2SeqModel:
        batch["decoder_input_ids"] = torch.randint(0, 40, (2, 6))
    return step_change(model_class(config).double().eval(), batch)


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [WellposedModel, WellposedSeq2SeqModel])
def test_one_step_moves_the_output_alike_at_every_depth_and_ever_more_by_plain_xavier(model_class):
    sizes = [change_per_step(model_class, layers, "t_fixup") for layers in (2, 8, 32)]
    assert max(sizes) <= 2 * min(sizes), sizes
    shallow, deep = (change_per_step(model_class, layers, "xavier") for layers in (2, 8))
    assert deep > 100 * shallow


def test_a_step_is_measured_and_taken_back():
    # f = W x and <f, u> has the gradient u x^T, so the step moves f by lr u |x|^2
    model = nn.Linear(3, 2).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.tensor([[1.0, 2.0, 2.0]], dtype=torch.float64)
    assert step_change(model, x) == pytest.approx(9.0, rel=1e-5)
    assert step_change(model, [x], biases=True) == pytest.approx(10.0, rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.weight.grad is None
    with pytest.raises(ConfigError, match="no floating tensor"):
        step_change(nn.Flatten(), torch.ones(2, 2, dtype=torch.long))


def test_the_limit_of_small_rates_is_the_norm_of_j_jt_u():
    free = {"bias": False, "dtype": torch.float64}
    model = nn.Sequential(nn.Linear(3, 4, **free), nn.Tanh(), nn.Linear(4, 2, **free))
    x = 3 * torch.randn(1, 3, dtype=torch.float64)
    weights = dict(model.named_parameters())
    call = torch.func.functional_call
    jacobians = torch.func.jacrev(lambda values: call(model, values, (x,))[0])(weights)
    dense = torch.cat([jacobian.detach().flatten(1) for jacobian in jacobians.values()], 1)
    torch.manual_seed(1)
    direction = torch.randn(1, 2, dtype=torch.float64)[0]
    torch.manual_seed(1)
    expected = float((dense @ dense.mT @ direction / direction.norm()).norm())
    assert step_change(model, x) == pytest.approx(expected, rel=1e-6)
    assert step_change(nn.Linear(3, 2).double(), torch.zeros_like(x)) == 0.0
    with pytest.raises(ConfigError, match="needs float64"):
        step_change(model.float(), x.float())


def test_one_step_after_dt_fixup_moves_the_output_alike_at_every_depth():
    """The factor divides out both the depth and the size of what enters: the change of one step
    stays of order lr."""
    changes = []
    for layers in (2, 8, 32):
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(16, 2, 8, batch_first=True)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).double()
        x = torch.randn(2, 5, 16, dtype=torch.float64) * 3
        dt_fixup_(model, [x])
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
        changes.append(step_change(model.eval(), x))
    assert max(changes) <= 2 * min(changes), changes
