"""Upper bounds over the slope that an attack attains: ours, products of norms, and peers.

Rows are ratios, 1 is exact. ``products`` are the norms of the parts, as `certify` was before 0.5.
ECLipsE-Fast is the recursion of Xu and Sivaranjani (NeurIPS 2024), in float64. It is compared on the
shapes and norms of all random nets of their paper too. LipSDP-Neuron is the semidefinite programme of
Fazlyab et al. (2019) by Clarabel, if cvxpy is installed; small nets only. The attack is
`lipschitz_lower_bound` in float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows import Benchmark, Goal, Row, Setup, row_of
from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.linalg import certified_spectral_norm
from wellposed.nn import InvertibleResidual, MaxMin

SEEDS = 3
Build = Callable[[], nn.Sequential]
ROUNDED = (
    "Only orthogonal weights are above, by 5e-10: there ECLipsE-Fast is the slope with every unit on,"
    " below which no bound lies, and a proof needs room for rounding."
)
NO_SEARCH = (
    "From 50 layers of 300 on there is no time for a search, so the multipliers are those of"
    " ECLipsE-Fast, and the proof needs room for rounding."
)
NEAR = "Attacks are lower estimates, and LipSDP itself is above what they attain."
STANDARD = [
    (depth, width) for depth in (2, 5, 10, 20, 30, 50, 75, 100) for width in (20, 40, 60, 80, 100)
]
LARGE = [(100, 120), (100, 140), (100, 160), (50, 150), (50, 200), (50, 300)]
"""Layers and units of the random nets of the ECLipsE paper, but 50 layers of 400 units or more."""


def _mlp(widths: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def _random(widths: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    net = _mlp(widths, activation)
    for layer in _linear_layers(net):
        nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.weight.shape[1]))
    return net


def _as_in_eclipse(depth: int, width: int) -> nn.Sequential:
    """Return a net of the ECLipsE paper: 4 inputs, 1 output, norms drawn from 0.4 to 1.8."""
    net = _mlp([4, *(depth - 1) * [width], 1]).double()
    with torch.no_grad():
        for layer in _linear_layers(net):
            drawn = torch.randn_like(layer.weight)
            norm = 0.4 + 1.4 * torch.rand((), dtype=torch.float64)
            layer.weight.copy_(norm * drawn / torch.linalg.matrix_norm(drawn, 2))
    return net


def _trained(
    widths: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU, *, steps: int = 300
) -> nn.Sequential:
    """Return a net trained on clusters, ten classes."""
    net = _mlp(widths, activation)
    centres = torch.randn(30, widths[0])
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        labels = torch.randint(30, (128,))
        loss = nn.functional.cross_entropy(
            net(centres[labels] + torch.randn(128, widths[0])), labels % 10
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def _capped(widths: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    net = _trained(widths, activation)
    with torch.no_grad():
        for layer in _linear_layers(net):
            left, values, right = torch.linalg.svd(layer.weight, full_matrices=False)
            layer.weight.copy_((left * values.clamp_max(1)) @ right)
    return net


def _orthogonal(widths: Sequence[int]) -> nn.Sequential:
    net = _mlp(widths)
    for layer in _linear_layers(net):
        nn.init.orthogonal_(layer.weight)
    return net


def _linear_layers(net: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in net if isinstance(layer, nn.Linear)]


def _feedforward(activation: nn.Module, width: int) -> InvertibleResidual:
    inner = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))
    for layer in (inner[0], inner[2]):
        assert isinstance(layer, nn.Linear)
        nn.init.xavier_uniform_(layer.weight)
        with torch.no_grad():
            layer.weight.mul_(0.5**0.5)
    return InvertibleResidual(inner)


def _even(depth: int, width: int) -> list[int]:
    return [*depth * [width], 10]


def _leaky() -> nn.Module:
    return nn.LeakyReLU(0.1)


TAPERING = (128, 96, 64, 48, 32, 10)
NARROW = (64, 8, 64, 8, 64, 10)
CHAINS: dict[str, Build] = {
    "2 layers of 64, random": lambda: _random(_even(2, 64)),
    "5 layers of 64, random": lambda: _random(_even(5, 64)),
    "8 layers of 64, random": lambda: _random(_even(8, 64)),
    "3 layers of 16, random": lambda: _random(_even(3, 16)),
    "16 layers of 32, random": lambda: _random(_even(16, 32)),
    "5 layers of 128, random": lambda: _random(_even(5, 128)),
    "5 layers of 64, tanh, random": lambda: _random(_even(5, 64), nn.Tanh),
    "128-96-64-48-32-10, random": lambda: _random(TAPERING),
    "64-8-64-8-64-10, random": lambda: _random(NARROW),
    "5 layers of 60, as in ECLipsE": lambda: _as_in_eclipse(5, 60),
    "20 layers of 40, as in ECLipsE": lambda: _as_in_eclipse(20, 40),
    "5 layers of 64, trained": lambda: _trained(_even(5, 64)),
    "8 layers of 64, trained": lambda: _trained(_even(8, 64)),
    "2 layers of 128, trained": lambda: _trained(_even(2, 128)),
    "128-96-64-48-32-10, trained": lambda: _trained(TAPERING),
    "5 layers of 64, tanh, trained": lambda: _trained(_even(5, 64), nn.Tanh),
    "5 layers of 64, leaky ReLU, trained": lambda: _trained(_even(5, 64), _leaky),
    "8 layers of 64, capped at 1": lambda: _capped(_even(8, 64)),
    "5 layers of 64, tanh, capped at 1": lambda: _capped(_even(5, 64), nn.Tanh),
    "8 layers of 64, orthogonal": lambda: _orthogonal(_even(8, 64)),
    "16 layers of 32, orthogonal": lambda: _orthogonal(_even(16, 32)),
}
PROGRAMMES: dict[str, Build] = {
    "2 layers of 16, random": lambda: _mlp(_even(2, 16)),
    "4 layers of 16, random": lambda: _mlp(_even(4, 16)),
    "8 layers of 8, random": lambda: _random(_even(8, 8)),
    "24-16-8-10, trained": lambda: _trained((24, 16, 8, 10)),
    "3 layers of 16, tanh, capped at 1": lambda: _capped(_even(3, 16), nn.Tanh),
}
"""Nets that are small enough for LipSDP."""
TINY: dict[str, Build] = {"2 layers of 8, random": lambda: _random(_even(2, 8))}


def weights_of(net: nn.Sequential) -> list[Tensor]:
    return [layer.weight.detach().double() for layer in _linear_layers(net)]


def product_of_norms(net: nn.Sequential) -> float:
    return math.prod(float(certified_spectral_norm(weight)) for weight in weights_of(net))


def eclipse_fast(net: nn.Sequential) -> float:
    """Bound a chain with slopes in [0, 1] by ``X_i = l_i I - l_i^2 / 4 W_i X_(i-1)^-1 W_i'`` with
    ``l_i = 2 / lambda_max(W_i X_(i-1)^-1 W_i')``."""
    *hidden, last = weights_of(net)
    block = torch.eye(hidden[0].shape[1], dtype=torch.float64)
    for weight in hidden:
        through = weight @ torch.linalg.solve(block, weight.mT)
        through = (through + through.mT) / 2
        number = 2 / float(torch.linalg.eigvalsh(through)[-1])
        block = number * torch.eye(len(weight), dtype=torch.float64) - number**2 / 4 * through
    through = last @ torch.linalg.solve(block, last.mT)
    return math.sqrt(float(torch.linalg.eigvalsh((through + through.mT) / 2)[-1]))


def lipsdp(net: nn.Sequential) -> float:
    """Bound a chain with slopes in [0, 1] by LipSDP-Neuron, solved by Clarabel."""
    cvxpy = importlib.import_module("cvxpy")
    *hidden, last = (weight.numpy() for weight in weights_of(net))
    widths = [hidden[0].shape[1], *(len(weight) for weight in hidden)]
    rho = cvxpy.Variable()
    multipliers = [cvxpy.Variable(width, nonneg=True) for width in widths[1:]]
    blocks: list[list[Any]] = [[None] * len(widths) for _ in widths]
    for row, height in enumerate(widths):
        for column, width in enumerate(widths):
            blocks[row][column] = torch.zeros(height, width).double().numpy()
    blocks[0][0] = rho * torch.eye(widths[0]).double().numpy()
    for index, (weight, multiplier) in enumerate(zip(hidden, multipliers, strict=True), start=1):
        blocks[index][index] = 2 * cvxpy.diag(multiplier)
        blocks[index][index - 1] = -cvxpy.diag(multiplier) @ weight
        blocks[index - 1][index] = blocks[index][index - 1].T
    end = len(widths) - 1
    blocks[end][end] = blocks[end][end] - last.T @ last
    matrix = cvxpy.bmat(blocks)
    problem = cvxpy.Problem(cvxpy.Minimize(rho), [(matrix + matrix.T) / 2 >> 0])
    problem.solve(solver="CLARABEL")
    return math.sqrt(float(rho.value))


def attained(net: nn.Module, width: int, setup: Setup, *, radius: float | None = None) -> float:
    """Return the largest slope that an attack finds."""
    options: dict[str, Any] = {
        "norm": 2,
        "radius": radius,
        "restarts": setup.size(32, 2),
        "steps": setup.size(150, 2),
    }
    return lipschitz_lower_bound(net, (1, width), scales=(0.3, 10.0), **options).value


def _rows_of_chains(setup: Setup) -> Iterator[Row]:
    for name, build in setup.size(CHAINS, TINY).items():
        ours, products, fast, over = [], [], [], []
        for seed in range(setup.size(SEEDS, 1)):
            torch.manual_seed(seed)
            net = build().double()
            slope = attained(net, weights_of(net)[0].shape[1], setup)
            bound = certify(net, norm=2, cross_check=False).total
            peer = eclipse_fast(net)
            ours.append(bound / slope)
            products.append(product_of_norms(net) / slope)
            fast.append(peer / slope)
            over.append(bound / peer)
        yield row_of(f"bound / attained, ours, {name}", ours)
        yield row_of(f"bound / attained, products, {name}", products)
        yield row_of(f"bound / attained, ECLipsE-Fast, {name}", fast)
        yield row_of(f"ours / ECLipsE-Fast, {name}", over)


def _rows_of_eclipse(setup: Setup) -> Iterator[Row]:
    """Compare on every random net of the ECLipsE paper; the row is the largest ratio."""
    for kind, shapes in (("standard", STANDARD), ("large", LARGE)):
        ratios = []
        for depth, width in setup.size(shapes, [(2, 4)]):
            torch.manual_seed(7 * width + 13 * depth)
            net = _as_in_eclipse(depth, width)
            ratios.append(certify(net, norm=2, cross_check=False).total / eclipse_fast(net))
        yield Row(
            f"ours / ECLipsE-Fast, largest of its {len(ratios)} {kind} nets",
            max(ratios), min(ratios), max(ratios),
        )  # fmt: skip


def _rows_of_branches(setup: Setup) -> Iterator[Row]:
    width = setup.size(64, 8)
    for name, activation in (("ReLU", nn.ReLU), ("GELU", nn.GELU), ("MaxMin", MaxMin)):
        ours, products = [], []
        for seed in range(setup.size(SEEDS, 1)):
            torch.manual_seed(seed)
            block = _feedforward(activation(), width).double()
            slope = attained(block, width, setup)
            inner = block.f
            assert isinstance(inner, nn.Sequential)
            steep = 1.128905 if name == "GELU" else 1.0
            ours.append(certify(block, norm=2, cross_check=False).total / slope)
            products.append((1 + steep * product_of_norms(inner)) / slope)
        yield row_of(f"bound / attained, ours, {name} feed-forward with its skip, {width}", ours)
        yield row_of(
            f"bound / attained, products, {name} feed-forward with its skip, {width}", products
        )


def _swiglu(width: int) -> Any:
    transformers = importlib.import_module("transformers")
    source = importlib.import_module("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=8 * width // 3, num_attention_heads=2
    )
    return source.LlamaMLP(config)


def product_of_a_gated(module: Any, radius: float) -> float:
    """Return ``|W_d| (l |W_g| max|u| + |W_u| max|g|)`` on a ball, the bound of theory note B13."""
    gate, up, down = (
        part.weight.detach() for part in (module.gate_proj, module.up_proj, module.down_proj)
    )
    sizes = [float(certified_spectral_norm(weight)) for weight in (gate, up, down)]
    largest = [float(weight.norm(dim=-1).max()) * radius for weight in (gate, up)]
    return sizes[2] * (1.09984 * sizes[0] * largest[1] + sizes[1] * largest[0])


def _rows_of_gates(setup: Setup) -> Iterator[Row]:
    if importlib.util.find_spec("transformers") is None:
        return
    width = setup.size(64, 8)
    for radius in (1.0, math.sqrt(width)):
        ours, products = [], []
        for seed in range(setup.size(SEEDS, 1)):
            torch.manual_seed(seed)
            module = _swiglu(width).double()
            slope = attained(module, width, setup, radius=radius)
            bound = certify(module, radius=radius, norm=2, seq_len=1, cross_check=False).total
            ours.append(bound / slope)
            products.append(product_of_a_gated(module, radius) / slope)
        name = f"SwiGLU of {width} on tokens of norm {radius:g}"
        yield row_of(f"bound / attained, ours, {name}", ours)
        yield row_of(f"bound / attained, products, {name}", products)


def _rows_of_the_programme(setup: Setup) -> Iterator[Row]:
    if importlib.util.find_spec("cvxpy") is None:
        return
    for name, build in setup.size(PROGRAMMES, TINY).items():
        ratios = []
        for seed in range(setup.size(SEEDS, 1)):
            torch.manual_seed(seed)
            net = build().double()
            ratios.append(certify(net, norm=2, cross_check=False).total / lipsdp(net))
        yield row_of(f"ours / LipSDP-Neuron, {name}", ratios)


def rows(setup: Setup) -> Iterator[Row]:
    yield from _rows_of_chains(setup)
    yield from _rows_of_eclipse(setup)
    yield from _rows_of_branches(setup)
    yield from _rows_of_gates(setup)
    yield from _rows_of_the_programme(setup)


BENCHMARK = Benchmark(
    "certified bounds over the attained slope: ours, products of norms, ECLipsE-Fast, LipSDP",
    "<= ECLipsE-Fast, <= 1.05 LipSDP", 12, rows,
    goals=(
        Goal("ours / ECLipsE-Fast*large nets", "<= 1", NO_SEARCH),
        Goal("ours / ECLipsE-Fast*", "<= 1", ROUNDED),
        Goal("ours / LipSDP*", "<= 1.05"),
        Goal("bound / attained, ours, * with its skip*", "<= 1.4", NEAR),
        Goal("bound / attained, ours, 8 layers*trained", "<= 2.5", NEAR),
    ),
)  # fmt: skip
