"""`constrain_(to="logits")` tries its rows in few passes of the model at any depth, and never on wrong inputs."""

import pytest
import torch
import transformers as hf
from torch import nn

from wellposed.constrain import constrain_
from wellposed.errors import ConfigError

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}


def llama(layers):
    return hf.LlamaModel(hf.LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, **SIZES))


def bert(layers):
    return hf.BertModel(hf.BertConfig(num_hidden_layers=layers, **SIZES))


def gpt2(layers):
    config = hf.GPT2Config(n_layer=layers, n_embd=16, n_head=2, vocab_size=20, n_positions=16)
    return hf.GPT2Model(config)


class Stacked(nn.Module):
    """Layers of torch, on ids."""

    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, input_ids):
        return self.layers(self.embed(input_ids))


def attached(model):
    """Return the passes of the model in an attach, and the handle."""
    torch.manual_seed(0)
    passes = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(None))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = {"input_ids": torch.arange(10).view(2, 5)}
    before = [weight.clone() for weight in model.parameters()]
    handle = constrain_(model, optimizer, to="logits", bound=5.0, batch=batch)
    hook.remove()
    assert all(map(torch.equal, before, model.parameters()))
    return len(passes), handle


@pytest.mark.parametrize("build", [llama, bert, gpt2, Stacked])
def test_few_passes_at_any_depth(build):
    counts = [attached(build(layers))[0] for layers in (2, 6)]
    assert counts[0] == counts[1] <= 6


class Needy(nn.Module):
    """An attention that takes from its owner what no argument shows: once for each pass."""

    def __init__(self, *, capped):
        super().__init__()
        self.num_heads = 2
        self.shift = None
        self.capped = capped
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(16, 16, bias=False))

    def forward(self, x):
        x = x + self.shift.pop()
        parts = (layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        logits = q @ k.mT / 8**0.5
        logits = 0.5 * torch.tanh(logits / 0.5) if self.capped else logits
        return self.o_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Counted(Needy):
    """Its input is another one in each call."""

    def forward(self, x):
        self.shift = [torch.tensor(float(self.calls))]
        self.calls += 1
        return super().forward(x)

    calls = 0


class Owner(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.attention = attention

    def forward(self, input_ids):
        self.attention.shift = [torch.ones(())]
        self.attention.calls = 0
        return self.attention(self.embed(input_ids))


@pytest.mark.parametrize("kind", [Needy, Counted])
def test_an_attention_that_does_not_repeat_itself_is_tried_by_passes_of_the_model(kind):
    """Run alone it raises, or has other logits: neither decides."""
    _, handle = attached(Owner(kind(capped=False)))
    assert handle.paths == ("attention",)
    with pytest.raises(ConfigError, match="does not scale its logits"):
        attached(Owner(kind(capped=True)))


def test_a_hook_that_changes_the_input_is_run_once_in_a_call_alone():
    """Its input is that of before all hooks, so that the pass is repeated, not the model."""
    model = llama(2)
    plain, _ = attached(llama(2))
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: (
                args,
                {**kwargs, "hidden_states": 3 * kwargs["hidden_states"]},
            ),
            with_kwargs=True,
        )
    passes, _ = attached(model)
    assert passes == plain
