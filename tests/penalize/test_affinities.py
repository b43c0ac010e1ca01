"""The affinity penalty equals ``|A^T A - I|_F^2`` of the attentions that a family's own eager code
returns, or that are formed by hand, under every kernel, mask and way of running."""

import copy
import shutil

import pytest
import torch
import transformers as hf
from tests.support.penalized import ALL, Hidden, Mixer, after_forward, batch, bert, step
from tests.support.zoo import ZOO, D, F, V
from torch import nn

from wellposed.errors import ConfigError
from wellposed.penalize import OrthogonalityPenalty

LENGTHS = (7, 4, 1)
LLAMA = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "bert": ZOO["bert"].build,
    "gpt2": ZOO["gpt2"].build,
    "llama, grouped queries": lambda: hf.LlamaModel(hf.LlamaConfig(**LLAMA)),
    "qwen2, grouped queries": lambda: hf.Qwen2Model(hf.Qwen2Config(**LLAMA)),
    "qwen3, normalised queries": lambda: hf.Qwen3Model(hf.Qwen3Config(**LLAMA, head_dim=4)),
    "t5": ZOO["t5"].build,
    "bart": ZOO["bart"].build,
    "vit": ZOO["vit"].build,
}


def inputs(model):
    """Return a batch, and how many tokens of each sequence are real (None: all)."""
    if isinstance(model, hf.ViTModel):
        return {"pixel_values": torch.randn(3, 3, 8, 8, dtype=torch.float64)}, None
    ids = torch.randint(3, V, (len(LENGTHS), max(LENGTHS)))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        batch |= {"decoder_input_ids": ids.flip(1), "decoder_attention_mask": mask}
    return batch, LENGTHS


def self_attentions(output):
    """(batch, heads, tokens, tokens) of every layer; what a decoder reads of its encoder is no
    affinity."""
    for name in ("attentions", "encoder_attentions", "decoder_attentions"):
        yield from getattr(output, name, None) or ()


def slow(output, lengths):
    total = 0.0
    for layer in self_attentions(output):
        for sequence, heads in enumerate(layer.double()):
            real = heads.shape[-1] if lengths is None else lengths[sequence]
            for affinity in heads[:, :real, :real]:
                total += float(((affinity.T @ affinity - torch.eye(real)) ** 2).sum()) / len(layer)
    return total


def alone_and_together(model, batch, monkeypatch):
    """Penalise layers one after the other, then those that are alike together."""
    runs = []
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    for entries in (1, 1 << 19):
        monkeypatch.setattr("wellposed.penalize._affinities._ENTRIES_CPU", entries)
        model.zero_grad()
        value = after_forward(model, penalty, batch)
        value.backward()
        slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        runs.append((penalty.terms(), slopes))
        batches = [len(names) for names, _ in penalty._parts]
        assert sum(batches) == len(penalty._capture.attention)
        assert max(batches) == 1 or entries > 1
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-12)
    return penalty, value, max(batches)


class Blocks(nn.Module):
    """Layers of attention, with masks if they take them."""

    def __init__(self, *layers, **masks):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.masks = masks

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, x, x, **self.masks)[0] if self.masks else layer(x)
        return x


def multihead(*heads, **masks):
    layers = (nn.MultiheadAttention(8, count, batch_first=True) for count in heads)
    return Blocks(*layers, **masks)


