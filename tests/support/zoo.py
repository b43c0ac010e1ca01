"""Tiny random models of every family, with what a reader of their code would say their weights
are."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers as hf
from torch import Tensor, nn

from wellposed.models import build_model

D, F, V, HEADS = 16, 24, 30, 4  # width, feed-forward width, vocabulary, heads; head_dim 4
PLAIN = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": HEADS}
PLAIN |= {"intermediate_size": F, "vocab_size": V}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {**SPECIAL, "vocab_size": V, "d_model": D, "max_position_embeddings": 32}
SEQ2SEQ |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
for name, size in (("layers", 2), ("attention_heads", HEADS), ("ffn_dim", F)):
    SEQ2SEQ |= {f"encoder_{name}": size, f"decoder_{name}": size}


@dataclass(frozen=True)
class StoredWeight:
    """A weight of layer 1: parameter, rows (None: all), transposed in storage, shape out x in."""

    parameter: str
    shape: tuple[int, int] = (D, D)
    rows: tuple[int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Entry:
    """One family: how to build it, what its layer 1 holds, and how often each part occurs."""

    build: Callable[[], nn.Module]
    weights: dict[str, StoredWeight]
    stack: str
    counts: tuple[int, int, int]  # attention, feed-forward, embeddings
    run: Callable[[nn.Module], Tensor]
    key_value_heads: int = HEADS
    cross: dict[str, StoredWeight] = field(default_factory=dict)


class TimmAttention(nn.Module):
    """A block with timm's names: fused ``qkv``, ``proj``, and SDPA."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(D, 3 * D)
        self.proj = nn.Linear(D, D)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, D))


class TimmMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(D, F)
        self.fc2 = nn.Linear(F, D)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class TimmBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(D)
        self.attn = TimmAttention()
        self.norm2 = nn.LayerNorm(D)
        self.mlp = TimmMlp()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimmVit(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, 5, D))
        self.blocks = nn.Sequential(TimmBlock(), TimmBlock())
        self.head = nn.Linear(D, 3)

    def forward(self, x):
        return self.head(self.blocks(x + self.pos_embed).mean(1))


def noise(model, *shape):
    return torch.randn(*shape, dtype=next(model.parameters()).dtype)


def tokens(model):
    ids = torch.randint(3, V, (2, 7))
    if getattr(model.config, "is_encoder_decoder", False):
        return model(input_ids=ids, decoder_input_ids=ids[:, :5]).last_hidden_state
    return model(input_ids=ids)[0]


def images(model):
    return model(noise(model, 2, 3, 8, 8)).last_hidden_state


def vectors(model):
    return model(noise(model, 2, 5, D))


def pairs(model):
    return model(noise(model, 2, 5, D), noise(model, 2, 4, D))


def linear(pattern, attention, up, down, gate=None):
    names = dict(zip(("query", "key", "value", "output"), attention, strict=True))
    weights = {role: StoredWeight(pattern.format(f"{name}.weight")) for role, name in names.items()}
    weights["feedforward_in"] = StoredWeight(pattern.format(f"{up}.weight"), (F, D))
    weights["feedforward_out"] = StoredWeight(pattern.format(f"{down}.weight"), (D, F))
    if gate:
        weights["feedforward_gate"] = StoredWeight(pattern.format(f"{gate}.weight"), (F, D))
    return weights


