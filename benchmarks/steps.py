"""Cost of each verb in a training step of GPT-2 (12 x 768, bf16 autocast, 8 x 1,024 tokens, AdamW).

Constraints are also compared with a step of Muon. Each side has its own model and optimizer, and
all sides alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import wellposed as wp
from benchmarks.rows import Benchmark, Goal, Row, Setup, Side, ratio_row

Attach = Callable[[nn.Module, torch.optim.Optimizer], Callable[[], Any] | None]
WATCHED_STEPS = 10
MATRICES = ("query", "key", "value", "output", "feedforward_in", "feedforward_out")


def penalized(model: nn.Module, _: object, **kwargs: Any) -> Callable[[], Tensor | None]:
    return wp.OrthogonalityPenalty(model, attention=1e-8, feedforward=1e-8, **kwargs)


def constrained(model: nn.Module, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
    wp.constrain_(model, optimizer, **kwargs)


def watched(model: nn.Module, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Callable[[], Any]:
    return wp.Monitor(model, optimizer, every=WATCHED_STEPS, **kwargs).step


ATTACHED: dict[str, Attach] = {
    "OrthogonalityPenalty": penalized,
    "OrthogonalityPenalty, bf16 products": partial(penalized, gram_dtype=torch.bfloat16),
    "constrain_ to spectral, every matrix": partial(constrained, to="spectral", bound="rms:1", where=MATRICES),
    "constrain_ to orthogonal, queries and keys": partial(constrained, to="orthogonal", where=("query", "key")),
    "Monitor(every=10, weights=False)": partial(watched, weights=False),
    "Monitor(every=10)": watched,
}  # fmt: skip


def steps(
    setup: Setup, attach: Attach | None, count: int, sequences: int = 8
) -> Callable[[], None]:
    """Return a call of ``count`` steps of a new model."""
    width, layers, tokens = setup.size((768, 12, 1024), (32, 2, 16))
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=max(1, width // 64), n_positions=tokens, vocab_size=setup.size(50304, 64),
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=setup.device == "cuda")
    ids = torch.randint(0, config.vocab_size, (sequences, tokens), device=setup.device)
    after = None if attach is None else attach(model, optimizer)

    def run() -> None:
        for _ in range(count):
            with torch.autocast(setup.device, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            if isinstance(after, wp.OrthogonalityPenalty):
                loss = loss + after()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if after is not None and not isinstance(after, wp.OrthogonalityPenalty):
                after()

    return run


def matrices(setup: Setup) -> nn.Module:
    """Return the 72 matrices of such a model, each with a gradient."""
    width, layers = setup.size((768, 12), (32, 2))
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    torch.manual_seed(0)
    linears = nn.ModuleList(nn.Linear(i, o, bias=False) for _ in range(layers) for o, i in shapes)
    for linear in linears.to(setup.device):
        linear.weight.grad = torch.randn_like(linear.weight)
    return linears


def optimizer_step(setup: Setup, make: Callable[..., torch.optim.Optimizer], **kind: Any) -> Side:
    """Return ten steps of an optimizer on those matrices, constrained or not."""
    linears = matrices(setup)
    optimizer = make(linears.parameters(), lr=1e-3)
    if kind:
        wp.constrain_(linears, optimizer, where="*", **kind)
    return Side(lambda: [optimizer.step() for _ in range(10)], shares=10)


def rows(setup: Setup) -> Iterator[Row]:
    """Yield each verb, the most used first; then steps relative to Muon's."""
    # With 32 sequences the device is busy all the time.
    for sequences, rounds, size in ((8, (15, 7), ""), (32, (7, 2), ", 32 x 1,024 tokens")):
        for name, attach in ATTACHED.items():
            count, few = (WATCHED_STEPS, 1) if name.startswith("Monitor") else (1, 0)
            made = [
                steps(setup, attach_or_none, count, setup.size(sequences, 8))
                for attach_or_none in (attach, None)
            ]
            times = setup.interleave({name: made[0], "plain": made[1]}, setup.size(rounds[few], 2))
            yield ratio_row(f"step with {name} / plain step{size}", times, name, "plain")
    muon = optimizer_step(setup, torch.optim.Muon)
    adam = partial(torch.optim.AdamW, fused=setup.device == "cuda")
    for target, options in (("spectral", {"bound": "rms:1"}), ("orthogonal", {})):
        sides = {target: optimizer_step(setup, adam, to=target, **options), "Muon": muon}
        times = setup.interleave(sides, 5)
        yield ratio_row(f"AdamW held to {target} / torch.optim.Muon, 72 matrices", times, target, "Muon")  # fmt: skip


PROFILED = (
    "Profiled on an H200, plain step 43.8 ms: the device itself works 0.4 ms longer for a Monitor, 1.8 for the penalty"
    " with bf16 products, 2.8 for orthogonal queries and keys, 7.6 for float32 products and 18 for spectral. The last"
    " are float32 Gram matrices and float64 factors, which prove the norm. The rest is the host, which issues 100 to"
    " 1,300 kernels."
)
BENCHMARK = Benchmark(
    "a training step with each verb over the plain step (GPT-2, 12 x 768, bf16), and beside Muon's",
    "penalty and constrain_ 1.05, Monitor 1.03, held steps 1.5 of Muon's",
    2,
    rows,
    ("cuda",),
    goals=(
        Goal("step with Monitor*", "<= 1.03", PROFILED),
        Goal("step with *", "<= 1.05", PROFILED),
        Goal("AdamW held*", "<= 1.5", PROFILED),
    ),
)