# Layers -> those that are alike.
LAYERS = {
    "two numbers of heads": (lambda: multihead(2, 2, 4, attn_mask=torch.eye(5) < 0), 2),
    "a mask of each head": (lambda: multihead(2, 2, attn_mask=torch.rand(4, 5, 5) < 0.3), 2),
    "padding of each layer": (lambda: multihead(2, 2, key_padding_mask=torch.eye(2, 5) > 0), 1),
    "two kinds": (lambda: Blocks(Mixer(), Mixer(fused=False), Mixer(), Mixer(fused=False)), 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_together_have_the_gradients_of_each(name, monkeypatch):
    build, alike = LAYERS[name]
    batch = {"x": torch.randn(2, 5, 8, dtype=torch.float64)}
    assert alone_and_together(build().double(), batch, monkeypatch)[2] == alike


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_attentions_of_the_familys_own_code(family, implementation, monkeypatch):
    model = FAMILIES[family]().double().eval()
    with torch.no_grad():  # far from uniform attention
        for name, parameter in model.named_parameters():
            reads = any(word in name for word in ("q", "k", "attn", "Attention"))
            if parameter.ndim == 2 and reads:
                parameter.normal_()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    model.set_attn_implementation(implementation)
    batch, lengths = inputs(model)
    penalty, value, _ = alone_and_together(model, batch, monkeypatch)
    # Some families ask for a softmax in float32, for any dtype of the model.
    softmax = nn.functional.softmax
    monkeypatch.setattr(
        nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x.double(), dim)
    )
    with torch.no_grad():
        outputs = reference(**batch, output_attentions=True)
    expected = slow(outputs, lengths)
    layers = len(list(self_attentions(outputs)))
    assert layers == len(penalty.terms()) == (4 if model.config.is_encoder_decoder else 2)
    assert expected > layers
    # T5 turns its logits to float32, and eager code its softmax.
    exact = implementation == "sdpa" and family != "t5"
    assert value.item() == pytest.approx(expected, rel=1e-10 if exact else 1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_handwritten_softmax_is_seen(fused):
    module = Mixer(fused=fused, dropout=0.5).double()
    x = torch.randn(2, 5, 8).double()
    value = after_forward(module, OrthogonalityPenalty(module, affinity=1.0), {"x": x})
    q, k, _ = module.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    affinity = (q @ k.mT / 2).softmax(-1).detach()  # before dropout
    expected = (affinity.mT @ affinity - torch.eye(5)).square().sum().item() / len(x)
    assert value.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_watching_changes_no_output_and_no_gradient(implementation):
    model = bert()
    inputs = batch()
    model.set_attn_implementation(implementation)
    plain = model(**inputs)[0]
    plain.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    watched = model(**inputs)[0]
    watched.square().mean().backward()
    assert torch.equal(plain, watched)
    assert all(
        torch.equal(p.grad, gradients[name])
        for name, p in model.named_parameters()
        if p.grad is not None
    )
    penalty.remove()


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention_with_masks(needs_weights, causal):
    module = nn.MultiheadAttention(8, 2, batch_first=True).double()
    penalty = OrthogonalityPenalty(module, affinity=1.0)
    x = torch.randn(3, 6, 8).double()
    lengths = (6, 4, 1)
    padded = torch.arange(6) >= torch.tensor(lengths)[:, None]
    later = torch.ones(6, 6).triu(1).bool() if causal else None
    options = {"attn_mask": later, "need_weights": needs_weights}
    output, weights = module(x, x, x, key_padding_mask=padded, **options)
    assert (weights is not None) == needs_weights
    expected = 0.0
    query, key, _ = (x @ module.in_proj_weight.T + module.in_proj_bias).chunk(3, -1)
    for b, length in enumerate(lengths):
        for head in (slice(0, 4), slice(4, 8)):
            scores = query[b, :length, head] @ key[b, :length, head].T / 2
            if later is not None:
                scores = scores.masked_fill(later[:length, :length], -torch.inf)
            affinity = scores.softmax(-1)
            expected += (affinity.T @ affinity - torch.eye(length)).square().sum().item() / 3
    value = penalty()
    assert value.item() == pytest.approx(expected, rel=1e-12)
    value.backward()
    assert module.in_proj_weight.grad[:16].abs().min() > 0
    assert module.in_proj_weight.grad[16:].abs().max() == 0
    assert output.requires_grad


def test_gradient_checkpointing_changes_nothing():
    model = bert().double()
    inputs = batch()
    penalty = OrthogonalityPenalty(model, **ALL)
    plain = step(model, penalty, inputs)
    model.activation_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(step(model, penalty, inputs), plain, rtol=1e-12, atol=1e-14)
    penalty.remove()


def test_checkpointing_around_multihead_attention():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
            self.layer = nn.TransformerEncoderLayer(8, 2, 12, **options)
            self.checkpoint = False

        def forward(self, x):
            if self.checkpoint:
                return (torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False),)
            return (self.layer(x),)

    model = Checkpointed()
    inputs = {"x": torch.randn(2, 5, 8).double()}
    penalty = OrthogonalityPenalty(model, **ALL)
    plain = step(model, penalty, inputs)
    model.checkpoint = True
    torch.testing.assert_close(step(model, penalty, inputs), plain, rtol=1e-12, atol=1e-14)


def test_reentrant_checkpointing_is_refused():
    model = bert()
    inputs = batch()
    model.activation_checkpointing_enable({"use_reentrant": True})
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    with pytest.raises(ConfigError, match=r"(?s)encoder\.layer\.0\.attention.*use_reentrant=False"):
        after_forward(model, penalty, inputs)


@pytest.mark.parametrize("estimator", ["exact", "probes"])
def test_bf16_autocast_is_close_to_float32(estimator):
    model = bert(initializer_range=0.2)
    inputs = batch()
    draw = torch.Generator()
    penalty = OrthogonalityPenalty(model, **ALL, estimator=estimator, generator=draw)
    draw.manual_seed(5)
    full = step(model, penalty, inputs)
    draw.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**inputs)
        value = penalty()
    model.zero_grad()
    (output[0].float().square().mean() + value).backward()
    assert value.dtype == torch.float32
    rough = torch.cat([p.grad.flatten() for _, p in model.named_parameters() if p.grad is not None])
    exact = torch.cat([gradient.flatten() for gradient in full[1].values()])
    assert torch.nn.functional.cosine_similarity(rough, exact, dim=0) > 0.99


