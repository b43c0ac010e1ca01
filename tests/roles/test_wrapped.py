"""Every verb answers of a wrapped or checkpointed model as of the same model without."""

import functools

import pytest
import torch
import transformers as hf
from tests.support.tables import pairs
from tests.support.zoo import ZOO, D, F, V
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils import checkpoint

import wellposed as wp
from wellposed.errors import ConfigError, WellposedError

PLAIN = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN |= {"intermediate_size": F, "vocab_size": V}
GROUPED = {"num_key_value_heads": 2, "pad_token_id": 0, **PLAIN}


def opt():
    sizes = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": F}
    return hf.OPTModel(hf.OPTConfig(vocab_size=V, word_embed_proj_dim=D, **sizes))


FAMILIES = {
    **{name: ZOO[name].build for name in ("bert", "bart", "llama", "phi3", "torch encoder")},
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**PLAIN)),
    "opt": opt,
    "mistral": lambda: hf.MistralModel(hf.MistralConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2Model(hf.Qwen2Config(**GROUPED)),
    "gemma": lambda: hf.GemmaModel(hf.GemmaConfig(head_dim=4, **GROUPED)),
    "olmo2": lambda: hf.Olmo2Model(hf.Olmo2Config(**GROUPED)),
    "mixtral": lambda: hf.MixtralModel(hf.MixtralConfig(num_local_experts=3, **GROUPED)),
}
LAYERS = ("layer", "layers")
PARTS = {"self_attn": wrappers.checkpoint_wrapper, "attention": wrappers.checkpoint_wrapper}
PARTS |= {"mlp": wrappers.checkpoint_wrapper}


def layers_of(model):
    """Every list of layers, which is changed in place."""
    parts = model.named_modules()
    return [part for path, part in parts if path.rpartition(".")[2] in LAYERS]


def on_layers(wrap):
    def wrapped(model):
        for layers in layers_of(model):
            for number, layer in enumerate(layers):
                layers[number] = wrap(layer)
        return model

    return wrapped


def on_parts(model):
    for layers in layers_of(model):
        for layer in layers:
            for name in set(layer._modules) & set(PARTS):
                setattr(layer, name, PARTS[name](getattr(layer, name)))
    return model


def selective():
    def policy(_, operation, *args, **named):
        saved = operation in (torch.ops.aten.mm.default, torch.ops.aten.maximum.default)
        choice = checkpoint.CheckpointPolicy
        return choice.MUST_SAVE if saved else choice.PREFER_RECOMPUTE

    return checkpoint.create_selective_checkpoint_contexts(policy)


def by_forward(*, reentrant):
    """A layer whose forward calls `torch.utils.checkpoint` itself."""

    def wrap(layer):
        computed = layer.forward

        def forward(*args, **named):
            call = functools.partial(computed, **named)
            return checkpoint.checkpoint(call, *args, use_reentrant=reentrant)

        layer.forward = forward
        return layer

    return wrap


def compiled_in_place(layer):
    layer.compile(backend="eager")
    return layer


IMPLEMENTATIONS = wrappers.CheckpointImpl
ROUTES = {
    "checkpoint_wrapper": on_layers(wrappers.checkpoint_wrapper),
    "checkpoint_wrapper, reentrant": on_layers(
        functools.partial(wrappers.checkpoint_wrapper, checkpoint_impl=IMPLEMENTATIONS.REENTRANT)
    ),
    "checkpoint_wrapper, selective": on_layers(
        functools.partial(wrappers.checkpoint_wrapper, context_fn=selective)
    ),
    "checkpoint_wrapper, parts": on_parts,
    "forward": on_layers(by_forward(reentrant=False)),
    "forward, reentrant": on_layers(by_forward(reentrant=True)),
    "compiled layers": on_layers(functools.partial(torch.compile, backend="eager")),
    "layer.compile": on_layers(compiled_in_place),
    "compiled": functools.partial(torch.compile, backend="eager"),
}


def of_transformers(*, reentrant):
    def wrapped(model):
        if isinstance(model, hf.PreTrainedModel):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return wrapped


ROUTES["transformers"] = of_transformers(reentrant=False)
ROUTES["transformers, reentrant"] = of_transformers(reentrant=True)
NAMES = ("_checkpoint_wrapped_module.", "_orig_mod.", "._checkpoint_wrapped_module", "._orig_mod")


def without(name):
    for part in NAMES:
        name = name.replace(part, "")
    return name


def batch_of(name):
    generator = torch.Generator().manual_seed(1)
    if name == "torch encoder":
        # A reentrant checkpoint gives no gradient if its input has none.
        return torch.randn(2, 5, D, generator=generator).requires_grad_()
    ids = {"input_ids": torch.randint(3, V, (2, 5), generator=generator)}
    return ids | ({"decoder_input_ids": ids["input_ids"]} if name == "bart" else {})


def pair(name, route):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(FAMILIES[name]().eval())
        if isinstance(models[-1], hf.PreTrainedModel):
            models[-1].config.use_cache = False  # a recomputed layer would append to it again
    return models[0], ROUTES[route](models[1])


def output_of(model, batch):
    torch.manual_seed(3)  # one dropout
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    return output if isinstance(output, torch.Tensor) else output[0]


def roles(model, batch):
    answered = wp.find_roles(model, batch)
    return [
        (weight.role, without(weight.view.label), weight.stack) for weight in answered.weights()
    ]


def measured(model, batch):
    return [without(str(row)) for row in wp.measure(model, batch).rows]


def monitored(model, batch):
    """The numbers of a measured step, in which recomputed passes must not count twice."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = wp.Monitor(model, optimizer)
    output_of(model.train(), batch).square().mean().backward()
    numbers = monitor.step()
    monitor.remove()
    return {without(name): number for name, number in numbers.items()}


def gradients(model):
    named = ((without(name), part.grad) for name, part in model.named_parameters())
    return {name: grad.clone() for name, grad in named if grad is not None}


def penalty(model, batch):
    penalty = wp.OrthogonalityPenalty(model, attention=0.5, feedforward=0.3, batch=batch)
    value = penalty()
    (output_of(model.train(), batch).square().mean() + value).backward()
    penalty.remove()
    return {"value": value.detach(), **gradients(model)}


def constrained(to, **options):
    def verb(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        handle = wp.constrain_(model, optimizer, to=to, batch=batch, **options)
        for _ in range(2):
            optimizer.zero_grad()
            output_of(model, batch).square().mean().backward()
            optimizer.step()
        handle.remove()
        return {without(name): part.detach() for name, part in model.named_parameters()}

    return verb


VERBS = {
    "find_roles": roles,
    "penalty": penalty,
    "orthogonal": constrained("orthogonal", where="output"),
    "spectral": constrained("spectral"),
    "logits": constrained("logits", bound=0.05),
    "measure": measured,
    "Monitor": monitored,
}
COMPILED = {"compiled layers", "layer.compile", "compiled"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "route", "verb"), pairs(FAMILIES, ROUTES, VERBS))
def test_every_verb_answers_as_without_the_wrapper(name, route, verb):
    call = VERBS[verb]
    batch = batch_of(name)
    plain, wrapped = pair(name, route)
    expected = answer(call, plain, batch)
    if verb == "logits" and route in COMPILED:
        with pytest.raises(ConfigError, match="a compiled model does not run"):
            call(wrapped, batch)
        return

    received = answer(call, wrapped, batch)
    if isinstance(expected, dict):
        torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    else:
        assert received == expected


def answer(call, model, batch):
    try:
        return call(model, batch)
    except WellposedError as error:
        return type(error).__name__
