"""Attach in one line, train, save, load, detach: the whole promise, on every family that roles are
found in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.zoo import ZOO
from torch import nn
from transformers import PreTrainedModel

from wellposed.penalize import OrthogonalityPenalty
from wellposed.roles import find_roles

# Affinities on their own: pulled to identity they ask for longer queries and keys than orthonormal
# weights give.
TOGETHER = {
    "affinity": ("affinity",),
    "zhang2021 weights": ("attention", "feedforward"),
    "mcgrath2024": ("query", "key", "value", "embedding"),
}


QUICK = ("bert", "gpt2", "llama", "t5", "torch encoder")
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]


def everything_on(model: nn.Module) -> dict[str, object]:
    """Every attribute and hook of every module by path; modules and tensors by identity, hook
    tables by content."""
    names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    found: dict[str, object] = {"": names}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            is_hook_table = isinstance(value, dict) and "hooks" in name
            shown = list(value) if is_hook_table else id(value)
            found[f"{path}:{name}"] = (type(module), shown)
    return found


def strengths_for(model: nn.Module, names: tuple[str, ...]) -> dict[str, float]:
    tables = any(role.kind == "token" for role in find_roles(model).embeddings)
    return {name: 1.0 for name in names if name != "embedding" or tables}


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("family", FAMILIES)
def test_attach_train_save_load_and_detach(
    family: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    entry = ZOO[family]
    model = entry.build().train()
    before = everything_on(model)
    given = strengths_for(model, names)
    penalty = OrthogonalityPenalty(model, **given, form="gram_squared")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history: list[dict[str, float]] = []
    for _ in range(20):
        torch.manual_seed(1)  # the same tokens and dropout at each step, so that affinities compare
        loss = entry.run(model).square().mean() + penalty()
        history.append(penalty.terms())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert {name.split(".")[0] for name in history[0]} == set(given)
    assert [name for name, value in history[0].items() if not history[-1][name] < value] == []

    if isinstance(model, PreTrainedModel):
        model.save_pretrained(tmp_path)
        fresh = type(model).from_pretrained(tmp_path).eval()
    else:
        torch.save(model.state_dict(), tmp_path / "model.pt")
        fresh = entry.build().eval()
        fresh.load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)

    penalty.remove()
    for parameter in model.parameters():
        parameter.grad = None
    assert everything_on(model) == before
    outputs = []
    # After removal: torch's own layers take another kernel while they have hooks.
    for one in (model.eval(), fresh):
        torch.manual_seed(2)
        with torch.no_grad():
            outputs.append(entry.run(one))
    assert torch.equal(*outputs)
