"""The balls of a model's rows hold the tokens that really enter its parts, and the first is known
to the digit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support import families
from torch import Tensor, nn

from wellposed.certification import certify, patch_grid

R = 0.8
MODELS = [
    pytest.param(case[2], id=case[1]) for case in families.models() if "Conditional" not in case[1]
]
MODELS = [param for param in MODELS if param.id != "MarianMTModel"]


def tokens_seen(model: nn.Module, paths: list[str], run: Callable[[], object]) -> dict[str, float]:
    """The largest 2-norm of a token that enters each part."""
    largest: dict[str, float] = {}
    hooks = []
    for path in paths:

        def note(_module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            x = next(
                value
                for value in [kwargs.get("hidden_states"), *args, *kwargs.values()]
                if isinstance(value, Tensor)
            )
            if x.ndim < 4:  # images are no tokens yet
                largest[path] = max(
                    largest.get(path, 0.0), float(x.detach().double().norm(dim=-1).max())
                )

        hooks.append(model.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return largest


def run(model: nn.Module, x: Tensor) -> Callable[[], object]:
    grid = patch_grid(model)
    if grid is not None:
        return lambda: model(pixel_values=grid.image(x))
    if isinstance(model, nn.MultiheadAttention):
        return lambda: model(x, x, x)
    return (
        (lambda: model(inputs_embeds=x))
        if hasattr(model, "get_input_embeddings")
        else (lambda: model(x))
    )


@pytest.mark.parametrize("model", MODELS)
def test_every_token_that_enters_a_part_lies_in_its_ball(model: nn.Module) -> None:
    torch.manual_seed(0)
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights, positions and biases of a size that shows.
            parameter.add_(
                torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 or "bias" in name else 0.1)
            )
    grid = patch_grid(model)
    width = families.WIDTH if grid is None else grid.size
    tokens = 5 if grid is None else grid.tokens
    rows = [
        row
        for row in certify(model, seq_len=tokens, radius=R, cross_check=False).layers
        if row.module != "pool"
    ]
    paths = {name for name, _ in model.named_modules()} - {""}
    rows = [row for row in rows if row.path in paths and "patch_embeddings" not in row.path]
    x = torch.randn(64, tokens, width, dtype=torch.float64)
    seen = tokens_seen(
        model, [row.path for row in rows], run(model, R * x / x.norm(dim=-1, keepdim=True))
    )
    for row in rows:
        if row.path in seen:
            assert seen[row.path] <= row.radius * (1 + 1e-6), row.path
    assert len(seen) >= len(rows) - 2


TABLES = {
    "BertModel": ("embeddings.position_embeddings", "embeddings.token_type_embeddings"),
    "RobertaModel": ("embeddings.position_embeddings", "embeddings.token_type_embeddings"),
    "DistilBertModel": ("embeddings.position_embeddings",),
    "GPT2Model": ("wpe", "wte"),
    "BartEncoder": ("embed_positions",),
    "MarianEncoder": ("embed_positions",),
    "LlamaModel": (),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_first_ball_has_room_for_the_longest_row_of_every_table(name: str) -> None:
    model = {case[1]: case[2] for case in families.models()}[name].double().eval()
    room = R
    with torch.no_grad():
        for place, path in enumerate(TABLES[name]):
            table = model.get_submodule(path).weight
            table.mul_(0.01)
            table[place] = 0.0
            table[place, 0] = 0.3 + place
            room += 0.3 + place
    first = certify(model, seq_len=5, radius=R, cross_check=False).layers[0]
    assert first.radius == pytest.approx(room, rel=1e-6)


def test_the_class_token_of_a_vision_model_stands_in_the_ball_as_well() -> None:
    model = {case[1]: case[2] for case in families.models()}["ViTModel"].double().eval()
    embeddings = model.embeddings
    cut = embeddings.patch_embeddings.projection
    with torch.no_grad():
        for parameter in (
            embeddings.cls_token,
            embeddings.position_embeddings,
            cut.weight,
            cut.bias,
        ):
            parameter.zero_()
        cut.weight.flatten(1)[0, 0] = 2.0
        cut.bias[1] = 0.5
        embeddings.position_embeddings[0, 3, 2] = 0.25
        embeddings.position_embeddings[0, 0, 2] = 0.25

        def first_ball() -> float:
            rows = certify(model, seq_len=4, radius=R, cross_check=False).layers
            return next(row.radius for row in rows if row.path == "layers.0")

        assert first_ball() == pytest.approx(2 * R + 0.5 + 0.25, rel=1e-5)
        embeddings.cls_token[0, 0, 2] = 9.0
        assert first_ball() == pytest.approx(9.25, rel=1e-9)
        embeddings.cls_token[0, 0, 2] = -9.0
        assert first_ball() == pytest.approx(8.75, rel=1e-9)
    grid = patch_grid(model)
    assert grid is not None
    rows = certify(model, seq_len=4, norm=2, radius=R, cross_check=False).layers
    patches = next(row for row in rows if row.path == "embeddings.patch_embeddings")
    assert patches.lipschitz == pytest.approx(2.0, rel=1e-5)
    assert math.isfinite(patches.radius)
