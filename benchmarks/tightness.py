"""Upper bounds over the slope that an attack attains: ours, products of norms, and peers.

Rows are ratios, 1 is exact. ``products`` are the norms of the parts, as `certify` was before 0.5.
ECLipsE-Fast is the recursion of Xu and Sivaranjani (NeurIPS 2024), in float64. LipSDP-Neuron is the
semidefinite programme of Fazlyab et al. (2019) by Clarabel, if cvxpy is installed; small nets only.
The attack is `lipschitz_lower_bound` in float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows import Benchmark, Goal, Row, Setup, row_of
from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.linalg import certified_spectral_norm
from wellposed.nn import InvertibleResidual, MaxMin

SEEDS = 3
Build = Callable[[int], nn.Sequential]
ROUNDED = (
    "Only orthogonal weights are above, by 5e-10: there ECLipsE-Fast is the slope with every unit on,"
    " below which no bound lies, and a proof needs room for rounding."
)
NEAR = "Attacks are lower estimates, and LipSDP itself is above what they attain."


def _mlp(depth: int, width: int, outputs: int, activation: type[nn.Module] = nn.ReLU) -> Any:
    widths = [*depth * [width], outputs]
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Linear(widths[index], widths[index + 1]), activation()]
    return nn.Sequential(*layers[:-1])


def _random(depth: int, width: int) -> nn.Sequential:
    net = _mlp(depth, width, 10)
    for layer in net[::2]:
        nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.weight.shape[1]))
    return net


def _trained(depth: int, width: int, steps: int = 300) -> nn.Sequential:
    """Return a net trained on clusters, ten classes."""
    net = _mlp(depth, width, 10)
    centres = torch.randn(30, width)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        labels = torch.randint(30, (128,))
        loss = nn.functional.cross_entropy(
            net(centres[labels] + torch.randn(128, width)), labels % 10
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def _capped(depth: int, width: int) -> nn.Sequential:
    net = _trained(depth, width)
    with torch.no_grad():
        for layer in net:
            if not isinstance(layer, nn.Linear):
                continue
            left, values, right = torch.linalg.svd(layer.weight, full_matrices=False)
            layer.weight.copy_((left * values.clamp_max(1)) @ right)
    return net


def _orthogonal(depth: int, width: int) -> nn.Sequential:
    net = _mlp(depth, width, 10)
    for layer in net[::2]:
        nn.init.orthogonal_(layer.weight)
    return net


def _feedforward(activation: nn.Module, width: int) -> InvertibleResidual:
    inner = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))
    for layer in (inner[0], inner[2]):
        assert isinstance(layer, nn.Linear)
        nn.init.xavier_uniform_(layer.weight)
        with torch.no_grad():
            layer.weight.mul_(0.5**0.5)
    return InvertibleResidual(inner)


def chains(setup: Setup) -> Iterator[tuple[str, Callable[[], nn.Sequential]]]:
    width = setup.size(64, 8)
    steps = setup.size(300, 2)
    for depth in setup.size((2, 5, 8), (2,)):
        yield f"{depth} layers of {width}, random", lambda depth=depth: _random(depth, width)
    for depth in setup.size((5, 8), ()):
        yield (
            f"{depth} layers of {width}, trained",
            lambda depth=depth: _trained(depth, width, steps),
        )
    for depth in setup.size((8,), ()):
        yield f"{depth} layers of {width}, capped at 1", lambda depth=depth: _capped(depth, width)
        yield (
            f"{depth} layers of {width}, orthogonal",
            lambda depth=depth: _orthogonal(depth, width),
        )


def weights_of(net: nn.Sequential) -> list[Tensor]:
    return [layer.weight.detach().double() for layer in net if isinstance(layer, nn.Linear)]


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
    width = setup.size(64, 8)
    for name, build in chains(setup):
        ours, products, fast, over = [], [], [], []
        for seed in range(setup.size(SEEDS, 1)):
            torch.manual_seed(seed)
            net = build().double()
            slope = attained(net, width, setup)
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
    for depth in setup.size((2, 4), (2,)):
        ratios = []
        for seed in range(setup.size(SEEDS, 1)):
            torch.manual_seed(seed)
            net = _mlp(depth, setup.size(16, 4), 10).double()
            ratios.append(certify(net, norm=2, cross_check=False).total / lipsdp(net))
        yield row_of(f"ours / LipSDP-Neuron, {depth} layers of {setup.size(16, 4)}, random", ratios)


def rows(setup: Setup) -> Iterator[Row]:
    yield from _rows_of_chains(setup)
    yield from _rows_of_branches(setup)
    yield from _rows_of_gates(setup)
    yield from _rows_of_the_programme(setup)


BENCHMARK = Benchmark(
    "certified bounds over the attained slope: ours, products of norms, ECLipsE-Fast, LipSDP",
    "<= ECLipsE-Fast, <= 1.05 LipSDP", 4, rows,
    goals=(
        Goal("ours / ECLipsE-Fast*", "<= 1", ROUNDED),
        Goal("ours / LipSDP*", "<= 1.05"),
        Goal("bound / attained, ours, * with its skip*", "<= 1.4", NEAR),
        Goal("bound / attained, ours, 8 layers*trained", "<= 2.5", NEAR),
    ),
)  # fmt: skip
