"""A call of the penalty reads each parameter once: one gather for all parts, one run of what computes it."""

from unittest import mock

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from wellposed import OrthogonalityPenalty

PARTS = {
    "query and value": {"query": 1.0, "value": 1.0},
    "one by one": {"attention": 1.0, "attention_mode": "separate"},
    "all three forms": {"query": 1.0, "key": 1.0, "value": 1.0, "form": "qr"},
}


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("name", PARTS)
def test_a_fused_weight_in_shards_is_gathered_once_a_call(name, mesh):
    model = encoder()
    plain = OrthogonalityPenalty(model, **PARTS[name])().item()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    penalty = OrthogonalityPenalty(model, **PARTS[name])
    fused = {id(layer.self_attn.in_proj_weight) for layer in model.layers}
    usual = DTensor.full_tensor
    with mock.patch.object(DTensor, "full_tensor", autospec=True, side_effect=usual) as gather:
        value = penalty()
    gathered = [call.args[0] for call in gather.mock_calls]
    assert len([weight for weight in gathered if id(weight) in fused]) == len(model.layers)
    assert value.item() == pytest.approx(plain, rel=1e-5)
    value.backward()
    for layer in model.layers:
        weight = layer.self_attn.in_proj_weight
        assert weight.grad.placements == weight.placements


class Doubled(nn.Module):
    calls = 0

    def forward(self, weight):
        Doubled.calls += 1
        return 2 * weight


def test_a_computed_weight_is_computed_once_a_call():
    model = encoder()
    for layer in model.layers:
        parametrize.register_parametrization(layer.linear1, "weight", Doubled())
    penalty = OrthogonalityPenalty(model, feedforward=1.0)
    Doubled.calls = 0
    penalty()
    assert Doubled.calls == len(model.layers)


def test_a_look_at_a_sharded_part_gathers_nothing(mesh):
    model = encoder()
    fully_shard(model, mesh=mesh)
    with mock.patch.object(DTensor, "full_tensor", autospec=True) as gather:
        OrthogonalityPenalty(model, query=1.0, value=1.0)
    assert not gather.mock_calls
