"""Whole random weights in place of FSDP2 shards, so that one rank alone can run a pass."""

from __future__ import annotations

import math
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from wellposed.hooks import is_fsdp_module, is_of_fsdp
from wellposed.interrupts import Undo, undoing
from wellposed.linalg import is_sharded

_SHARE = 0.5
"""Largest part of a device's memory that whole weights may take."""
_REMEDY = "or name the weights with where="


@dataclass(frozen=True)
class _Shard:
    """A sharded parameter where a module stores it, and the type of the whole one."""

    module: nn.Module
    name: str
    tensor: Any
    dtype: torch.dtype
    is_known: bool
    """Whether FSDP2 alone cut it, or expert parallelism between the experts of a stack."""

    @property
    def is_plain(self) -> bool:
        """Whether the shards hold plain numbers, neither quantised nor packed."""
        with torch.no_grad():
            is_tensor = type(self.tensor.to_local()) in (Tensor, nn.Parameter)
        return is_tensor and self.dtype.is_floating_point and self.dtype.itemsize > 1

    @property
    def nbytes(self) -> int:
        """Size of the whole weight."""
        return math.prod(self.tensor.shape) * self.dtype.itemsize


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Put random weights of the whole shape in place of FSDP2 shards, and take off its hooks.

    Which weight reaches what is a matter of code, not of values, so nothing is gathered: a pass in
    the block has no collective. The values are equal on all ranks; the global random state does not
    change. Weights, hooks and methods are back afterwards, the same objects. Nothing happens if
    `stand_in_problem` names a problem, or if no weight is sharded.

    Cost: memory of the whole weights, in the dtype in which FSDP2 gathers them.
    """
    if not _is_cut(model) or stand_in_problem(model):
        yield
        return
    with undoing() as undo:
        for module in [*model.modules()]:
            _take_hooks_off(module, undo)
        _replace([*_shards(model)], undo)
        yield


def _is_cut(model: nn.Module) -> bool:
    """Return whether `fully_shard` was applied in a model, or a weight is in shards."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    for module in model.modules():
        weights = [weight for weight in module._parameters.values() if weight is not None]
        if is_fsdp_module(module) or any(map(is_sharded, weights)):
            return True
    return False


def stand_in_problem(model: nn.Module) -> str:
    """Return why shards cannot be replaced by whole weights, and the remedy; "" if they can be.

    The answer follows from sizes and kinds alone, so it is the same on every rank.
    """
    shards = [*_shards(model)]
    if any(shard.tensor.is_meta for shard in shards):
        return f"shards are on the meta device; load the weights first, {_REMEDY}"

    names = _names(model, [shard for shard in shards if not shard.is_known])
    if names:
        why = "not cut by FSDP2 alone, as under tensor parallelism"
        return f"{names} {why}; call find_roles before the model is cut, {_REMEDY}"

    names = _names(model, [shard for shard in shards if not shard.is_plain])
    if names:
        return f"{names} quantised or packed; call find_roles before that, {_REMEDY}"
    if not shards:
        return ""

    device = _device_of(shards[0])
    size = sum(shard.nbytes for shard in _distinct(shards))
    memory = _memory(device)
    if size <= _SHARE * memory:
        return ""

    return (
        f"the whole weights take {size / 1e9:.1f} GB, more than half of the {memory / 1e9:.1f} GB of"
        f" {device}; call find_roles before fully_shard, {_REMEDY}"
    )


def _shards(model: nn.Module) -> Iterator[_Shard]:
    """Yield every sharded parameter under each of its names."""
    around: dict[str, Any] = {}
    """Path of a module -> the state of the FSDP2 module that it is or lies in, if that is seen."""
    for path, module in model.named_modules():
        outer = around.get(path.rpartition(".")[0])
        state = _state(module) if is_fsdp_module(module) else outer
        around[path] = state
        for name, tensor in module._parameters.items():
            if tensor is None or not is_sharded(tensor):
                continue
            policy = None if state is None else state._mp_policy.param_dtype
            dtype = policy if policy and tensor.dtype.is_floating_point else tensor.dtype
            is_known = _is_managed(module, name, state) or _is_cut_between_experts(module, tensor)
            yield _Shard(module, name, tensor, dtype, is_known and _is_cut_once(tensor))


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def _is_managed(module: nn.Module, name: str, state: Any) -> bool:
    """Return whether FSDP2 cut a parameter, and nobody before."""
    if state is None:  # the module that was sharded lies outside the model
        return getattr(module, "_is_fsdp_managed_module", False) is True
    for group in _groups(state):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            owners = (info.module, *info.shared_modules)
            names = (info.param_name, *info.shared_param_names)
            if any(m is module and n == name for m, n in zip(owners, names, strict=True)):
                return not parameter.is_dtensor
    return False


