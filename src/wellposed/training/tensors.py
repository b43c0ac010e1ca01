"""Model, optimizer and random-number state as safetensors and JSON; nothing is pickled."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wellposed.finite_json import from_json

Tensors = dict[str, torch.Tensor]


def model_tensors(model: nn.Module) -> tuple[Tensors, dict[str, str]]:
    """Return the state of ``model`` with every storage once, and the other names of shared tensors.

    safetensors refuses tensors that share memory, as tied embeddings do. The first name in the state is kept, which is
    the one Hugging Face reloads tied weights from.
    """
    kept: Tensors = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        identity = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in seen:
            aliases[name] = seen[identity]
        else:
            seen[identity] = name
            kept[name] = tensor.detach().cpu().contiguous()
    return kept, aliases


def load_model_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give ``model`` the state `model_tensors` returned; names and shapes must be the same."""
    aliases = model_tensors(model)[1]
    state = {**tensors, **{name: tensors[target] for name, target in aliases.items() if target in tensors}}
    model.load_state_dict(state, strict=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors ``"<parameter>.<name>"`` of the optimizer's state, and everything else as plain values."""
    state = optimizer.state_dict()
    tensors: Tensors = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{parameter}.{name}"] = value.detach().cpu().contiguous()
            else:
                scalars.setdefault(str(parameter), {})[name] = value
    return tensors, {"groups": state["param_groups"], "scalars": scalars}


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]
) -> None:
    """Give ``optimizer`` the state `optimizer_tensors` returned."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    for parameter, entries in plain["scalars"].items():
        state.setdefault(int(parameter), {}).update(entries)
    groups = [
        {name: tuple(value) if name == "betas" else value for name, value in group.items()} for group in plain["groups"]
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def random_tensors() -> tuple[Tensors, dict[str, Any]]:
    """Return the state of the generators of torch, NumPy and Python."""
    import numpy

    _, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    tensors: Tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(numpy.asarray(keys).astype("int64"))}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()  # of this process's own device
    version, words, next_gauss = random.getstate()
    plain = {
        "numpy": [int(position), int(has_gauss), float(gauss)],
        "python": [version, list(words), next_gauss],
    }
    return tensors, plain


def load_random_tensors(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
    """Give every generator the state `random_tensors` returned."""
    import numpy

    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
    position, has_gauss, gauss = plain["numpy"]
    numpy.random.set_state(("MT19937", tensors["numpy"].numpy().astype("uint32"), position, has_gauss, gauss))
    version, words, next_gauss = plain["python"]
    random.setstate((version, tuple(words), next_gauss))


def torch_states() -> list[torch.Tensor]:
    """Return the state of torch's generators; cheap, without waiting for the device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return states


def restore_torch_states(states: list[torch.Tensor]) -> None:
    """Undo the random draws since `torch_states`."""
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state(states[1])


def gather_bytes(accelerator: Any, data: bytes) -> list[bytes]:
    """Return the ``data`` of every process; all must be of the same length."""
    if accelerator.num_processes == 1:
        return [data]
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(accelerator.device)
    gathered = accelerator.gather(mine[None]).cpu()
    return [bytes(row.tolist()) for row in gathered]


def encode(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any] | None = None) -> bytes:
    """Return ``tensors`` as one safetensors file with ``plain`` as JSON in its header; equal input, equal bytes.

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
