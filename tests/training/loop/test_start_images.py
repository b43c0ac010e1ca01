"""A model of images that a run starts from: T-Fixup with embedded patches, and sizes that it cannot
read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.images import image_config

from wellposed.errors import ConfigError
from wellposed.tasks import Task, build_task
from wellposed.training import RunConfig
from wellposed.training.config import StartOptions
from wellposed.training.loop.build import build_start


@pytest.mark.parametrize("family", ["vit", "deit"])
def test_t_fixup_reads_the_norm_of_embedded_patches(family: str, tmp_path: Path) -> None:
    """v solves K (2 v^2 x^2 + v^4) = 1 with x the mean norm of the tokens that enter the first of
    K/2 layers."""
    layers, width = 3, 64
    config = image_config(
        tmp_path / family,
        family,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width,
    )
    task = build_task("image_classification", {"processor": f"config:{config}", "limit_train": 32})

    def started(init: str) -> torch.nn.Module:
        torch.manual_seed(0)
        options = StartOptions(str(config), init=init, from_scratch=True)  # type: ignore[arg-type]
        return build_start(RunConfig("image_classification", start=options), task).model

    plain, fixed = started("own"), started("t_fixup")
    x = _mean_norm_of_tokens(plain, task)
    assert _mean_norm_of_tokens(fixed, task) == pytest.approx(x, rel=1e-5)
    factor = math.sqrt(math.sqrt(x**4 + 1 / (2 * layers)) - x**2)
    before, after = dict(plain.named_parameters()), dict(fixed.named_parameters())
    assert not any("norm" in name for name in after)
    for name, weight in after.items():
        if "embeddings" in name:
            assert torch.equal(weight, before[name])
        elif name.endswith(("v_proj.weight", "o_proj.weight", "fc1.weight", "fc2.weight")):
            largest = (
                math.sqrt(6 / sum(weight.shape)) * factor
            )  # Xavier's uniform draw, of 4096 numbers
            assert 0.99 * largest < float(weight.detach().abs().max()) <= largest * (1 + 1e-5)


def test_t_fixup_refuses_a_model_without_patches(tmp_path: Path) -> None:
    transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]).save_pretrained(
        tmp_path
    )
    task = build_task("image_classification", {"limit_train": 32})
    options = StartOptions(str(tmp_path), init="t_fixup", from_scratch=True)
    with pytest.raises(
        ConfigError, match="ResNetForImageClassification: does not say what embeds its patches"
    ):
        build_start(RunConfig("image_classification", start=options), task)


def _mean_norm_of_tokens(model: torch.nn.Module, task: Task) -> float:
    entering: list[torch.Tensor] = []
    first = model.base_model.layers[0]
    hook = first.register_forward_pre_hook(lambda module, given: entering.append(given[0]))
    batch = task.collate(list(task.dataset("train")))
    with torch.no_grad():
        model(pixel_values=batch["pixel_values"])
    hook.remove()
    return float(entering[0].norm(dim=-1).mean())