def _groups(state: Any) -> Sequence[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:  # torch < 2.12
        several = [state._fsdp_param_group]
    return [group for group in several if group is not None]


def _is_cut_once(tensor: Any) -> bool:
    """Return whether a tensor is cut over one dimension of its mesh at most, in equal pieces."""
    kinds = [type(part).__name__ for part in tensor.placements if not part.is_replicate()]
    return kinds in ([], ["Shard"])


def _is_cut_between_experts(module: nn.Module, tensor: Any) -> bool:
    """Return whether a stack is cut along its first axis, in a module whose code reads it as it is.

    With hooks, as `parallelize_module` puts them on, a whole weight may not be what the code reads.
    """
    has_hooks = module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)
    return tensor.ndim == 3 and tensor.placements[0].is_shard(0) and not has_hooks


def _distinct(shards: Sequence[_Shard]) -> list[_Shard]:
    return [*{id(shard.tensor): shard for shard in shards}.values()]


def _names(model: nn.Module, shards: Sequence[_Shard]) -> str:
    """Return names as the subject of a sentence: one, and the number of others."""
    if not shards:
        return ""
    paths = {module: path for path, module in model.named_modules()}
    first = f"{paths[shards[0].module]}.{shards[0].name}".lstrip(".")
    others = len(shards) - 1
    return f"{first} is" if not others else f"{first} and {others} other weights are"


def _device_of(shard: _Shard) -> torch.device:
    """Return where FSDP2 gathers a weight; shards themselves may be offloaded to the CPU."""
    kind: str = shard.tensor.device_mesh.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _memory(device: torch.device) -> int:
    """Return the bytes of a device; on a CPU the share of a process in the machine's memory."""
    if device.type != "cpu":
        return torch.get_device_module(device).get_device_properties(device).total_memory
    here = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    processes = int(here) if here.isdecimal() else torch.distributed.get_world_size()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(processes, 1)


def _replace(shards: Sequence[_Shard], undo: Undo) -> None:
    """Draw a whole weight for each shard; a shard with several names gets one."""
    drawn: dict[int, nn.Parameter] = {}
    generators: dict[torch.device, torch.Generator] = {}
    for shard in shards:
        key = id(shard.tensor)
        if key not in drawn:
            device = _device_of(shard)
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(0)
            drawn[key] = _drawn(shard, device, generators[device])
        undo.later(_set_parameter, shard.module, shard.name, shard.tensor)
        _set_parameter(shard.module, shard.name, drawn[key])


@torch.inference_mode(False)
@torch.no_grad()
def _drawn(shard: _Shard, device: torch.device, generator: torch.Generator) -> nn.Parameter:
    shape = shard.tensor.shape
    values = torch.empty(shape, dtype=shard.dtype, device=device)
    if shard.name == "bias":
        values.normal_(std=0.1, generator=generator)  # large ones would saturate activations
    elif values.ndim < 2:
        values.uniform_(0.5, 1.5, generator=generator)  # a gate that is zero would hide its weight
    else:
        fan_in = shape[-1] if values.ndim < 4 else math.prod(shape[1:])
        values.normal_(std=max(fan_in, 1) ** -0.5, generator=generator)
    return nn.Parameter(values, requires_grad=shard.tensor.requires_grad)


def _set_parameter(module: nn.Module, name: str, tensor: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = tensor
    else:  # `torch.nn.LSTM` has a list of its weights beside their names
        setattr(module, name, tensor)


def _take_hooks_off(module: nn.Module, undo: Undo) -> None:
    """Leave only the casts of FSDP2's hooks, and the originals of its methods."""
    attributes = vars(module)
    casts = _casts(module)
    for table, cast in casts.items():
        hooks = attributes[table]
        remaining: OrderedDict[int, Any] = OrderedDict()
        for number, hook in hooks.items():
            if not is_of_fsdp(hook):
                remaining[number] = hook
            elif cast is not None:
                remaining[number] = cast
        if any(map(is_of_fsdp, hooks.values())):
            undo.later(attributes.__setitem__, table, hooks)
            attributes[table] = remaining

    for name, value in [*attributes.items()]:
        if is_of_fsdp(value):  # of `register_fsdp_forward_method`
            undo.later(attributes.__setitem__, name, value)
            attributes[name] = value.__wrapped__


def _casts(module: nn.Module) -> dict[str, Any]:
    """Return the hooks that cast inputs and outputs as the module's policy says."""
    casts: dict[str, Any] = {"_forward_pre_hooks": None, "_forward_hooks": None}
    policy = _state(module)._mp_policy if is_fsdp_module(module) else None
    if policy is not None and policy.cast_forward_inputs and policy.param_dtype:
        casts["_forward_pre_hooks"] = partial(_cast_inputs, policy.param_dtype)
    if policy is not None and policy.output_dtype:
        casts["_forward_hooks"] = partial(_cast_output, policy.output_dtype)
    return casts


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, partial(_cast, dtype), (args, kwargs))


def _cast_output(dtype: torch.dtype, _: nn.Module, _inputs: Any, output: Any) -> Any:
    return tree_map_only(Tensor, partial(_cast, dtype), output)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor
