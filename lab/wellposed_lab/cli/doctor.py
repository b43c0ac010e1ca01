"""``wellposed doctor``: is this installation sound."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from wellposed.errors import EXTRAS, ConfigError
from wellposed.version import __version__

USAGE = """usage: wellposed doctor

Print versions and devices, then check the mathematics on this machine (a few seconds)."""


def run(words: Sequence[str]) -> int:
    """Print what was found and return 0 if every check passed, else 1."""
    if words:
        if not set(words) <= {"-h", "--help", "--help-all"}:
            raise ConfigError(
                f"doctor: takes no options, received {shlex.join(words)}; leave it out"
            )
        print(USAGE)
        return 0
    print(f"wellposed        {__version__}")
    print(f"python           {platform.python_version()} on {platform.platform()}")
    for extra, packages in {"": ("torch",), **EXTRAS}.items():
        missing = f"not installed (pip install 'wellposed[{extra}]')" if extra else "not installed"
        for package in packages:
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                version = missing
            print(f"{package:<16} {version}")

    import torch

    print(f"threads          {torch.get_num_threads()}")
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    print(f"accelerators     {', '.join(devices) or 'none'}")
    failures = 0
    for name, check in CHECKS.items():
        try:
            sound, found = check()
            if not sound:
                raise ArithmeticError(found)
            print(f"ok      {name}: {found}")
        except Exception as error:  # a broken installation may fail in any way
            if isinstance(error.__cause__ or error, ModuleNotFoundError):
                print(f"skipped {name}: {error}")
                continue
            failures += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", file=sys.stderr)
    return 1 if failures else 0


def _check_penalty() -> tuple[bool, str]:
    import torch

    from wellposed.functional import gram_penalty

    weight = torch.randn(48, 16)
    exact = weight.double()
    expected = float((exact.T @ exact - torch.eye(16)).square().sum())
    error = abs(float(gram_penalty(weight)) / expected - 1)
    return error <= 1e-5, f"relative error {error:.1e}, at most 1e-5 expected"


def _small_model() -> Any:
    from wellposed.models import build_model

    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return build_model("wellposed", "causal_lm", **sizes)


def _check_training() -> tuple[bool, str]:
    import torch

    torch.manual_seed(0)
    model = _small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(44).reshape(2, 22) % 11
    losses: list[float] = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    said = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in 30 steps, a fall of 30 % expected"
    return losses[-1] <= 0.7 * losses[0], said


def _check_measurement() -> tuple[bool, str]:
    import torch

    from wellposed.measurement import measure

    rows = measure(model := _small_model()).rows
    found = next(row for row in rows if row["role"] == "query")["sigma_max"]
    weight = model.get_submodule("model.layers.0.attention.q_proj").weight.detach()
    expected = float(torch.linalg.matrix_norm(weight.double(), 2))
    said = f"largest singular value of the query {found:.6f}, SVD {expected:.6f}"
    return abs(found - expected) <= 1e-3 * expected, f"{len(rows)} weights, {said}"


CHECKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "penalty against its formula in float64": _check_penalty,
    "a small model learns": _check_training,
    "measurement against the SVD": _check_measurement,
}
