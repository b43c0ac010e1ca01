"""Checkpoints ``checkpoint-<step>/``, complete or absent, with a manifest of sizes and digests.
Accelerate's ``save_state`` is not used, as it pickles the optimizer and the random states."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from wellposed.errors import CheckpointError
from wellposed.finite_json import from_json, to_json
from wellposed_lab.training.folder import atomic, manifest
from wellposed_lab.training.folder.state import TrainerState

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"
NAME = re.compile(r"^checkpoint-\d+$")
_MISFITS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


Tensors = dict[str, torch.Tensor]


def model_tensors(model: nn.Module) -> Tensors:
    """Return the state of ``model`` with each storage once, under its first name: safetensors
    refuses shared memory, such as tied embeddings. Hugging Face restores ties from that name."""
    state = model.state_dict()
    firsts = set(_first_names(model).values())
    return {name: tensor.cpu().contiguous() for name, tensor in state.items() if name in firsts}


def _first_names(model: nn.Module) -> dict[str, str]:
    """Map each name in the state to the first name of the same storage."""
    firsts: dict[object, str] = {}
    names: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        form = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        shared = (tensor.device, tensor.data_ptr(), *form)
        identity = shared if tensor.numel() else id(tensor)
        names[name] = firsts.setdefault(identity, name)
    return names


def load_model_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the state returned by `model_tensors`; names and shapes must be the same."""
    first = _first_names(model)
    state = model.state_dict()
    state = {**tensors, **{n: tensors[first[n]] for n in state if first[n] in tensors}}
    model.load_state_dict(state, strict=True)


def optimizer_tensors(optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors ``"<parameter>.<name>"`` of the optimizer's state, and all other values."""
    state = optimizer.state_dict()
    tensors: Tensors = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, entries in sorted(state["state"].items()):
        for name, value in sorted(entries.items()):
            if isinstance(value, torch.Tensor):
                tensors[f"{parameter}.{name}"] = value.cpu().contiguous()
            else:
                scalars.setdefault(str(parameter), {})[name] = value
    return tensors, {"groups": state["param_groups"], "scalars": scalars}


def load_optimizer_tensors(
    optimizer: Optimizer, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]
) -> None:
    """Load the state returned by `optimizer_tensors`."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
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
    """Load the generator states returned by `random_tensors`."""
    import numpy

    restore_torch_states(tensors)
    position, has_gauss, gauss = plain["numpy"]
    keys = tensors["numpy"].numpy().astype("uint32")
    numpy.random.set_state(("MT19937", keys, position, has_gauss, gauss))
    version, words, next_gauss = plain["python"]
    random.setstate((version, tuple(words), next_gauss))


def torch_states() -> Tensors:
    """Return the state of torch's generators, without waiting for the device."""
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
    """Return ``tensors`` as one safetensors file with ``plain`` as JSON in its header: the only
    entry, because safetensors writes several in no fixed order. Equal input gives equal bytes."""
    from safetensors.torch import save

    # transformers requires format: pt in files of weights.
    metadata = {"format": "pt"} if plain is None else {"plain": json.dumps(plain, sort_keys=True)}
    return save(dict(tensors), metadata=metadata)


def decode(data: bytes) -> tuple[Tensors, Any]:
    """Return the arguments of `encode`."""
    from safetensors.torch import load

    header = from_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return load(data), from_json(header.get("__metadata__", {}).get("plain", "null"))


def snapshot(
    model: nn.Module,
    optimizer: Optimizer,
    state: TrainerState,
    random_states: list[bytes],
) -> dict[str, bytes]:
    """Return the files of a checkpoint; ``random_states`` has one entry per process."""
    files = {
        MODEL: encode(model_tensors(model)),
        OPTIMIZER: encode(*optimizer_tensors(optimizer)),
        STATE: to_json(dataclasses.asdict(state), indent=2),
        **{random_name(rank): data for rank, data in enumerate(random_states)},
    }
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        files["config.json"] = config.to_json_string().encode()  # for from_pretrained
    return files


def random_name(rank: int) -> str:
    """Return the file name of the random states of process ``rank``."""
    return f"random_states_{rank}.safetensors"


