"""Small models in the styles of public training scripts, with the names that these give to their
weights: none has a configuration that a batch can be made from."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16
HIDDEN = 24
VOCABULARY = 30
HEADS = 4
GROUPS = 2
TOKENS = torch.arange(12).reshape(2, 6)


def in_heads(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q, k, v):
    enough = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(enough, 1)
    v = v.repeat_interleave(enough, 1)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class MetaAttention(nn.Module):
    """Meta's llama: ``wq``, ``wk``, ``wv``, ``wo``, with grouped keys."""

    def __init__(self):
        super().__init__()
        self.n_kv_heads = self.n_local_kv_heads = GROUPS
        self.n_local_heads = HEADS
        self.head_dim = WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, GROUPS * self.head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, GROUPS * self.head_dim, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q = in_heads(self.wq(x), HEADS)
        return self.wo(attend(q, in_heads(self.wk(x), GROUPS), in_heads(self.wv(x), GROUPS)))


class MetaFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LitAttention(nn.Module):
    """litgpt: rows of queries, keys and values, one after the other, in ``qkv``; ``proj``."""

    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        self.config = SimpleNamespace(n_head=HEADS, n_query_groups=GROUPS, head_size=size)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * size)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        size = WIDTH // HEADS
        q, k, v = self.qkv(x).split((HEADS * size, GROUPS * size, GROUPS * size), dim=-1)
        return self.proj(attend(in_heads(q, HEADS), in_heads(k, GROUPS), in_heads(v, GROUPS)))


class LitGated(nn.Module):
    """litgpt's ``LLaMAMLP``."""

    def __init__(self):
        super().__init__()
        self.fc_1 = nn.Linear(WIDTH, HIDDEN)
        self.fc_2 = nn.Linear(WIDTH, HIDDEN)
        self.proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class LitPlain(nn.Module):
    """litgpt's ``GptNeoxMLP``."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, HIDDEN)
        self.proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class TimmAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.head_dim = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q_norm = nn.Identity()
        self.k_norm = nn.Identity()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(attend(self.q_norm(q), self.k_norm(k), v))


class TimmMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class VitPytorchAttention(nn.Module):
    """vit-pytorch: ``to_qkv`` and a ``Sequential`` as ``to_out``."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))

    def forward(self, x):
        q, k, v = (in_heads(part, HEADS) for part in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """vit-pytorch's, named as in Karpathy's lecture: one ``Sequential`` called ``net``."""

    def __init__(self):
        super().__init__()
        inner = (nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.0), nn.Linear(HIDDEN, WIDTH))
        self.net = nn.Sequential(nn.LayerNorm(WIDTH), *inner, nn.Dropout(0.0))

    def forward(self, x):
        return self.net(x)


class XAttention(nn.Module):
    """x-transformers: ``to_q``, ``to_k``, ``to_v``, ``to_out``."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x):
        return self.to_out(
            attend(*(in_heads(f(x), HEADS) for f in (self.to_q, self.to_k, self.to_v)))
        )


class XFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        project_in = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU())
        self.ff = nn.Sequential(project_in, nn.Dropout(0.0), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x):
        return self.ff(x)


class HeadAttention(nn.Module):
    """An attention that calls the number of its heads ``head``."""

    def __init__(self):
        super().__init__()
        self.head = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x):
        parts = (self.q_proj, self.k_proj, self.v_proj)
        return self.out_proj(attend(*(in_heads(part(x), self.head) for part in parts)))


class UncountedAttention(HeadAttention):
    """An attention that has no number of its heads: they are a constant of the script."""

    def __init__(self):
        super().__init__()
        del self.head

    def forward(self, x):
        parts = (self.q_proj, self.k_proj, self.v_proj)
        return self.out_proj(attend(*(in_heads(part(x), HEADS) for part in parts)))


class StrangeAttention(nn.Module):
    """An attention with names that nobody else uses."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta, self.gamma, self.omega = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        parts = (self.alpha, self.beta, self.gamma)
        return self.omega(attend(*(in_heads(part(x), HEADS) for part in parts)))


class StrangeFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(WIDTH, HIDDEN)
        self.two = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.two(F.relu(self.one(x)))


class Block(nn.Module):
    def __init__(self, attention, network):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.attn = attention()
        self.mlp = network()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Script(nn.Module):
    """Two blocks between a table and a head."""

    def __init__(self, attention, network):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(attention, network) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


@dataclass(frozen=True)
class PublicStyle:
    """One style, and the parameters of a block by role, with their rows of a fused weight."""

    attention: Callable[[], nn.Module]
    network: Callable[[], nn.Module]
    labels: dict[str, str]
    key_value_heads: int = HEADS

    def build(self):
        torch.manual_seed(0)
        return Script(self.attention, self.network)


def _four(query, key, value, output):
    names = {"query": query, "key": key, "value": value, "output": output}
    return {role: f"attn.{name}" for role, name in names.items()}


def _fused(name, output, bounds=(16, 32, 48)):
    starts = (0, *bounds)
    rows = [f"{name}.weight[{a}:{b}]" for a, b in zip(starts, bounds, strict=False)]
    return _four(*rows, output)


def _two(up, down):
    return {"feedforward_in": f"mlp.{up}", "feedforward_out": f"mlp.{down}"}


def _gated(up, down, gate):
    return {**_two(up, down), "feedforward_gate": f"mlp.{gate}"}


_PLAIN = _four("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight")
STYLES = {
    "meta llama": PublicStyle(
        MetaAttention, MetaFeedForward,
        {**_four("wq.weight", "wk.weight", "wv.weight", "wo.weight"), **_gated("w3.weight", "w2.weight", "w1.weight")},
        GROUPS,
    ),
    "litgpt, gated": PublicStyle(
        LitAttention, LitGated,
        {**_fused("qkv", "proj.weight", (16, 24, 32)), **_gated("fc_2.weight", "proj.weight", "fc_1.weight")}, GROUPS,
    ),
    "litgpt": PublicStyle(
        LitAttention, LitPlain,
        {**_fused("qkv", "proj.weight", (16, 24, 32)), **_two("fc.weight", "proj.weight")}, GROUPS,
    ),
    "timm": PublicStyle(
        TimmAttention, TimmMlp, {**_fused("qkv", "proj.weight"), **_two("fc1.weight", "fc2.weight")}
    ),
    "vit-pytorch": PublicStyle(
        VitPytorchAttention, FeedForward,
        {**_fused("to_qkv", "to_out.0.weight"), **_two("net.1.weight", "net.4.weight")},
    ),
    "x-transformers": PublicStyle(
        XAttention, XFeedForward,
        {**_four("to_q.weight", "to_k.weight", "to_v.weight", "to_out.weight"),
         **_two("ff.0.0.weight", "ff.2.weight")},
    ),
    "head": PublicStyle(HeadAttention, TimmMlp, {**_PLAIN, **_two("fc1.weight", "fc2.weight")}),
}  # fmt: skip
"""Styles whose roles are found by names and by a pass."""
UNCOUNTED = PublicStyle(UncountedAttention, TimmMlp, STYLES["head"].labels)
"""Names tell the roles, but not the number of heads."""
STRANGE = PublicStyle(
    StrangeAttention, StrangeFeedForward,
    {**_four("alpha.weight", "beta.weight", "gamma.weight", "omega.weight"), **_two("one.weight", "two.weight")},
)  # fmt: skip
"""Only a pass tells the roles."""
