"""Weights of one shape, and affinities of layers that are alike, are worked on together: their numbers
are those of one after the other, launches hardly grow with depth, and no number is read."""

from collections import Counter

import pytest
import torch
import transformers as hf
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from wellposed.functional import gram_penalty
from wellposed.penalize import OrthogonalityPenalty


def llama(layers, **more):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 20, "num_attention_heads": 4}
    config = hf.LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, **sizes, **more)
    return hf.LlamaModel(config)


def gpt2(layers):
    sizes = {"n_embd": 16, "n_head": 4, "vocab_size": 20, "n_positions": 16}
    return hf.GPT2Model(hf.GPT2Config(n_layer=layers, **sizes))


READS = ("aten._local_scalar", "aten.equal", "aten.is_nonzero", "aten.nonzero")


class Count(TorchDispatchMode):
    """Operations that a GPU would launch, and those that it would wait for."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls["launch"] += not (func.is_view or func is torch.ops.aten.detach.default)
        self.calls["read"] += str(func).startswith(READS)
        return func(*args, **(kwargs or {}))


def step(model, penalty=None, *, alone=False):
    """Forward and backward pass, with the gradient of a penalty."""
    ids = torch.ones(2, 5, dtype=torch.long)
    loss = model(input_ids=ids)[0].square().mean()
    if penalty is not None and not alone:
        loss = loss + penalty()
    loss.backward()
    if alone:
        penalty.accumulate_()


def launches_and_reads(*arguments, **options):
    step(*arguments, **options)
    with Count() as count:
        step(*arguments, **options)
    return count.calls["launch"], count.calls["read"]


WEIGHTS = {"attention": 1.0, "feedforward": 1.0}
# Penalised parts -> (model, strengths, launches at any depth, launches a layer).
LAUNCHES = {
    "weights": (llama, WEIGHTS, 50, 8),
    "fused, transposed": (gpt2, WEIGHTS, 50, 6),
    "affinity": (llama, {"affinity": 1.0}, 60, 2),
    "affinity by probes": (llama, {"affinity": 1.0, "estimator": "probes"}, 60, 2),
    "eager": (lambda n: llama(n, attn_implementation="eager"), {"affinity": 1.0}, 50, 1),
    "by itself": (llama, WEIGHTS, 60, 8),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_grow_little_with_depth_and_nothing_is_read(name):
    build, strengths, constant, a_layer = LAUNCHES[name]
    more = []
    for layers in (2, 6):
        model = build(layers)
        before, _ = launches_and_reads(model)
        penalty = OrthogonalityPenalty(model, **strengths)
        after, reads = launches_and_reads(model, penalty, alone=name == "by itself")
        assert reads == 0
        more.append(after - before)
    assert more[1] - more[0] <= 4 * a_layer
    assert more[0] <= constant + 2 * a_layer


@pytest.mark.parametrize("build", [llama, gpt2, lambda n: llama(n, attn_implementation="eager")])
def test_a_step_runs_without_numbers(build):
    """Fake tensors have no numbers, so a read raises, as when the parts are asked for."""
    model = build(2)
    names = ("attention", "feedforward", "query", "value", "embedding")
    weights = OrthogonalityPenalty(model, **dict.fromkeys(names, 1.0))
    affinities = OrthogonalityPenalty(model, affinity=1.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        step(model, affinities)
        step(model, weights)
        step(model, weights, alone=True)
        with pytest.raises(DataDependentOutputException):
            weights.terms()
        # A GPU multiplies bfloat16 tensors in bfloat16 and sums in float32.
        low = torch.empty(2, 8, 4, device="cuda", dtype=torch.bfloat16)
        assert gram_penalty(list(low)).dtype == torch.float32
