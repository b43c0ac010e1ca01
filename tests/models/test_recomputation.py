"""Gradient checkpointing of every family: the same loss and gradients from fewer stored
activations."""

import pytest
import torch
from tests.support.transject import IDS, MASK
from torch.testing import assert_close

from wellposed import models
from wellposed.errors import ConfigError
from wellposed.nn import TransJectCache, TransJectStack

LABELS = torch.tensor([2, 0])
PAIR = {"input_ids_pair": IDS.flip(0), "attention_mask_pair": MASK.flip(0)}
HEADS = [
    (models.TransJectForSequenceClassification, {"labels": LABELS}),
    (models.TransJectForSequencePairClassification, {"labels": LABELS, **PAIR}),
    (models.TransJectForCausalLM, {"labels": IDS}),
    (models.WellposedForCausalLM, {"labels": IDS}),
    (models.WellposedForSeq2SeqLM, {"labels": IDS, "decoder_input_ids": IDS}),
    (models.TransJectForMaskedLM, {"labels": IDS}),
    (models.WellposedForMaskedLM, {"labels": IDS}),
    (models.TransJectForTokenClassification, {"labels": IDS % 3}),
    (models.WellposedForTokenClassification, {"labels": IDS % 3}),
]
# Keywords of torch.utils.checkpoint.checkpoint; transformers chooses use_reentrant=False where none
# are given.
WAYS = [{}, {"use_reentrant": False}, {"use_reentrant": True}]


def build(cls, **changes):
    """Return a model in float64 that is far from the identity, in training, with every kind of
    randomness on."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 4, "num_labels": 3}
    options = {"num_attention_heads": 2, "num_decoder_layers": 4, "attention_dropout": 0.3}
    if cls.config_class is models.TransJectConfig:
        options = {"num_experts": 2, "residual": "sigmoid", "reconstruction_weight": 0.1}
    return cls(cls.config_class(**{**sizes, **options, "dropout": 0.3, **changes})).double().train()


def step(model, arguments):
    """Return loss, gradients and the number of entries that the forward pass stores for the
    backward pass."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    stored = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            stored.append(tensor.numel())
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=IDS, attention_mask=MASK, **arguments).loss
    num_stored = sum(stored)
    loss.backward()
    named = ((name, p.grad) for name, p in model.named_parameters())
    return loss.detach(), {name: grad for name, grad in named if grad is not None}, num_stored


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("cls", "arguments"), HEADS)
def test_recomputed_layers_give_the_same_loss_and_gradients_and_store_less(cls, arguments, way):
    loss, gradients, stored = step(build(cls), arguments)
    model = build(cls)
    model.activation_checkpointing_enable(way or None)
    assert model.is_activation_checkpointing
    recomputed_loss, recomputed, stored_again = step(model, arguments)
    assert_close(recomputed_loss, loss, rtol=1e-14, atol=0.0)
    assert recomputed.keys() == gradients.keys()
    sizes = {name: float(gradient.abs().max()) for name, gradient in gradients.items()}
    part = "experts" if cls.config_class is models.TransJectConfig else "layers"
    assert any(size > 1e-6 for name, size in sizes.items() if part in name)
    for name, gradient in gradients.items():
        assert_close(recomputed[name], gradient, rtol=1e-10, atol=1e-14)
    assert stored_again < 0.25 * stored


def test_some_layers_alone_are_refused():
    model = build(models.WellposedForCausalLM)
    with pytest.raises(ConfigError, match="every_n_layers: received 2; expected 1"):
        model.activation_checkpointing_enable(every_n_layers=2)


def test_evaluation_runs_every_layer_once():
    model = build(models.TransJectForCausalLM).eval()
    calls = []
    model.activation_checkpointing_enable()
    model.model.stack.layers[0].register_forward_hook(lambda *_: calls.append(1))
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(calls) == 1


def test_a_cache_that_recomputation_would_fill_twice_is_refused():
    model = build(models.TransJectForCausalLM)
    model.activation_checkpointing_enable()
    with pytest.raises(
        ConfigError, match="TransJectModel: no cache can be used: recomputed blocks"
    ):
        model(input_ids=IDS, use_cache=True)
    with torch.no_grad():
        assert model(input_ids=IDS, use_cache=True).past_key_values.num_tokens == 5
    stack = TransJectStack(8, 2, is_causal=True)
    stack.gradient_checkpointing = True
    with pytest.raises(ConfigError, match="would fill the cache twice"):
        stack(torch.randn(1, 3, 8), cache=TransJectCache())


class Normed(torch.nn.Module):
    """A feed-forward with statistics, and a running sum that its output reads."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.norm = torch.nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, **options):
        self.calls += 1
        return self.norm(self.inner(x, **options).flatten(0, 1)).view_as(x) / self.calls


def with_statistics():
    model = build(models.WellposedForMaskedLM, dropout=0.0, attention_dropout=0.0)
    for layer in model.model.layers:
        layer.feedforward = Normed(layer.feedforward)
    return model.double()


@pytest.mark.parametrize("way", WAYS)
def test_statistics_of_a_part_advance_once_a_step(way):
    plain = with_statistics()
    model = with_statistics()
    model.activation_checkpointing_enable(way or None)
    for _ in range(2):
        loss, gradients, _ = step(plain, {"labels": IDS})
        again, recomputed, _ = step(model, {"labels": IDS})
        assert_close(again, loss, rtol=1e-14, atol=0.0)
        for name, gradient in gradients.items():
            assert_close(recomputed[name], gradient, rtol=1e-10, atol=1e-14)
        buffers = dict(plain.named_buffers())
        for name, buffer in model.named_buffers():
            assert_close(buffer, buffers[name], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [models.TransJectForMaskedLM, models.WellposedForMaskedLM])
def test_a_weight_that_changes_before_its_layer_is_recomputed_is_named(cls, way):
    model = build(cls)
    model.activation_checkpointing_enable(way or None)
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".layers.0." in name:
                weight.mul_(1.001)
    with pytest.raises(
        ConfigError, match="with gradient checkpointing: backward runs its blocks again"
    ):
        loss.backward()
