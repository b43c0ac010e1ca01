"""TransJect against `nn.TransformerEncoder`: one forward pass, its growth with length, memory, and a training step.

    taskset -c 1 nice -n -5 python benchmarks/transject.py [--tokens 128 1024 4096] [--alone 16384] [--rounds 5]

Width 512, 6 layers, one thread, batch 1, eval, no gradients; ours has 4 experts, the Transformer 8 heads and a
feed-forward of 2048. Sides are run turn by turn; each figure is a median, and ratios are medians of paired ratios, in
processor time, since the machine may be shared. The Transformer is run twice: as it is (its fast path, which makes the
N x N weights), and with the fast path off (`scaled_dot_product_attention`). Memory is the peak of a fresh process above
what it holds before the pass. The step of training has 8192 tokens; re-orthogonalisation is what `constrain_` adds to
`optimizer.step()`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# The mathematics libraries read it when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

from wellposed.constrain import constrain_
from wellposed.nn import OrthogonalLinear, TransJectStack

WIDTH, LAYERS, EXPERTS = 512, 6, 4
Run = Callable[[Tensor], object]


def ours() -> TransJectStack:
    """Return the stack, its residual weights away from zero."""
    torch.manual_seed(0)
    return TransJectStack(WIDTH, LAYERS, num_experts=EXPERTS, residual="sigmoid").eval()


def transformer() -> nn.TransformerEncoder:
    """Return PyTorch's encoder."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Switch off the fused layers of `nn.TransformerEncoder`."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def sides(dtype: torch.dtype) -> dict[str, Run]:
    """Return what is run turn by turn."""
    stack, encoder = ours().to(dtype), transformer().to(dtype)

    def plain(x: Tensor) -> object:
        with no_fast_path():
            return encoder(x)

    return {"ours": stack, "transformer": encoder, "its sdpa path": plain}


def seconds(run: Run, x: Tensor) -> float:
    """Time one call."""
    start = time.process_time()
    run(x)
    return time.process_time() - start


@torch.inference_mode()
def forward_rows(dtype: torch.dtype, lengths: list[int], alone: list[int], rounds: int) -> None:
    """Print one row for each length, and the slope from 1024 tokens on."""
    name = str(dtype).removeprefix("torch.")
    runs, own = sides(dtype), {}
    for length in [*lengths, *alone]:
        taken = {key: run for key, run in runs.items() if length in lengths or key == "ours"}
        x = torch.randn(1, length, WIDTH).to(dtype)
        times: dict[str, list[float]] = {key: [] for key in taken}
        # Short passes are repeated: the clock of a processor ticks, and the first round warms caches.
        repeats = max(1, 1024 // length)
        for _ in range(rounds + 1):
            for key, run in taken.items():
                times[key].append(sum(seconds(run, x) for _ in range(repeats)) / repeats)
        own[length] = statistics.median(times["ours"][1:])
        row = f"| {name}, N = {length} | ours {own[length] * 1e3:.0f} ms |"
        for key in taken:
            if key != "ours":
                pairs = zip(times[key][1:], times["ours"][1:], strict=True)
                ratio = statistics.median(other / mine for other, mine in pairs)
                row += f" {key} {statistics.median(times[key][1:]) * 1e3:.0f} ms, {ratio:.2f} x ours |"
        print(row, flush=True)
    long = sorted(length for length in own if length >= 1024)
    if len(long) > 1:
        slope = math.log(own[long[-1]] / own[long[0]]) / math.log(long[-1] / long[0])
        print(f"| {name}, log-log slope {long[0]} to {long[-1]} | {slope:.3f} |", flush=True)


def _status(field: str) -> int:
    """Return a line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _peak(kind: str, length: int, queue: multiprocessing.Queue[int]) -> None:
    torch.set_num_threads(1)
    model = ours() if kind == "ours" else transformer()
    with torch.inference_mode():
        model(torch.randn(1, 16, WIDTH))
        x = torch.randn(1, length, WIDTH)
        # Linux: the high-water mark starts anew at what is held now.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _status("VmRSS")
        model(x)
    queue.put(_status("VmHWM") - before)


def memory_rows(lengths: list[int]) -> None:
    """Print the extra peak memory of a pass."""
    context = multiprocessing.get_context("spawn")
    for kind in ("ours", "transformer"):
        found: list[str] = []
        for length in lengths if kind == "ours" else [n for n in lengths if n <= 4096]:
            queue: multiprocessing.Queue[int] = context.Queue()
            process = context.Process(target=_peak, args=(kind, length, queue))
            process.start()
            found.append(f"{length}: {queue.get() / 1024:.0f} MiB")
            process.join()
        print(f"| extra peak memory, {kind} | {', '.join(found)} |", flush=True)


def training_row(batch: int, length: int, rounds: int) -> None:
    """Print the share of `constrain_` in a step; the same gradients are stepped along with and without it."""
    x, goal = torch.randn(2, batch, length, WIDTH).unbind()
    model, twin = ours().train(), ours().train()
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3, weight_decay=0.0) for part in (model, twin)]
    constrain_(model, optimizers[0], where=OrthogonalLinear)
    shares: list[float] = []
    whole: list[float] = []
    for _ in range(rounds + 1):
        start = time.process_time()
        model.zero_grad()
        loss = (model(x).last_hidden_state - goal).square().mean() + model.reconstruction_loss(x)
        loss.backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = None if mine.grad is None else mine.grad.clone()
        middle = time.process_time()
        optimizers[0].step()
        end = time.process_time()
        optimizers[1].step()
        whole.append(end - start)
        shares.append((end - middle - (time.process_time() - end)) / whole[-1])
    print(
        f"| re-orthogonalisation, training step of {batch} x {length} tokens | {statistics.median(shares[1:]):.1%} of "
        f"{statistics.median(whole[1:]):.1f} s |",
        flush=True,
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 1024, 4096])
    parser.add_argument("--alone", type=int, nargs="*", default=[16384], help="lengths at which only ours is run")
    parser.add_argument("--bf16", type=int, nargs="*", default=[128, 1024], help="lengths in bfloat16")
    parser.add_argument("--memory", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--train", type=int, nargs=2, default=[16, 512], metavar=("BATCH", "TOKENS"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-train", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, d = {WIDTH}, L = {LAYERS}, E = {EXPERTS}, processor time")
    forward_rows(torch.float32, arguments.tokens, arguments.alone, arguments.rounds)
    if arguments.bf16:
        forward_rows(torch.bfloat16, arguments.bf16, [], arguments.rounds)
    if arguments.memory:
        memory_rows(arguments.memory)
    if not arguments.no_train:
        training_row(arguments.train[0], arguments.train[1], arguments.rounds)


if __name__ == "__main__":
    main()
