"""Cost of keeping d x d weights orthogonal in a training step, over one d^3 matmul (both ways).

`constrain_` counts its extra cost only: an SGD step of spectral size ``|A|`` with hooks minus one
without. Rows of to="spectral" and "columns" take random steps of the named size from singular
values of 1 (the bound) or 0.5 ("inside"). A parametrisation counts forward and backward at ``|A|``
about 0.9. Other rows: drift (worst max |Q^T Q - I| of a run of steps); shares of an AdamW step for
the spectral constraint (ball blocks) and QK-clip; and logits over the bound of QK-clip.

geotorch, orthogonium and the Muon of Emerging-Optimizers are measured if installed (pip install
geotorch orthogonium emerging-optimizers).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows import Benchmark, Call, Goal, Row, Setup, Side, Times, row_of, single
from wellposed.constrain import Constraint, Set, constrain_
from wellposed.linalg import isometry_error
from wellposed.roles import find_roles

TWO_BENDS = (
    "A step that adds 0.45 to the norm is bent twice: for each, a Gram matrix, its Cholesky factor,"
    " two squares and one product, and a proof after both, about 8 products; the floor has 3."
)
SQUARINGS = (
    "No bound proves that such large steps stay inside, so the polynomial of the cap takes at least 2.3"
    " to 4 products per weight. A step of 1,024 tokens has 12 of width 256: a share of 0.17."
)
SIZES = (0.02, 0.05, 0.1, 0.3)
STEPS = 8
DEFAULT = "torch default (matrix_exp)"
PROJECTED: tuple[tuple[str, Set, float, float], ...] = (
    ("spectral, inside", "spectral", 1e-3, 0.5),
    *((f"spectral, step {size:g}", "spectral", size, 1.0) for size in (0.005, 0.02, 0.05, 0.3)),
    ("columns, step 0.05", "columns", 0.05, 1.0),
)
# Widths, and how many weights of each.
RATES = (1e-4, 1e-3, 1e-2)
_SAME = "spectral, the same gradient every step"
ADAMW = ((64, 48), (256, 24), (512, 12), (1024, 4))


def rotation(width: int) -> Tensor:
    """Return a random rotation (determinant +1, which geotorch needs)."""
    matrix = torch.linalg.qr(torch.randn(width, width))[0]
    if torch.linalg.det(matrix.double()) < 0:
        matrix[0] = -matrix[0]
    # LAPACK returns column-major matrices; the weights of a model are row-major.
    return matrix.contiguous()


def layers(width: int, count: int, device: str) -> nn.ModuleList:
    made = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
    for layer in made:
        layer.weight = nn.Parameter(rotation(width))
    return made.to(device)


def floor(width: int, count: int, device: str) -> Call:
    """Return one d^3 matmul per matrix, forward and backward: 3 products."""
    make = partial(torch.randn, width, width, device=device)
    weights, inputs = ([make(requires_grad=True) for _ in range(count)] for _ in range(2))
    gradient = make()

    def run() -> None:
        for weight, value in zip(weights, inputs, strict=True):
            torch.autograd.grad(value @ weight, (value, weight), gradient)

    return run


def hooked(width: int, count: int, device: str, size: float | None) -> Side:
    """Return SGD steps of spectral size ``size``; None is the step without hooks."""
    model = layers(width, count, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    if size is not None:
        constrain_(model, optimizer, where="*")
    moves = []
    for _ in range(count):
        skew = torch.randn(width, width, device=device)
        skew = skew - skew.T
        moves.append(skew * ((size or 0.05) / float(torch.linalg.matrix_norm(skew, 2))))

    def prepare() -> None:
        # The hooks replace the gradient W A by its coordinates, A.
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.grad = parameter.detach() @ move

    # Hooks do not measure the error at every step, so a few steps are averaged.
    return Side(optimizer.step, prepare, STEPS, count)


def projected(width: int, count: int, device: str, to: Set, size: float, start: float) -> Side:
    """Return SGD steps of spectral size ``size`` from singular values ``start``."""
    model = layers(width, count, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    constrain_(model, optimizer, where="*", to=to)

    def prepare() -> None:
        for parameter in model.parameters():
            # A square Gaussian matrix has spectral norm 2 sqrt(d) within 1 or 2 %.
            parameter.grad = torch.randn_like(parameter) * (size / (2 * width**0.5))

    return Side(optimizer.step, prepare, STEPS, count)


def parametrised(width: int, count: int, device: str, attach: Callable[[nn.Module], Any]) -> Call:
    """Return forward and backward of a parametrisation per matrix, away from its start."""
    made = layers(width, count, device)
    gradient = torch.randn(width, width, device=device)
    for layer in made:
        attach(layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.requires_grad and parameter.shape == (width, width):
                    # A skew matrix X - X^T of Gaussian entries has |A| = 2.8 std sqrt(d).
                    parameter.add_(torch.randn_like(parameter), alpha=0.9 / (2.8 * width**0.5))

    def run() -> None:
        for layer in made:
            layer.zero_grad()
            layer.weight.backward(gradient)

    return run


def parametrisations() -> dict[str, Callable[[nn.Module], Any]]:
    """Return all parametrisations that can be imported."""
    from torch.nn.utils import parametrizations as torch_maps

    maps: dict[str, Callable[[nn.Module], Any]] = {
        "torch cayley": lambda layer: torch_maps.orthogonal(layer, orthogonal_map="cayley"),
        "torch householder": lambda layer: torch_maps.orthogonal(
            layer, orthogonal_map="householder"
        ),
        DEFAULT: lambda layer: torch_maps.orthogonal(layer, orthogonal_map="matrix_exp"),
    }
    try:
        geotorch: Any = importlib.import_module("geotorch")
        maps["geotorch cayley"] = lambda layer: geotorch.orthogonal(layer, "weight", triv="cayley")
        maps["geotorch expm"] = lambda layer: geotorch.orthogonal(layer, "weight")
    except ImportError:
        pass
    try:
        reparametrizers: Any = importlib.import_module("orthogonium.reparametrizers")
        for name, option in (
            ("default", "DEFAULT_ORTHO_PARAMS"),
            ("cholesky", "CHOLESKY_ORTHO_PARAMS"),
        ):
            maps[f"orthogonium {name}"] = _orthogonium(getattr(reparametrizers, option))
    except ImportError:
        pass
    return maps


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


def cost_rows(setup: Setup, width: int, count: int) -> Iterator[Row]:
    """Yield each design over the floor, and torch's parametrisations over `constrain_`."""
    device, plain = setup.device, "the step without hooks"
    hooks = {f"step {size:g}": hooked(width, count, device, size) for size in SIZES}
    sets = {
        name: projected(width, count, device, to, size, start)
        for name, to, size, start in PROJECTED
    }
    slow = (DEFAULT, "torch householder", "geotorch expm", "orthogonium default")
    designs = {
        name: Side(
            parametrised(width, 1 if name in slow else count, device, attach),
            None,
            1,
            1 if name in slow else count,
        )
        for name, attach in parametrisations().items()
    }
    bare = {
        "floor": Side(floor(width, count, device), None, 1, count),
        plain: hooked(width, count, device, None),
    }
    times = setup.interleave({**bare, **hooks, **sets, **designs}, 7)
    for name in (*hooks, *sets):
        times[name] = [a - b for a, b in zip(times[name], times[plain], strict=True)]
    label = f"d = {width}, {count} matrices"
    for name in hooks:
        yield paired(f"constrain_, {name} / matmul floor, {label}", times, name, "floor")
        yield paired(f"torch cayley / constrain_, {name}, {label}", times, "torch cayley", name)
        yield paired(f"torch default / constrain_, {name}, {label}", times, DEFAULT, name)
    for name in sets:
        yield paired(f"constrain_, {name} / matmul floor, {label}", times, name, "floor")
    for name in designs:
        yield paired(f"{name} / matmul floor, {label}", times, name, "floor")