def grouped(weights):
    half = {role: StoredWeight(weights[role].parameter, (D // 2, D)) for role in ("key", "value")}
    return weights | half


def fused(parameter, output, transposed=False):
    weights = {"output": StoredWeight(output, transposed=transposed)}
    for i, role in enumerate(("query", "key", "value")):
        weights[role] = StoredWeight(parameter, (D, D), (i * D, (i + 1) * D), transposed)
    return weights


BERT_PARTS = ("self.query", "self.key", "self.value", "output.dense")
BERT_NAMES = tuple(f"attention.{name}" for name in BERT_PARTS)
BERT = linear("encoder.layer.1.{}", BERT_NAMES, "intermediate.dense", "output.dense")
LLAMA_NAMES = tuple(f"self_attn.{name}_proj" for name in "qkvo")
LLAMA = grouped(linear("layers.1.{}", LLAMA_NAMES, "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"))
T5_NAMES = tuple(f"layer.0.SelfAttention.{name}" for name in "qkvo")
BART_NAMES = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out"))
DISTILBERT_NAMES = tuple(f"attention.{name}_lin" for name in ("q", "k", "v", "out"))
OURS_NAMES = tuple(f"attention.{name}_proj" for name in "qkvo")
TORCH_FF = {
    "feedforward_in": StoredWeight("layers.1.linear1.weight", (F, D)),
    "feedforward_out": StoredWeight("layers.1.linear2.weight", (D, F)),
}


def t5(**options):
    sizes = {"d_model": D, "d_kv": 4, "d_ff": F, "num_layers": 2, "num_heads": HEADS}
    return hf.T5Model(hf.T5Config(vocab_size=V, **sizes, **SPECIAL, **options))


def ours(kind):
    model = build_model("wellposed", kind, max_position_embeddings=32, **PLAIN)
    return model.model


def gpt2():
    sizes = {"vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": HEADS, "n_inner": F}
    return hf.GPT2Model(hf.GPT2Config(n_positions=32, **sizes, **SPECIAL))


def bart_cross(pattern):
    names = zip(("query", "key", "value", "output"), ("q", "k", "v", "out"), strict=True)
    return {
        role: StoredWeight(pattern.format(f"encoder_attn.{name}_proj.weight"))
        for role, name in names
    }


def encoder_layer():
    return nn.TransformerEncoderLayer(D, HEADS, F, batch_first=True)


ZOO = {
    "bert": Entry(lambda: hf.BertModel(hf.BertConfig(**PLAIN)), BERT, "encoder", (2, 2, 2), tokens),
    "distilbert": Entry(
        lambda: hf.DistilBertModel(
            hf.DistilBertConfig(vocab_size=V, dim=D, n_layers=2, n_heads=HEADS, hidden_dim=F, pad_token_id=0)
        ),
        linear("transformer.layer.1.{}", DISTILBERT_NAMES, "ffn.lin1", "ffn.lin2"),
        "encoder", (2, 2, 2), tokens,
    ),
    "gpt2": Entry(
        gpt2,
        fused("h.1.attn.c_attn.weight", "h.1.attn.c_proj.weight", transposed=True) | {
            "feedforward_in": StoredWeight("h.1.mlp.c_fc.weight", (F, D), transposed=True),
            "feedforward_out": StoredWeight("h.1.mlp.c_proj.weight", (D, F), transposed=True),
        },
        "decoder", (2, 2, 2), tokens,
    ),
    "llama": Entry(
        lambda: hf.LlamaModel(hf.LlamaConfig(num_key_value_heads=2, **PLAIN)), LLAMA, "decoder", (2, 2, 1), tokens, 2
    ),
    "phi3": Entry(
        lambda: hf.Phi3Model(hf.Phi3Config(num_key_value_heads=2, **PLAIN, **SPECIAL)),
        {
            "query": StoredWeight("layers.1.self_attn.qkv_proj.weight", (16, D), (0, 16)),
            "key": StoredWeight("layers.1.self_attn.qkv_proj.weight", (8, D), (16, 24)),
            "value": StoredWeight("layers.1.self_attn.qkv_proj.weight", (8, D), (24, 32)),
            "output": StoredWeight("layers.1.self_attn.o_proj.weight"),
            "feedforward_gate": StoredWeight("layers.1.mlp.gate_up_proj.weight", (F, D), (0, F)),
            "feedforward_in": StoredWeight("layers.1.mlp.gate_up_proj.weight", (F, D), (F, 2 * F)),
            "feedforward_out": StoredWeight("layers.1.mlp.down_proj.weight", (D, F)),
        },
        "decoder", (2, 2, 1), tokens, 2,
    ),
    "t5": Entry(
        t5, linear("encoder.block.1.{}", T5_NAMES, "layer.1.DenseReluDense.wi", "layer.1.DenseReluDense.wo"),
        "encoder", (6, 4, 1), tokens,
        cross={
            role: StoredWeight(f"decoder.block.1.layer.1.EncDecAttention.{name}.weight")
            for role, name in zip(("query", "key", "value", "output"), "qkvo", strict=True)
        },
    ),
    "t5 gated": Entry(
        lambda: t5(feed_forward_proj="gated-gelu"),
        linear("encoder.block.1.{}", T5_NAMES, *(f"layer.1.DenseReluDense.{n}" for n in ("wi_1", "wo", "wi_0"))),
        "encoder", (6, 4, 1), tokens,
    ),
    "bart": Entry(
        lambda: hf.BartModel(hf.BartConfig(**SEQ2SEQ)), linear("encoder.layers.1.{}", BART_NAMES, "fc1", "fc2"),
        "encoder", (6, 4, 3), tokens, cross=bart_cross("decoder.layers.1.{}"),
    ),
    "vit": Entry(
        lambda: hf.ViTModel(hf.ViTConfig(**(PLAIN | {"image_size": 8, "patch_size": 4}))),
        linear("layers.1.{}", OURS_NAMES, "mlp.fc1", "mlp.fc2"), "encoder", (2, 2, 1), images,
    ),
    "timm look-alike": Entry(
        TimmVit, fused("blocks.1.attn.qkv.weight", "blocks.1.attn.proj.weight") | {
            "feedforward_in": StoredWeight("blocks.1.mlp.fc1.weight", (F, D)),
            "feedforward_out": StoredWeight("blocks.1.mlp.fc2.weight", (D, F)),
        },
        "encoder", (2, 2, 1), vectors,
    ),
    "torch encoder": Entry(
        lambda: nn.TransformerEncoder(encoder_layer(), 2),
        fused("layers.1.self_attn.in_proj_weight", "layers.1.self_attn.out_proj.weight") | TORCH_FF,
        "encoder", (2, 2, 0), vectors,
    ),
    "torch decoder": Entry(
        lambda: nn.Transformer(D, HEADS, 1, 2, F, batch_first=True).decoder,
        fused("layers.1.self_attn.in_proj_weight", "layers.1.self_attn.out_proj.weight") | TORCH_FF,
        "encoder", (4, 2, 0), pairs,
        cross=fused("layers.1.multihead_attn.in_proj_weight", "layers.1.multihead_attn.out_proj.weight"),
    ),
    "ours, classifier": Entry(
        lambda: ours("sequence_classification"),
        linear("layers.1.{}", OURS_NAMES, "feedforward.up_proj", "feedforward.down_proj"),
        "encoder", (2, 2, 2), tokens,
    ),
}  # fmt: skip
