#!/usr/bin/env bash
# Guess: DeepSpeed's ZeRO-1 and 2 cut the optimizer's state and the gradients alone; the weights are the module's own,
# so what a script writes into one (a constraint, a clip, an average, an edited row) is what the next step starts from.
# Fact: the optimizer steps a private copy, and each step overwrites the module's weights with it. A weight that is
# written between steps lasts until the next step; one that a hook of the optimizer writes is gone before `engine.step()`
# returns. Nothing is said. Stage 0 keeps both. The optimizer that `initialize` returns has no hooks to register.
# Bites: weight clipping and projections, hand-made averages of weights, embedding rows that are reset, pruning masks.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet torch==2.13.0 numpy==2.4.6 setuptools wheel
DS_BUILD_OPS=0 "$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-build-isolation \
  deepspeed==0.19.8

PATH="$folder/venv/bin:$PATH" TORCH_EXTENSIONS_DIR="$folder/extensions" "$folder/venv/bin/python" - <<'PYTHON'
import logging
import os

alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {**alone, "DS_ACCELERATOR": "cpu"}
logging.disable(logging.WARNING)
import deepspeed
import torch
from torch import nn

deepspeed.init_distributed("gloo")
print("torch", torch.__version__, "deepspeed", deepspeed.__version__)


def after_second_step(stage, how):
    """Write 5 into every entry of a weight, twice; return whether it is 5 after the second step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    calls = []

    def write(*_):
        calls.append(how)
        with torch.no_grad():
            model.weight.fill_(5.0)

    if how == "by a hook":
        optimizer.register_step_post_hook(write)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 3)).square().mean())
        engine.step()
        lasts = bool((model.weight == 5.0).all())
        if how == "between steps":
            write()
    assert len(calls) == 2, "the hook ran"
    assert hasattr(wrapped, "register_step_post_hook") == (stage == 0)
    return lasts


for stage in (0, 1, 2):
    for how in ("between steps", "by a hook"):
        lasts = after_second_step(stage, how)
        print(f"stage {stage}, written {how} (rate 0): there after the next step {lasts}")
        assert lasts == (stage == 0)
PYTHON
