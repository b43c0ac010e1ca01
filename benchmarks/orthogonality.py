"""Cost of keeping d x d weights orthogonal for one training step, over the floor of one d^3 matmul forward + backward.

Every number is process CPU time on one thread; candidates alternate within each round and ratios are taken within the
round, so that a busy machine slows all alike; the median over rounds counts. `constrain_` is its whole extra cost: an
SGD step with hooks minus the same step without, at steps of a given spectral size ``|A|``. The rows of to="spectral"
and "columns" take random steps of the size named from weights whose singular values are all 1, the bound, or 0.5
("inside"). A parametrisation is its forward and backward pass at ``|A|`` about 0.9. Then the drift: worst
max |Q^T Q - I| over a run of steps. With --blocks instead: the share of a whole AdamW step of a model of so many ball
blocks that keeping its weights below a spectral norm of 1 takes.

Run: python benchmarks/orthogonality.py [--width 512 256] [--matrices 6] [--rounds 7] [--only NAME ...] [--no-drift]
     python benchmarks/orthogonality.py --blocks 64 --width 32 [--tokens 1024] [--rounds 7]
geotorch and orthogonium are measured when they are installed (pip install geotorch orthogonium).
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

# The mathematics libraries read it when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

from wellposed.constrain import Set, constrain_, orthogonal
from wellposed.linalg import isometry_error

Step = Callable[[], Any]
SIZES = (0.02, 0.05, 0.1, 0.3)
STEPS = 8
PROJECTED: tuple[tuple[str, Set, float, float], ...] = (
    ("constrain_ spectral, inside", "spectral", 1e-3, 0.5),
    *((f"constrain_ spectral, step {size:g}", "spectral", size, 1.0) for size in (0.005, 0.02, 0.05, 0.3)),
    ("constrain_ columns, step 0.05", "columns", 0.05, 1.0),
)
SLOW = ("torch matrix_exp (default)", "torch householder", "geotorch expm", "orthogonium default")


def rotation(width: int) -> Tensor:
    """Return a random rotation (determinant +1, which geotorch needs)."""
    matrix = torch.linalg.qr(torch.randn(width, width))[0]
    if torch.linalg.det(matrix.double()) < 0:
        matrix[0] = -matrix[0]
    # LAPACK hands over its columns one after another; the weights of a model lie row by row.
    return matrix.contiguous()


def layers(width: int, count: int) -> nn.ModuleList:
    """Return square layers that are orthogonal already."""
    made = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
    for layer in made:
        layer.weight = nn.Parameter(rotation(width))
    return made


def floor(width: int, count: int) -> Step:
    """Return one d^3 matmul for each matrix, forward and backward: 3 products."""
    weights = [torch.randn(width, width, requires_grad=True) for _ in range(count)]
    inputs = [torch.randn(width, width, requires_grad=True) for _ in range(count)]
    gradient = torch.randn(width, width)

    def run() -> None:
        for weight, value in zip(weights, inputs, strict=True):
            torch.autograd.grad(value @ weight, (value, weight), gradient)

    return run


def hooked(width: int, count: int, size: float | None) -> tuple[Step, Step, nn.ModuleList]:
    """Return (prepare, step, layers) of SGD steps of spectral size ``size``; None is the step without hooks."""
    model = layers(width, count)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    if size is not None:
        constrain_(model, optimizer, where="*")
    moves = []
    for _ in range(count):
        skew = torch.randn(width, width)
        skew = skew - skew.T
        moves.append(skew * ((size or 0.05) / float(torch.linalg.matrix_norm(skew, 2))))

    def prepare() -> None:
        # The hooks replace the gradient W A by its coordinates, A.
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.grad = parameter.detach() @ move

    return prepare, optimizer.step, model


def projected(width: int, count: int, to: Set, size: float, start: float) -> tuple[Step, Step]:
    """Return (prepare, step) of SGD steps of spectral size ``size`` from weights with all singular values ``start``."""
    model = layers(width, count)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    constrain_(model, optimizer, where="*", to=to)

    def prepare() -> None:
        for parameter in model.parameters():
            # The largest singular value of a square Gaussian matrix is 2 sqrt(d) to within a percent or two.
            parameter.grad = torch.randn(width, width) * (size / (2 * width**0.5))

    return prepare, optimizer.step


def parametrised(width: int, count: int, attach: Callable[[nn.Module], Any]) -> Step:
    """Return forward and backward of a parametrisation for each matrix, away from its starting point."""
    made = layers(width, count)
    gradient = torch.randn(width, width)
    for layer in made:
        attach(layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.requires_grad and parameter.shape == (width, width):
                    # A skew matrix X - X^T of Gaussian entries has |A| = 2.8 std sqrt(d).
                    parameter.add_(torch.randn(width, width), alpha=0.9 / (2.8 * width**0.5))

    def run() -> None:
        for layer in made:
            layer.zero_grad()
            layer.weight.backward(gradient)

    return run


def parametrisations() -> dict[str, Callable[[nn.Module], Any]]:
    """Return every parametrisation that can be imported."""
    from torch.nn.utils import parametrizations as torch_maps

    found: dict[str, Callable[[nn.Module], Any]] = {
        "wellposed.constrain.orthogonal": orthogonal,
        "wellposed ... base=False": lambda layer: _restart(layer, lambda m: orthogonal(m, base=False)),
        "torch cayley": lambda layer: torch_maps.orthogonal(layer, orthogonal_map="cayley"),
        "torch householder": lambda layer: torch_maps.orthogonal(layer, orthogonal_map="householder"),
        "torch matrix_exp (default)": lambda layer: torch_maps.orthogonal(layer, orthogonal_map="matrix_exp"),
    }
    try:
        geotorch: Any = importlib.import_module("geotorch")
        found["geotorch cayley"] = lambda layer: geotorch.orthogonal(layer, "weight", triv="cayley")
        found["geotorch expm"] = lambda layer: geotorch.orthogonal(layer, "weight")
    except ImportError:
        print("geotorch is not installed: left out")
    try:
        reparametrizers: Any = importlib.import_module("orthogonium.reparametrizers")
        for name, option in (("default", "DEFAULT_ORTHO_PARAMS"), ("cholesky", "CHOLESKY_ORTHO_PARAMS")):
            found[f"orthogonium {name}"] = _orthogonium(getattr(reparametrizers, option))
    except ImportError:
        print("orthogonium is not installed: left out")
    return found


def _restart(layer: nn.Module, attach: Callable[[nn.Module], Any]) -> None:
    # Without a base the map starts near the identity.
    with torch.no_grad():
        layer.weight.copy_(torch.eye(*layer.weight.shape))
    attach(layer)


def _orthogonium(options: Any) -> Callable[[nn.Module], Any]:
    def attach(layer: nn.Module) -> None:
        from torch.nn.utils import parametrize

        shape = (1, *layer.weight.shape)
        parametrize.register_parametrization(
            layer,
            "weight",
            nn.Sequential(
                _Batch(),
                options.spectral_normalizer(weight_shape=shape),
                options.orthogonalizer(weight_shape=shape),
                _Unbatch(),
            ),
            unsafe=True,
        )

    return attach


class _Batch(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(0)


class _Unbatch(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.squeeze(0)


def seconds(step: Step) -> float:
    """Time one call."""
    start = time.process_time()
    step()
    return time.process_time() - start


def costs(width: int, matrices: int, rounds: int, only: list[str]) -> None:
    """Print the cost table for one width."""
    steps: dict[str, tuple[Step | None, Step, int]] = {}
    bare = hooked(width, matrices, None)
    steps["sgd"] = (bare[0], bare[1], matrices)
    for size in SIZES:
        prepare, step, _ = hooked(width, matrices, size)
        steps[f"constrain_ |A| = {size:g}"] = (prepare, step, matrices)
    for name, to, size, start in PROJECTED:
        steps[name] = (*projected(width, matrices, to, size, start), matrices)
    for name, attach in parametrisations().items():
        if not only or any(part in name for part in only):
            count = 1 if name in SLOW else matrices
            steps[name] = (None, parametrised(width, count, attach), count)
    run_floor = floor(width, matrices)

    times: dict[str, list[float]] = {name: [] for name in ("floor", *steps)}
    for _ in range(rounds + 1):
        times["floor"].append(seconds(run_floor) / matrices)
        for name, (prepare, step, count) in steps.items():
            # The hooks do not measure the error at every step, so a few steps are averaged.
            repeats = 1 if prepare is None else STEPS
            total = 0.0
            for _ in range(repeats):
                if prepare is not None:
                    prepare()
                total += seconds(step)
            times[name].append(total / repeats / count)
    # The first round warms caches and is left out.
    base = times["floor"][1:]
    plain = times["sgd"][1:]
    default = "torch matrix_exp (default)"
    print(
        f"\nd = {width}, {matrices} matrices, {rounds} rounds; floor {1e3 * statistics.median(base):.2f} ms per matrix"
    )
    print(f"{'design':36s} {'x floor':>8s} {'default / it':>13s} {'torch cayley / it':>18s}")
    for name in steps:
        if name == "sgd":
            continue
        own = times[name][1:]
        if name.startswith("constrain_"):
            own = [a - b for a, b in zip(own, plain, strict=True)]
        row = f"{name:36s} {_median_ratio(own, base):8.2f}"
        for other in (default, "torch cayley"):
            row += (
                f" {_median_ratio(times[other][1:], own):{13 if other == default else 18}.2f}" if other in times else ""
            )
        print(row)


def _median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def drift(width: int, steps: int) -> None:
    """Print the worst error over a run of steps, the size of the step fixed, its direction new each time."""
    print(f"\nworst max |Q^T Q - I| over {steps} steps, d = {width}, float32")
    for size in (0.01, *SIZES, 0.6):
        model = layers(width, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        constrain_(model, optimizer, where="*")
        worst = 0.0
        weight = model.get_parameter("0.weight")
        for _ in range(steps):
            skew = torch.randn(width, width)
            # The largest singular value of a Gaussian G - G^T is 2 sqrt(2 d) to within a percent or two.
            weight.grad = weight.detach() @ (skew - skew.T) * (size / (8 * width) ** 0.5)
            optimizer.step()
            worst = max(worst, float(isometry_error(weight)))
        print(f"  |A| = {size:<5g} {worst:.1e}")


def share_of_a_step(width: int, blocks: int, tokens: int, rounds: int) -> None:
    """Print how much of a training step the constraint is, for one model with it and one without, in turns."""
    from wellposed.models import WellposedConfig, WellposedForCausalLM

    sides: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for is_held in (False, True):
        torch.manual_seed(0)
        model = WellposedForCausalLM(
            WellposedConfig(
                vocab_size=96, hidden_size=width, num_hidden_layers=blocks, num_attention_heads=max(1, width // 32),
                intermediate_size=4 * width, max_position_embeddings=128, attention="ball", feedforward="maxmin",
                residual="convex", norm="none", unit_embeddings=True, dropout=0.0, attention_dropout=0.0,
            )
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0, fused=True)
        if is_held:
            constrain_(model, optimizer, where=[f"*.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")],
                       to="spectral")  # fmt: skip
        sides.append((model, optimizer))
    ids = torch.randint(0, 96, (max(1, tokens // 128), 128))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        nn.functional.cross_entropy(10 * model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        return seconds(optimizer.step)

    took: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        start = time.process_time()
        free = step(*sides[0])
        bare = time.process_time() - start
        took.append((step(*sides[1]) - free, bare))
    share = statistics.median(extra / (bare + extra) for extra, bare in took[1:])
    print(f"{blocks} blocks of width {width}, {tokens} tokens: {share:.3f} of a step, 1 / {1 - share:.3f} of its time")


def main() -> None:
    """Print one cost table per width, then the drift."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[512, 256])
    parser.add_argument("--matrices", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="parametrisations to measure, by part of their name")
    parser.add_argument("--drift-steps", type=int, default=300)
    parser.add_argument("--no-drift", action="store_true")
    parser.add_argument(
        "--blocks", type=int, default=0, help="measure the share of a step of a model of so many blocks"
    )
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, float32, one thread")
    for width in arguments.width if arguments.blocks else ():
        share_of_a_step(width, arguments.blocks, arguments.tokens, arguments.rounds)
    if arguments.blocks:
        return
    for width in arguments.width:
        costs(width, arguments.matrices, arguments.rounds, arguments.only)
    if not arguments.no_drift:
        drift(256, arguments.drift_steps)


if __name__ == "__main__":
    main()
