"""Hooks of a model and its optimizer, and what torch keeps for the whole process, as values to compare."""

import torch
from torch import backends
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def hooks_of(model, optimizer=None):
    """(path, table of hooks) -> number of hooks, of every table that is not empty."""
    owners = {path: vars(part) for path, part in model.named_modules()}
    owners |= {f"{name} (weight)": _of_weight(weight) for name, weight in model.named_parameters()}
    owners |= {} if optimizer is None else {"optimizer": vars(optimizer)}
    owners["all modules"] = {
        name: value for name, value in vars(modules).items() if name.startswith("_global_")
    }
    tables = (
        (path, name, value) for path, table in owners.items() for name, value in table.items()
    )
    return {
        (path, name): len(value)
        for path, name, value in tables
        if "hook" in name and isinstance(value, dict) and value
    }


def _of_weight(weight):
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return {name: getattr(weight, name, None) for name in names}


def torch_state():
    """The stance of the compiler and the modes of this thread."""
    return {
        "stance": str(torch._dynamo.eval_frame._stance),
        "function modes": len(_get_current_function_mode_stack()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
        "precision": [part.matmul.fp32_precision for part in (backends.cuda, backends.mkldnn)],
        "autocast": torch.is_autocast_enabled("cpu"),
        "checkpoints": {
            name: id(value) for name, value in vars(checkpoint).items() if callable(value)
        },
    }
