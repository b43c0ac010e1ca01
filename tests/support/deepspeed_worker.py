"""One rank of DeepSpeed on the CPU: trains under a ZeRO stage, writes what each verb did."""

import json
import os
import sys
from pathlib import Path

rank, stage, port, out = sys.argv[1:]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}

import deepspeed  # noqa: E402
import torch  # noqa: E402
from tests.support.deepspeed_verbs import BATCHES, LOSSES, MADE, encoder, sgd  # noqa: E402

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": int(stage)},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
torch.set_num_threads(1)
deepspeed.init_distributed("gloo")


def outcome(verb, is_after):
    """Return the trained weights of a verb that is made before or after the engine, or its error."""
    model = encoder()
    optimizer = sgd(model)
    made = None if is_after else MADE[verb](model, optimizer)
    engine, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    made = MADE[verb](engine.module, wrapped) if is_after else made
    for batch in BATCHES:
        own_part = batch[2 * int(rank) : 2 * int(rank) + 2]
        engine.backward(LOSSES[verb](engine, own_part, made))
        engine.step()
    return [weight.detach().flatten().tolist() for weight in engine.module.parameters()]


results = {}
for verb in MADE:
    for is_after in (False, True):
        try:
            results[f"{verb}, {'after' if is_after else 'before'}"] = outcome(verb, is_after)
        except Exception as error:
            results[f"{verb}, {'after' if is_after else 'before'}"] = str(error)
if rank == "0":
    Path(out).write_text(json.dumps(results), encoding="utf-8")
