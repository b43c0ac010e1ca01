"""Launches that a verb adds for a layer are few at any number of experts and in encoder-decoders, and the
host reads nothing."""

from collections import Counter

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

import wellposed as wp

READS = ("aten._local_scalar", "aten.equal", "aten.is_nonzero", "aten.nonzero")
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 50,
}
ROLES = ("query", "key", "value", "output", "feedforward_in", "feedforward_out")


def llama(layers):
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=layers, **SIZES))


def mixtral(experts):
    def build(layers):
        config = hf.MixtralConfig(num_hidden_layers=layers, num_local_experts=experts, **SIZES)
        return hf.MixtralForCausalLM(config)

    return build


def t5(layers):
    config = hf.T5Config(
        d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=layers, vocab_size=50,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


FAMILIES = {"llama": llama, "8 experts": mixtral(8), "32 experts": mixtral(32), "t5": t5}


def penalty(model, _):
    return wp.OrthogonalityPenalty(model, attention=1e-6, feedforward=1e-6), None


def spectral(model, optimizer):
    return None, wp.constrain_(model, optimizer, where=ROLES, to="spectral", batched=True)


def pushed(model, optimizer):
    options = {"where": ROLES, "to": "spectral", "batched": True, "bound": 0.5}
    return None, wp.constrain_(model, optimizer, **options)


def monitor(model, optimizer):
    return None, wp.Monitor(model, optimizer, every=1)


# Verb, rate of the steps, and the most launches of a layer.
VERBS = {
    "penalty": (penalty, 1e-3, 14),
    "spectral": (spectral, 1e-3, 4),
    "spectral, large steps": (pushed, 3e-2, 4),
    "monitor": (monitor, 1e-3, 4),
}


class Count(TorchDispatchMode):
    """Operations that a GPU would launch, and those that it would wait for."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = func.is_view or func in (
            torch.ops.aten.detach.default,
            torch.ops.aten._unsafe_view.default,
        )
        self.calls["launch"] += not is_view
        self.calls["read"] += str(func).startswith(READS)
        return func(*args, **(kwargs or {}))


def launches_and_reads(build, layers, attach, rate):
    """Return what the fifth step launches and reads, less those of a plain step."""
    torch.manual_seed(0)
    model = build(layers)
    ids = torch.randint(0, 50, (2, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=True)
    extra = None
    watcher = None

    def step():
        loss = model(input_ids=ids, labels=ids).loss
        (loss if extra is None else loss + extra()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(watcher, wp.Monitor):
            watcher.step()

    def counted():
        for _ in range(4):
            step()
        with Count() as count:
            step()
        return count.calls

    plain = counted()
    extra, watcher = attach(model, optimizer)
    full = counted()
    return [full[key] - plain[key] for key in ("launch", "read")]


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_adds_few_launches_and_no_read(family, verb):
    attach, rate, most = VERBS[verb]
    build = FAMILIES[family]
    (few, few_reads), (many, reads) = (
        launches_and_reads(build, layers, attach, rate) for layers in (2, 6)
    )
    assert (few_reads, reads) == (0, 0)
    assert (many - few) / 4 <= most