def write_checkpoint(run_folder: Path, step: int, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` as ``checkpoint-<step>``, complete or, on an `OSError`, not at all."""
    folder = run_folder / f"checkpoint-{step}"
    # Digests of the bytes in memory, so that the manifest reveals errors of the disk.
    described = manifest.describe(files)
    listed = {"format": manifest.FORMAT, "step": step, "files": described}
    with atomic.replace_folder(folder) as temporary:
        for name, data in {**files, manifest.MANIFEST: to_json(listed, indent=2)}.items():
            atomic.write_synced(temporary / name, data)
    return folder


def verify(folder: Path) -> None:
    """Check a checkpoint by its manifest; `CheckpointError` names all missing or altered files."""
    manifest.verify(folder, _ADVICE, needed=(MODEL, OPTIMIZER, STATE))


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load only the weights of a checkpoint; its other files may be damaged. Weights that are
    missing, cut, altered or of another model are a `CheckpointError`."""
    manifest.verify(folder, _ADVICE, needed=(MODEL,), only=(MODEL,))
    with _misfits(folder):
        load_model_tensors(model, decode((folder / MODEL).read_bytes())[0])


_ADVICE = (
    "the checkpoint cannot be used: remove it, or continue with --resume auto, which takes the"
    " newest complete one"
)


@contextmanager
def _misfits(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, *_MISFITS) as error:
        raise CheckpointError(f"{folder}: the checkpoint does not fit this run: {error}") from error


def all_checkpoints(run_folder: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first, complete or not."""
    named = [path for path in run_folder.glob("checkpoint-*") if NAME.match(path.name)]
    return sorted(filter(Path.is_dir, named), key=step_of)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    return int(folder.name.rpartition("-")[2])


def dtype_of(run_folder: Path) -> torch.dtype | None:
    """Return the dtype in which a run was begun; None before its first checkpoint.

    It is the narrowest floating one: layers that transformers leaves in float32 are among others of
    16 bits. Every checkpoint of a run has the same, so damaged ones are passed over.
    """
    from wellposed.models import stored_dtypes

    for folder in reversed(all_checkpoints(run_folder)):
        with suppress(OSError, SafetensorError):
            names = (name for name in stored_dtypes(folder) if hasattr(torch, name))
            dtypes: list[torch.dtype] = [getattr(torch, name) for name in names]
            if dtypes:
                return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
    return None


def newest_complete(run_folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that passes `verify`, and the problems of each newer one."""
    damaged = []
    for folder in reversed(all_checkpoints(run_folder)):
        try:
            verify(folder)
            return folder, damaged
        except CheckpointError as error:
            damaged.append(str(error))
    return None, damaged


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    rank: int | None = None,
) -> TrainerState:
    """Load a verified checkpoint into ``model`` and, if given, ``optimizer`` and the generators of
    ``rank``. Unreadable files, or those of another model, are a `CheckpointError`."""
    with _misfits(folder):
        load_model_tensors(model, decode((folder / MODEL).read_bytes())[0])
        if optimizer is not None:
            moments = decode((folder / OPTIMIZER).read_bytes())
            load_optimizer_tensors(optimizer, *moments)
        random_file = None if rank is None else folder / random_name(rank)
        if random_file is not None and random_file.is_file():
            load_random_tensors(*decode(random_file.read_bytes()))
        # Each process wrote a file; in older checkpoints only these give their number.
        processes = len(list(folder.glob(random_name(0).replace("0", "*"))))
        values = {"processes": processes, **from_json((folder / STATE).read_bytes())}
    return TrainerState.from_dict(values, where=str(folder / STATE))


def prune(run_folder: Path, *, step: int, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints but the newest ``keep`` up to ``step`` and the best one. Later ones
    than ``step`` are damaged, or were abandoned by resuming from an earlier checkpoint."""
    folders = all_checkpoints(run_folder)
    newest = [folder for folder in folders if step_of(folder) <= step][-keep:]
    for folder in folders:
        if folder not in newest and step_of(folder) != best_step:
            # Rename first: a kill in the middle must not leave half a checkpoint.
            doomed = folder.with_name(f"{atomic.TEMPORARY}{folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed)
