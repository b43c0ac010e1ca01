"""Forward + backward time of Hugging Face models with our attention implementations against ``sdpa``.

Ratios are medians over interleaved rounds, so that a busy machine slows every candidate alike. ``attention`` times the
attention functions alone on one layer's queries, keys and values, ``model`` two layers of BERT (no mask), the same with
a quarter of padding, GPT-2 (causal) and Llama (causal, four query heads on one key head).
Run: python benchmarks/attention_interface.py [--tokens 512 1024 2048] [--rounds 7] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import AttentionInterface

from wellposed.integrations import register_attention

HEADS, HEAD_DIM = 8, 64
WIDTH = HEADS * HEAD_DIM
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH,
    "vocab_size": 100, "max_position_embeddings": 4096,
}  # fmt: skip


def bert() -> Any:
    """Two layers, no dropout."""
    return hf.BertModel(hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def gpt2() -> Any:
    """Two layers, no dropout."""
    special = {"bos_token_id": 1, "eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"vocab_size": 100, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 4096}
    return hf.GPT2Model(hf.GPT2Config(**sizes, **special))


def llama() -> Any:
    """Two layers, two key heads."""
    return hf.LlamaModel(hf.LlamaConfig(**SIZES, num_key_value_heads=HEADS // 4))


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "bert padded": bert, "gpt2": gpt2, "llama": llama}


def attention_call(kind: str, tokens: int) -> Callable[[str], None]:
    """One layer's attention, forward and backward, from tensors laid out as the models do."""
    grouped = kind == "llama"
    module = SimpleNamespace(num_key_value_groups=4 if grouped else 1, is_causal=not kind.startswith("bert"))
    shapes = [(1, tokens, HEADS // 4 if grouped and index else HEADS, HEAD_DIM) for index in range(3)]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    weight = torch.randn(1, tokens, HEADS, HEAD_DIM)
    mask = padding(tokens)[:, None, None].expand(1, 1, tokens, tokens) if kind == "bert padded" else None

    def run(name: str) -> None:
        query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
        joined, _ = AttentionInterface()[name](module, query, key, value, mask, scaling=HEAD_DIM**-0.5, dropout=0.0)
        torch.autograd.grad(joined, leaves, weight)

    return run


def model_call(kind: str, tokens: int) -> Callable[[str], None]:
    """Two layers of the model, forward and backward through all its weights."""
    model = MODELS[kind]().train()
    ids = torch.randint(3, 100, (1, tokens))
    mask = padding(tokens).long() if kind == "bert padded" else None

    def run(name: str) -> None:
        model.set_attn_implementation(name)
        model.zero_grad()
        model(ids, attention_mask=mask).last_hidden_state.square().mean().backward()

    return run


def padding(tokens: int) -> Tensor:
    """(1, tokens), True where a token is real: the first three quarters."""
    return (torch.arange(tokens) < 3 * tokens // 4)[None]


def main() -> None:
    """Print one row per model, part and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--parts", nargs="+", default=["attention", "model"], choices=["attention", "model"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="512 and 1024 tokens, 3 rounds")
    options = parser.parse_args()
    tokens, rounds = ([512, 1024], 3) if options.quick else (options.tokens, options.rounds)
    names = ("sdpa", *register_attention())
    print(
        f"torch {torch.__version__}, transformers {hf.__version__}, {torch.get_num_threads()} threads, {rounds} rounds"
    )
    for part in options.parts:
        make = attention_call if part == "attention" else model_call
        for kind in options.models:
            for length in tokens:
                call = make(kind, length)
                times: dict[str, list[float]] = {name: [] for name in names}
                for _ in range(rounds + 1):
                    for name in names:
                        start = time.perf_counter()
                        call(name)
                        times[name].append(time.perf_counter() - start)
                base = times["sdpa"][1:]
                ratios = {
                    name: statistics.median(a / b for a, b in zip(times[name][1:], base, strict=True))
                    for name in names[1:]
                }
                row = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
                print(f"{part} {kind} N={length}: {row} (sdpa {1000 * statistics.median(base):.1f} ms)", flush=True)


if __name__ == "__main__":
    main()
