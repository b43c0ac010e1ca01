"""All that looking at a model may not change: its tensors, modes and hooks, generators, and torch's own state."""

import os
import random
import sys
import warnings

import numpy as np
import torch
from torch.nn.modules import module as modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_OWN = {"_parameters", "_buffers", "_modules", "training"}


def state_of(model):
    """Name -> value, of everything; values that are tensors are copies."""
    state = {f"torch: {name}": value for name, value in _of_torch().items()}
    for path, part in model.named_modules(remove_duplicate=False):
        state[f"{path}: kind"] = type(part)
        state[f"{path}: training"] = part.training
        for name, tensor in {**part._parameters, **part._buffers}.items():
            state |= {f"{path}.{name}: {key}": value for key, value in _of_tensor(tensor).items()}
        for name, tensor in part._parameters.items():
            is_table = getattr(part, "max_norm", None) is not None  # its lookups write
            state[f"{path}.{name}: version"] = None if is_table else getattr(tensor, "_version", 0)
        for name, value in vars(part).items():
            if name not in _OWN:
                same = list(map(id, value.values())) if isinstance(value, dict) else id(value)
                state[f"{path}: {name}"] = same
    return state


def changes(before, after):
    """Names of what differs."""
    names = before.keys() | after.keys()
    return sorted(name for name in names if not _same(before.get(name), after.get(name)))


def _same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def _of_tensor(tensor):
    if tensor is None:
        return {}
    grad = tensor.grad
    return {
        "identity": (id(tensor), tensor.data_ptr(), tensor.requires_grad, id(grad)),
        "value": tensor.detach().clone(),
        "gradient": None if grad is None else grad.clone(),
    }


def _of_torch():
    backends = torch.backends
    return {
        "generator": torch.get_rng_state(),
        "numpy": str(np.random.get_state()),
        "random": random.getstate(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": (torch.get_float32_matmul_precision(), backends.mkldnn.matmul.fp32_precision),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "attention": (
            backends.mha.get_fastpath_enabled(),
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
        "modes": (len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack())),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "stance": str(torch.compiler.config.__dict__.get("stance"))
        + str(torch._dynamo.eval_frame._stance),
        "hooks of all modules": [
            list(table)
            for name, table in sorted(vars(modules).items())
            if name.startswith("_global_") and isinstance(table, dict)
        ],
        "warnings": (list(warnings.filters), id(warnings.showwarning)),
        "environment": dict(os.environ),
        "handlers": (id(sys.stdout), id(sys.excepthook)),
    }
