"""A quiet run leaves nothing behind: training flags, buffers, random states, gradients, torch's
fast path."""

from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from wellposed.errors import ConfigError
from wellposed.hooks import call_model, first_tensor, quiet_run, real_tokens
from wellposed.roles import find_roles


class Restless(nn.Module):
    """Draws numbers, counts its calls in a buffer and fails when told to."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, fail=False):
        self.calls = self.calls + 1
        x = self.norm(self.linear(x)) + torch.randn(3)
        if fail:
            raise RuntimeError("boom")
        return x


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("evaluate", [False, True])
def test_nothing_is_left_behind(fail, evaluate):
    model = Restless().train()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    with (
        pytest.raises(RuntimeError, match="boom") if fail else nullcontext(),
        quiet_run(model, evaluate=evaluate),
    ):
        assert model.training is not evaluate
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not model(torch.randn(4, 3), fail=fail).requires_grad
    assert (model.training, model.norm.training, model.linear.training) == (True, False, True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.backends.mha.get_fastpath_enabled() is fast


def test_a_graph_of_before_can_still_be_run_backwards():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    loss = model(torch.randn(4, 3)).square().sum()
    with quiet_run(model):
        model(torch.randn(4, 3))
    loss.backward()
    assert model[0].weight.grad is not None


def test_ways_of_calling_a_model():
    class Add(nn.Module):
        def forward(self, x, y=1.0):
            return x + y

    model = Add()
    x = torch.ones(1, 2)
    for batch, expected in [
        (x, 2.0),
        ((x, 2 * x), 3.0),
        ([x, 3 * x], 4.0),
        ({"x": x, "y": 4.0}, 5.0),
    ]:
        assert call_model(model, batch).unique().tolist() == [expected]
    for wrong in (3, "text", None):
        with pytest.raises(ConfigError, match="expected a tensor"):
            call_model(model, wrong)


def test_a_batch_that_a_model_cannot_take_is_told_with_its_shapes():
    class Named(nn.Module):
        def forward(self, input_ids, **others):
            return input_ids @ torch.ones(3, 1)

    with pytest.raises(ConfigError, match=r"RuntimeError: .*\n.*argument: float32 \(1, 2\)"):
        call_model(Named(), torch.ones(1, 2))
    with pytest.raises(ConfigError, match=r"argument: 'input_ids'[\s\S]*input_idz: int64 \(3,\)"):
        call_model(Named(), {"input_idz": torch.arange(3)})


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left"), StopIteration()])
def test_what_is_no_fault_of_the_batch_goes_through(error):
    class Failing(nn.Module):
        def forward(self, x):
            raise error

    with pytest.raises(type(error)):
        call_model(Failing(), torch.ones(1, 2))


def test_first_tensor_looks_into_what_models_return():
    x = torch.ones(2, 3)
    for value in (
        x,
        (None, x),
        OrderedDict(loss=torch.tensor(1.0), logits=x),
        [torch.ones(2, 3, dtype=torch.long), (x,)],
    ):
        assert first_tensor(value) is x
    assert first_tensor({"a": None, "b": "text"}) is None


def test_real_tokens_of_every_mask():
    mask = torch.tensor([[1, 1, 0]])
    real = mask.bool()
    translating = find_roles(nn.Transformer(8, 2, 1, 1, 16, batch_first=True)).attention
    batches = [
        ({"attention_mask": mask}, "encoder", ()),
        ({"attention_mask": mask}, None, ()),
        ({"attention_mask": mask}, "decoder", ()),  # a decoder alone has no other mask
        ({"decoder_attention_mask": mask, "attention_mask": mask[:, :2]}, "decoder", translating),
        ({"src_key_padding_mask": ~real}, "encoder", translating),
        ({"tgt_key_padding_mask": ~real}, "decoder", translating),
        ({"key_padding_mask": torch.zeros(1, 3).masked_fill(~real, -torch.inf)}, "encoder", ()),
    ]
    for batch, stack, roles in batches:
        computed = real_tokens(batch, stack, roles)
        assert computed is not None
        assert torch.equal(computed, real)
    assert real_tokens({"attention_mask": mask}, "decoder", translating) is None
    assert real_tokens({"attention_mask": mask[0]}, "encoder", ()) is None
    assert real_tokens(mask, "encoder", ()) is None
