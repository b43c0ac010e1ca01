"""One rank of DeepSpeed on the CPU: trains under a ZeRO stage, writes what each verb did."""

import json
import os
import sys
from pathlib import Path

import torch
from tests.support.deepspeed_verbs import BATCHES, LOSSES, MADE, encoder, sgd


def config(stage):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def outcome(verb, rank, stage, *, is_after):
    """Return the trained weights of a verb that is made before or after the engine, or its error."""
    import deepspeed

    model = encoder()
    optimizer = sgd(model)
    made = None if is_after else MADE[verb](model, optimizer)
    engine, wrapped, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(stage)
    )
    made = MADE[verb](engine.module, wrapped) if is_after else made
    for batch in BATCHES:
        own_part = batch[2 * rank : 2 * rank + 2]
        engine.backward(LOSSES[verb](engine, own_part, made))
        engine.step()
    return [weight.detach().flatten().tolist() for weight in engine.module.parameters()]


def outcomes(rank, stage):
    results = {}
    for verb in MADE:
        for is_after in (False, True):
            name = f"{verb}, {'after' if is_after else 'before'}"
            try:
                results[name] = outcome(verb, rank, stage, is_after=is_after)
            except Exception as error:
                results[name] = str(error)
    return results


if __name__ == "__main__":
    rank, stage, port, out = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    written = outcomes(int(rank), int(stage))
    if rank == "0":
        Path(out).write_text(json.dumps(written), encoding="utf-8")
