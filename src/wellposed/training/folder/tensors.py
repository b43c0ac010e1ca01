"""Model, optimizer and random-number state as safetensors and JSON; nothing is pickled."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wellposed.finite_json import from_json
from wellposed.linalg.sharded import cut_like, is_sharded, read

Tensors = dict[str, torch.Tensor]


def model_tensors(model: nn.Module, *, keep: bool = True) -> Tensors:
    """Return the state of ``model`` with every storage once, under its first name.

    safetensors refuses tensors that share memory, as tied embeddings do. The first name in the
    state is kept, which is the one Hugging Face reloads tied weights from. Sharded tensors are
    gathered, so every process calls this; one that does not ``keep`` them returns none.
    """
    kept: Tensors = {}
    names = _first_names(model)
    for name, tensor in model.state_dict().items():
        if names[name] == name:
            whole = read(tensor)
            if keep:
                kept[name] = whole.cpu().contiguous()
    return kept


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name in the state of what each name of it stands for."""
    firsts: dict[object, str] = {}
    names: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_sharded(tensor) or not tensor.numel():
            identity: object = id(tensor)
        else:
            form = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
            identity = (tensor.device, tensor.data_ptr(), *form)
        names[name] = firsts.setdefault(identity, name)
    return names


def load_model_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give ``model`` the state `model_tensors` returned; names and shapes must be the same."""
    first, own = _first_names(model), model.state_dict()
    state = {**tensors, **{name: tensors[first[name]] for name in own if first[name] in tensors}}
    for name in state.keys() & own.keys():
        state[name] = cut_like(own[name], state[name])
    model.load_state_dict(state, strict=True)


def optimizer_tensors(optimizer: Optimizer, *, keep: bool = True) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors ``"<parameter>.<name>"`` of the optimizer's state, and everything else as
    plain values.

    Sharded tensors are gathered, as in `model_tensors`, in one order: a loaded state has another in
    every process.
    """
    state = optimizer.state_dict()
    tensors: Tensors = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, entries in sorted(state["state"].items()):
        for name, value in sorted(entries.items()):
            if isinstance(value, torch.Tensor):
                whole = read(value)
                if keep:
                    tensors[f"{parameter}.{name}"] = whole.cpu().contiguous()
            else:
                scalars.setdefault(str(parameter), {})[name] = value
    return tensors, {"groups": state["param_groups"], "scalars": scalars}


def load_optimizer_tensors(
    optimizer: Optimizer, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]
) -> None:
    """Give ``optimizer`` the state `optimizer_tensors` returned; states of a sharded weight are cut
    like it."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in sorted(tensors.items()):  # a file's order differs in every process
        number, _, name = key.partition(".")
        weight = weights[int(number)]
        value = cut_like(weight, value) if value.shape == weight.shape else value
        state.setdefault(int(number), {})[name] = value
    for parameter, entries in plain["scalars"].items():
        state.setdefault(int(parameter), {}).update(entries)
    groups = [dict(group) for group in plain["groups"]]
    for group in groups:
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def random_tensors() -> tuple[Tensors, dict[str, Any]]:
    """Return the state of the generators of torch, NumPy and Python."""
    import numpy

    _, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    numbers = torch.from_numpy(numpy.asarray(keys).astype("int64"))
    version, words, next_gauss = random.getstate()
    gaussian = [int(position), int(has_gauss), float(gauss)]
    plain = {"numpy": gaussian, "python": [version, list(words), next_gauss]}
    return {**torch_states(), "numpy": numbers}, plain


def load_random_tensors(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
    """Give every generator the state `random_tensors` returned."""
    import numpy

    restore_torch_states(tensors)
    position, has_gauss, gauss = plain["numpy"]
    keys = tensors["numpy"].numpy().astype("uint32")
    numpy.random.set_state(("MT19937", keys, position, has_gauss, gauss))
    version, words, next_gauss = plain["python"]
    random.setstate((version, tuple(words), next_gauss))


def torch_states() -> Tensors:
    """Return the state of torch's generators; cheap, without waiting for the device."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()  # of this process's own device
    return states


def restore_torch_states(states: Mapping[str, torch.Tensor]) -> None:
    """Undo the random draws since `torch_states`."""
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def encode(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any] | None = None) -> bytes:
    """Return ``tensors`` as one safetensors file with ``plain`` as JSON in its header; equal input,
    equal bytes.

    safetensors writes several entries of its header in no fixed order, so there is only ever one.
    """
    from safetensors.torch import save

    # transformers wants to read format: pt in files of weights.
    metadata = {"format": "pt"} if plain is None else {"plain": json.dumps(plain, sort_keys=True)}
    return save(dict(tensors), metadata=metadata)


def decode(data: bytes) -> tuple[Tensors, Any]:
    """Return what `encode` was given."""
    from safetensors.torch import load

    header = from_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return load(data), from_json(header.get("__metadata__", {}).get("plain", "null"))
