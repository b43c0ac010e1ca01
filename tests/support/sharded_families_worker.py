"""Constrains and penalises models of every family after `fully_shard` and in one process, and writes how
far the two are apart as JSON.

Run by test_sharded_families.py: ``python -m tests.support.sharded_families_worker OUT PROCESSES``.
"""

import copy
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from tests.support.zoo import PLAIN, SPECIAL, ZOO, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from wellposed import OrthogonalityPenalty
from wellposed.constrain import constrain_
from wellposed.errors import ConvergenceError, WellposedError

STEPS = 3
GROUPED = {"num_key_value_heads": 2, **PLAIN, **SPECIAL}
SETS = {
    "orthogonal": {"where": ("query", "value")},
    "orthogonal, fitted": {"where": "layers", "gain": "fit"},
    "spectral": {"to": "spectral", "bound": 0.1},
    "columns": {"to": "columns", "where": ("key", "feedforward_in"), "bound": 0.5},
    "orthogonal, bfloat16": {"where": ("query", "feedforward_out"), "gain": 0.5},
}
PENALTIES = {
    "attention": {"attention": 1e-1},
    "feedforward": {"feedforward": 1e-1},
    "one by one": {"attention": 1e-1, "attention_mode": "separate"},
    "rows": {"query": 1e-1, "value": 1e-1},
    "qr": {"key": 1e-1, "form": "qr"},
}


WITH_PARTS = ("phi3", "mixtral", "gpt oss", "torch encoder")
"""Families with fused weights or experts, which every set and penalty is tried on."""
OF_WHOLE_WEIGHTS = ("orthogonal, fitted", "spectral", "one by one", "qr")


def rows_of(name):
    return (*SETS, *PENALTIES) if name in WITH_PARTS else OF_WHOLE_WEIGHTS


def experts(kind, **sizes):
    config = getattr(hf, f"{kind}Config")(num_local_experts=3, **GROUPED, **sizes)
    config._experts_implementation = "eager"  # the other has no float64
    return lambda: getattr(hf, f"{kind}Model")(copy.deepcopy(config))


BUILDERS = {name: entry.build for name, entry in ZOO.items()}
BUILDERS["mixtral"] = experts("Mixtral")
BUILDERS["gpt oss"] = experts("GptOss", head_dim=4, num_experts_per_tok=2)


def built(name):
    torch.manual_seed(0)
    model = BUILDERS[name]().double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def shard(model):
    for part in reversed(list(model.modules())):
        if isinstance(part, nn.ModuleList):
            for layer in part:
                fully_shard(layer)
    return fully_shard(model)


def loss_of(name, model):
    torch.manual_seed(1)
    run = ZOO[name].run if name in ZOO else tokens
    return run(model).square().mean()


def gathered(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def copied(model):
    return {name: gathered(value.detach()).clone() for name, value in model.named_parameters()}


def stepped(name, model, options):
    optimizer = torch.optim.SGD(
        model.parameters(), lr=5e-2, momentum=0.9, weight_decay=0.01, foreach=False
    )
    handle = constrain_(model, optimizer, **options)
    counts = {}
    start = copied(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(name, model).backward()
        with CommDebugMode() as counted:
            optimizer.step()
        counts = {str(op).split(".")[-1]: n for op, n in counted.get_comm_counts().items()}
    errors = handle.error().by_path
    weights = copied(model)
    paths = [weight.path for weight in handle.weights]
    moved = max(float((weights[name] - value).abs().max()) for name, value in start.items())
    result = {
        "paths": paths,
        "errors": errors,
        "weights": weights,
        "counts": counts,
        "moved": moved,
    }
    result["restored"] = restored(model, optimizer, handle)
    handle.remove()
    return result


def restored(model, optimizer, handle):
    """The faults after a step that is not finite on the last rank; it must be named and undone."""
    parts = {weight.path: weight.stepped() for weight in handle.weights}
    before = {path: [part.clone() for part in some] for path, some in parts.items()}
    constrained = {weight.parameter for weight in handle.weights}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in constrained)
        parameter.grad = parameter.grad if parameter in constrained else None
        local = getattr(parameter.grad, "_local_tensor", parameter.grad)
        if local is not None and dist.get_rank() == dist.get_world_size() - 1:
            local.fill_(float("nan"))
    try:
        optimizer.step()
        line = "no error"
    except ConvergenceError as error:
        line = str(error)
    if "not finite" not in line:
        return line
    named = [path for path in parts if f" {path}: " in line]
    alike = {path: all(map(torch.equal, before[path], parts[path])) for path in named}
    broken = [path for path, some in parts.items() if not all(p.isfinite().all() for p in some)]
    return "" if named and all(alike.values()) and not broken else f"{alike} {broken}"


def penalised(name, model, options):
    penalty = OrthogonalityPenalty(model, **options)
    model.zero_grad()
    value = loss_of(name, model) + penalty()
    value.backward()
    terms = penalty.terms()
    penalty.remove()
    pairs = model.named_parameters()
    gradients = {name: gathered(p.grad) for name, p in pairs if p.grad is not None}
    result = {"paths": [*terms], "errors": terms, "weights": gradients, "counts": {}}
    return result | {"moved": 1.0, "restored": ""}


def farthest(first, second):
    if first.keys() != second.keys():
        return f"names differ: {sorted(first.keys() ^ second.keys())[:4]}"
    return max(
        float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max().float())
        for a, b in ((first[name], second[name]) for name in first)
    )


def compared(name, verb, kind, options):
    """Return how far the sharded model's numbers are from those of one process, or the refusal."""
    plain = built(name)
    if "bfloat16" in kind:
        plain.bfloat16()
    try:
        alone = verb(name, copy.deepcopy(plain), options)
    except WellposedError as error:
        alone = f"{type(error).__name__}: {error}"
    try:
        many = verb(name, shard(plain), options)
    except WellposedError as error:
        many = f"{type(error).__name__}: {error}"
    if isinstance(alone, str) or isinstance(many, str):
        return {"alone": str(alone)[:300], "many": str(many)[:300]}
    return {
        "held": len(many["paths"]),
        "moved": many["moved"],
        "restored": many["restored"],
        "missing": [path for path in alone["paths"] if path not in many["paths"]],
        "weights": farthest(alone["weights"], many["weights"]),
        "errors": farthest(alone["errors"], many["errors"]),
        "counts": many["counts"],
    }


def work(rank, folder, world, names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    results = {}
    for name in names or BUILDERS:
        for kind in rows_of(name):
            verb, options = (stepped, SETS[kind]) if kind in SETS else (penalised, PENALTIES[kind])
            results[f"{name}, {kind}"] = compared(name, verb, kind, options)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, world, *names = sys.argv[1:]
    arguments = folder, int(world), names
    torch.multiprocessing.spawn(work, args=arguments, nprocs=int(world))
