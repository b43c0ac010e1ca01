"""Forward + backward time of Hugging Face models with our attention over ``sdpa``.

One layer's attention functions only, and two layers of BERT (without or with a quarter of padding),
GPT-2 (causal) and Llama (causal, four query heads per key head).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import AttentionInterface

from benchmarks.l2_attention import WIDER_HEAD
from benchmarks.rows import Benchmark, Goal, Row, Setup, ratio_row
from wellposed.integrations import register_attention

HEADS, HEAD_DIM = 8, 64
WIDTH = HEADS * HEAD_DIM
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH,
    "vocab_size": 100, "max_position_embeddings": 4096,
}  # fmt: skip


def bert() -> Any:
    return hf.BertModel(
        hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def gpt2() -> Any:
    special = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }
    sizes = {"vocab_size": 100, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 4096}
    return hf.GPT2Model(hf.GPT2Config(**sizes, **special))


def llama() -> Any:
    return hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=HEADS // 4))


MODELS: dict[str, Callable[[], Any]] = {
    "bert": bert,
    "bert padded": bert,
    "gpt2": gpt2,
    "llama": llama,
}


def attention_call(kind: str, tokens: int, device: str) -> Callable[[str], None]:
    """One layer's attention, forward and backward, from tensors laid out as in the models."""
    grouped = kind == "llama"
    module = SimpleNamespace(
        num_key_value_groups=4 if grouped else 1, is_causal=not kind.startswith("bert")
    )
    shapes = [
        (1, tokens, HEADS // 4 if grouped and index else HEADS, HEAD_DIM) for index in range(3)
    ]
    leaves = [torch.randn(shape, requires_grad=True, device=device) for shape in shapes]
    weight = torch.randn(1, tokens, HEADS, HEAD_DIM, device=device)
    is_padded = kind == "bert padded"
    mask = (
        padding(tokens, device)[:, None, None].expand(1, 1, tokens, tokens) if is_padded else None
    )

    def run(name: str) -> None:
        query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
        joined, _ = AttentionInterface()[name](
            module, query, key, value, mask, scaling=HEAD_DIM**-0.5, dropout=0.0
        )
        torch.autograd.grad(joined, leaves, weight)

    return run


def model_call(kind: str, tokens: int, device: str) -> Callable[[str], None]:
    """Two layers of the model, forward and backward through all its weights."""
    model = MODELS[kind]().train().to(device)
    ids = torch.randint(3, 100, (1, tokens), device=device)
    mask = padding(tokens, device).long() if kind == "bert padded" else None

    def run(name: str) -> None:
        model.set_attn_implementation(name)
        model.zero_grad()
        model(ids, attention_mask=mask).last_hidden_state.square().mean().backward()

    return run


def padding(tokens: int, device: str) -> Tensor:
    """Return (1, tokens), True at real tokens: the first three quarters."""
    return (torch.arange(tokens, device=device) < 3 * tokens // 4)[None]


def rows(setup: Setup) -> Iterator[Row]:
    ours = register_attention()
    parts = {"attention alone": attention_call, "two layers": model_call}
    for part, make in parts.items():
        for kind in setup.size(list(MODELS), ["bert"]):
            for tokens in setup.size([512, 1024, 2048], [32]):
                call = make(kind, tokens, setup.device)
                times = setup.interleave({name: partial(call, name) for name in ("sdpa", *ours)}, 7)
                for name in ours:
                    yield ratio_row(
                        f"{name} / sdpa, {part}, {kind}, N = {tokens}",
                        times,
                        name,
                        "sdpa",
                    )


BENCHMARK = Benchmark(
    "L2 and cosine attention in BERT, GPT-2 and Llama over their sdpa attention, forward + backward",
    "L2 <= 1.2, in two layers <= 1.1; cosine <= 1.25", 6, rows, ("cpu", "cuda"),
    goals=(
        Goal("wellposed_l2 / sdpa, attention alone*", "<= 1.2", WIDER_HEAD),
        Goal("wellposed_l2 *", "<= 1.1"),
        Goal("*", "<= 1.25"),
    ),
)  # fmt: skip