@pytest.mark.parametrize("attention", ["l2", "l2_tied", "l2_contractive", "cosine"])
def test_our_other_attentions_are_watched(attention):
    """Affinities of L2 attention are soft-maxed distances: |A^T A - I|^2 from the distances
    themselves."""
    from wellposed.models import build_model

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = build_model("wellposed", "sequence_classification", attention=attention, **sizes)
    model = model.double().eval()
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    part = model.get_submodule(penalty.roles.attention[0].path)
    projected = []
    for name in ("q_proj", "k_proj"):
        layer = getattr(part, name) or part.q_proj
        layer.register_forward_hook(lambda m, args, out: projected.append(out.detach()))
    value = after_forward(model, penalty, {"input_ids": torch.tensor([[3, 4, 5, 6]])})
    assert value.item() > 0
    if attention == "cosine":
        return
    query, key = (item.unflatten(-1, (2, -1)).transpose(1, 2) for item in projected[:2])
    affinity = (-torch.cdist(query, key).square() / 4**0.5).softmax(-1)
    expected = (affinity.mT @ affinity - torch.eye(4)).square().sum().item()
    assert value.item() == pytest.approx(expected, rel=1e-9)


def test_attention_that_cannot_be_seen_is_named():
    model = nn.Sequential(Hidden())
    penalty = OrthogonalityPenalty(model, affinity=1.0)
    with pytest.raises(ConfigError, match=r"(?s)cannot be seen.*\n  0\n.*affinity=0"):
        after_forward(model, penalty, {"input": torch.randn(1, 3, 8)})


def test_flash_only_kernels_are_refused_at_attach_time():
    model = bert()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"flash_attention_2") as caught:
        OrthogonalityPenalty(model, affinity=1.0)
    assert "set_attn_implementation('sdpa')" in str(caught.value)


# torch.compile raises both warnings inside.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")),
    reason="inductor needs a C++ compiler",
)
def test_inductor_equals_eager():
    model = nn.Sequential(Mixer())
    x = torch.randn(2, 6, 8)
    penalty = OrthogonalityPenalty(model, affinity=0.3, attention=0.7)
    compiled = torch.compile(model, backend="inductor")
    runs = []
    for run in (model, compiled, compiled):
        model.zero_grad()
        loss = run(x).square().mean() + penalty()
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        runs.append((loss.detach(), gradients))
    torch.compiler.reset()
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=1e-5, atol=1e-7)