def adamw_rows(setup: Setup, width: int, count: int) -> Iterator[Row]:
    """Yield the extra cost of constraints in AdamW at each rate, over a matmul pair and over Muon.

    Weights start orthogonal; part of the gradient, or all of it, is the same in every step.
    """

    def stepping(rate: float, to: Set | None, noise: float = 1.0) -> Side:
        model = layers(width, count, setup.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        if to is not None:
            constrain_(model, optimizer, where="*", to=to)
        pushes = [0.5 * torch.randn_like(parameter) for parameter in model.parameters()]

        def prepare() -> None:
            for parameter, push in zip(model.parameters(), pushes, strict=True):
                parameter.grad = push + noise * torch.randn_like(parameter)

        return Side(optimizer.step, prepare, 1, count)

    muons: dict[str, Side] = {}
    for name, build in muon_classes().items():
        linears = layers(width, count, setup.device)
        for parameter in linears.parameters():
            parameter.grad = torch.randn_like(parameter)
        muons[name] = Side(build(list(linears.parameters()), lr=1e-3).step, None, 1, count)
    for rate in setup.size(RATES, RATES[:1]):
        sides = {
            "floor": Side(floor(width, count, setup.device), None, 1, count),
            "free": stepping(rate, None),
            "spectral": stepping(rate, "spectral"),
            "orthogonal": stepping(rate, "orthogonal"),
            _SAME: stepping(rate, "spectral", 0.0),
            **muons,
        }
        times = setup.interleave(sides, 15)
        label = f"AdamW at {rate:g}, d = {width}, {count} matrices"
        for to in ("spectral", _SAME, "orthogonal"):
            times[to] = [a - b for a, b in zip(times[to], times["free"], strict=True)]
            yield paired(f"to={to} / matmul floor, {label}", times, to, "floor")
            for name in muons:
                yield paired(f"to={to} / a step of {name}, {label}", times, to, name)


def muon_classes() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    result: dict[str, Callable[..., torch.optim.Optimizer]] = {"Muon": torch.optim.Muon}
    try:
        module: Any = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
        result["Emerging-Optimizers' Muon"] = module.Muon
    except ImportError:
        pass
    return result


def paired(name: str, times: Times, above: str, below: str) -> Row:
    return row_of(name, [a / b for a, b in zip(times[above], times[below], strict=True)])


def drift_rows(setup: Setup) -> Iterator[Row]:
    """Yield the worst error of many steps of fixed size in random directions."""
    width, steps = setup.size((256, 300), (16, 3))
    for size in (0.01, *SIZES, 0.6):
        model = layers(width, 1, setup.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        constrain_(model, optimizer, where="*")
        worst = 0.0
        weight = model.get_parameter("0.weight")
        for _ in range(steps):
            skew = torch.randn_like(weight)
            # A Gaussian G - G^T has spectral norm 2 sqrt(2 d) within 1 or 2 %.
            weight.grad = weight.detach() @ (skew - skew.T) * (size / (8 * width) ** 0.5)
            optimizer.step()
            worst = max(worst, float(isometry_error(weight)))
        yield single(
            f"worst max |Q^T Q - I| of {steps} steps of size {size:g}, d = {width}",
            worst,
        )


def share_row(setup: Setup, blocks: int, width: int) -> Row:
    """Return the share of the constraint in a training step, from two alternating models."""
    from wellposed.models import WellposedConfig, WellposedForCausalLM

    ids = torch.randint(0, 96, (setup.size(8, 1), setup.size(128, 8)), device=setup.device)

    def backward_and_step(is_held: bool) -> tuple[Call, Call]:
        torch.manual_seed(0)
        model = WellposedForCausalLM(
            WellposedConfig(
                vocab_size=96, hidden_size=width, num_hidden_layers=blocks, num_attention_heads=max(1, width // 32),
                intermediate_size=4 * width, max_position_embeddings=128, attention="ball", feedforward="maxmin",
                residual="convex", norm="none", unit_embeddings=True, dropout=0.0, attention_dropout=0.0,
            )
        ).to(setup.device)  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0, fused=True)
        if is_held:
            names = [f"*.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")]
            constrain_(model, optimizer, where=names, to="spectral")

        def backward() -> None:
            optimizer.zero_grad()
            logits = 10 * model(ids).logits[:, :-1].flatten(0, 1)
            nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()

        return backward, optimizer.step

    (free_backward, free), (held_backward, bound_step) = map(backward_and_step, (False, True))
    sides: dict[str, Call | Side] = {
        "backward": free_backward, "free": Side(free, free_backward), "held": Side(bound_step, held_backward),
    }  # fmt: skip
    times = setup.interleave(sides, 7)
    shares = [
        (h - f) / (b + h)
        for b, f, h in zip(times["backward"], times["free"], times["held"], strict=True)
    ]
    return row_of(
        f"spectral constraint, share of an AdamW step, {blocks} x {width}, {ids.numel()} tokens",
        shares,
    )


def clip_rows(setup: Setup) -> Iterator[Row]:
    """Yield QK-clip's share of a step, far from and at the bound, and logits over the bound."""
    from wellposed.models import WellposedConfig, WellposedForCausalLM

    text = torch.tensor(list(Path(__file__).read_bytes()), device=setup.device)

    def training(
        width: int, tokens: int, rate: float, bound: float | None, scale: float = 1.0, seed: int = 0
    ) -> tuple[Call, Constraint | None]:
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {
            "hidden_size": width,
            "num_attention_heads": width // 32,
            "norm": "pre",
        }
        config = WellposedConfig(vocab_size=128, max_position_embeddings=tokens, **sizes)
        model = WellposedForCausalLM(config).to(setup.device)
        with torch.no_grad():
            for role in find_roles(model).attention:
                role.query.tensor().mul_(scale)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        handle = constrain_(model, optimizer, to="logits", bound=bound) if bound else None

        def step() -> None:
            starts = torch.randint(0, len(text) - tokens, (8,)).tolist()
            ids = torch.stack([text[start : start + tokens] for start in starts])
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()

        return step, handle

    width, tokens = setup.size((256, 128), (32, 16))
    for bound, scale, where in (
        (1e4, 1.0, "no head near the bound"),
        (20.0, 64.0, "every head at it"),
    ):
        sides: dict[str, Call | Side] = {
            "free": training(width, tokens, 1e-4, None, scale)[0],
            "held": training(width, tokens, 1e-4, bound, scale)[0],
        }
        times = setup.interleave(sides, 15)
        shares = [h / f - 1 for f, h in zip(times["free"], times["held"], strict=True)]
        name = f"QK-clip, share of an AdamW step, 2 x {width}, {8 * tokens} tokens, {where}"
        yield row_of(name, shares)
    for rate in (1e-3, 3e-3, 1e-2):
        worst = 0.0
        for seed in range(setup.size(3, 1)):
            step, handle = training(64, 64, rate, 10.0, seed=seed)
            assert handle is not None
            for _ in range(setup.size(120, 4)):
                step()
                worst = max(worst, handle.error().worst)
        name = f"QK-clip, largest logit over the bound 10 in any batch of 3 runs, rate {rate:g}"
        yield single(name, 1 + worst)


def rows(setup: Setup) -> Iterator[Row]:
    torch.manual_seed(0)
    usual = [(512, 6), (256, 6)] if setup.device == "cpu" else [(1024, 24), (512, 48)]
    for width, count in setup.size(usual, [(16, 2)]):
        yield from cost_rows(setup, width, count)
    for width, count in setup.size(ADAMW, ((16, 2),)):
        yield from adamw_rows(setup, width, count)
    yield from drift_rows(setup)
    for blocks, width in setup.size(((64, 32), (16, 64), (2, 256)), ((1, 32),)):
        yield share_row(setup, blocks, width)
    yield from clip_rows(setup)


BENCHMARK = Benchmark(
    "constrain_ and other exact orthogonality over a matmul floor and torch's parametrisations; drift; share of a step",
    "<= 1.5 (|A| <= 0.1), <= 1.9 (0.3); >= 2 of torch's Cayley", 10, rows, ("cpu", "cuda"),
    goals=(
        Goal("constrain_, step 0.3 / matmul floor, d = [!2]*", "<= 1.9"),
        Goal("constrain_, step * / matmul floor, d = [!2]*", "<= 1.5"),
        Goal("torch cayley / constrain_*", ">= 2"),
        Goal("torch default / constrain_*", ">= 18"),
        Goal("constrain_, [sc][po]*", "<= 2"),
        Goal("to=spectral* / matmul floor, * d = 64,*", "<= 4"),
        Goal("to=spectral* / matmul floor,*", "<= 2.5", TWO_BENDS),
        Goal("worst max*", "<= 1e-5"),
        Goal("spectral constraint, share*", "<= 0.15", SQUARINGS),
        Goal("QK-clip, share*", "<= 0.02"),
        Goal("QK-clip, largest logit*", "<= 1.05"),
    ),
)  # fmt: skip
