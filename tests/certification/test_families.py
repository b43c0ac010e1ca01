"""Every family of torch: its rows, their balls, and the support table."""

import math
import re
from pathlib import Path

import pytest
import torch
from tests.support.families import table
from torch import Tensor, nn

from tests.support import families
from wellposed.certification import certify

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def test_the_table_of_the_documentation_is_what_certify_answers():
    assert table() in PAGE.read_text("utf-8"), (
        "replace the table of docs/families.md by tests.support.families.table()"
    )


def test_the_reason_quoted_is_the_one_printed(capsys):
    page = PAGE.read_text("utf-8")
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    quoted = " ".join(
        line.removeprefix("> ") for line in page.splitlines() if line.startswith("> ")
    )
    assert capsys.readouterr().out.strip() == quoted


R = 0.05


def inside(rows, path):
    return [row for row in rows if row.path.startswith(f"{path}.")]


def of_a_layer(parts):
    """Two residual sublayers with a norm each: before the branch, or after the sum."""
    bounds = [part.lipschitz for part in parts]
    is_pre = "Norm" in parts[0].module
    if is_pre:
        first, attention, second, *forward = bounds
        return (1 + first * attention) * (1 + second * math.prod(forward))
    attention, first, *forward, second = bounds
    return (1 + attention) * first * (1 + math.prod(forward)) * second


@pytest.mark.parametrize("norm", ["tok", "inf"])
@pytest.mark.parametrize(
    ("name", "model"), [pytest.param(case[1], case[2], id=case[1]) for case in families.models()]
)
def test_rows_multiply_up(name, model, norm):
    certificate = certify(model.eval(), seq_len=3, norm=norm, radius=R, cross_check=False)
    rows = certificate.layers
    layers = [
        row
        for row in rows
        if row.module.endswith(("Layer", "Block")) and len(inside(rows, row.path)) >= 5
    ]
    assert layers or isinstance(model, nn.MultiheadAttention)
    for layer in layers:
        product = of_a_layer(inside(rows, layer.path))
        assert layer.lipschitz <= product * (1 + 1e-6), layer.path
        if norm == "inf":
            assert layer.lipschitz == pytest.approx(product, rel=1e-6), layer.path
        assert inside(rows, layer.path)[0].radius == layer.radius
    heads = [row.path for row in rows]
    expected = math.prod(
        row.lipschitz for row in rows if not any(row.path.startswith(f"{path}.") for path in heads)
    )
    assert certificate.total == pytest.approx(expected, rel=1e-6), name


BALL = 0.8


def tokens_seen(model, paths, run):
    """Return the largest 2-norm of a token that enters each part."""
    largest = {}
    hooks = []
    for path in paths:

        def note(_module, args, kwargs, path=path):
            x = next(
                value
                for value in [kwargs.get("hidden_states"), *args, *kwargs.values()]
                if isinstance(value, Tensor)
            )
            size = float(x.detach().double().norm(dim=-1).max())
            largest[path] = max(largest.get(path, 0.0), size)

        hooks.append(model.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return largest


def run(model, x):
    if isinstance(model, nn.MultiheadAttention):
        return lambda: model(x, x, x)
    return lambda: model(src=x)


@pytest.mark.parametrize("model", [pytest.param(case[2], id=case[1]) for case in families.models()])
def test_every_token_that_enters_a_part_lies_in_its_ball(model):
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights, positions and biases that are large enough to matter.
            parameter.add_(
                torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 or "bias" in name else 0.1)
            )
    rows = [
        row
        for row in certify(model, seq_len=5, radius=BALL, cross_check=False).layers
        if row.module != "pool"
    ]
    paths = {name for name, _ in model.named_modules()} - {""}
    rows = [row for row in rows if row.path in paths]
    x = torch.randn(64, 5, families.WIDTH, dtype=torch.float64)
    largest = tokens_seen(
        model, [row.path for row in rows], run(model, BALL * x / x.norm(dim=-1, keepdim=True))
    )
    for row in rows:
        if row.path in largest:
            assert largest[row.path] <= row.radius * (1 + 1e-6), row.path
    assert len(largest) >= len(rows) - 2
